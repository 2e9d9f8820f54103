"""`python -m tests.chaos --seed N --minutes M`: faults for so long; prints a report as JSON, exits 1 if not clean.

With `--pieces` there is a line for each, and one that sums them up. A piece that the harness itself broke off has its
line too, with what it was, and is not clean; the others go on.

With `--cluster` one of two nodes is a Redis Cluster of three shards with replicas: shards fail over with what their
replicas have, restart, are emptied, and pass slots on.

With `--plant NAME` the system has that bug, and has to be caught: pieces of a quarter of a minute, or a race of its
own, until one is not clean. `--plant all` does that with every bug, and prints a table.

Spark's order audit is no part of this: `test_chaos.py` has it judge the run of the suite.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import traceback
from typing import Any

from tests.chaos.harness.cluster_run import ClusterRun
from tests.chaos.harness.plant_hunt import NAMES, hunt, hunt_all, table
from tests.chaos.harness.run import SHORT, Length, run, shown, total


def main() -> int:
    """Play as many pieces as are wanted, each with servers of its own and its own verdict."""
    arguments = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    arguments.add_argument("--seed", type=int, default=random.randrange(1, 10**6))
    arguments.add_argument("--minutes", type=float, default=1.0, help="of each piece")
    arguments.add_argument("--pieces", type=int, default=1, help="runs, one after the other, of seeds that follow")
    arguments.add_argument("--faults", type=int, default=0, help="at least so many in each piece")
    arguments.add_argument("--every", type=float, default=2.5, help="seconds between two faults, on average")
    arguments.add_argument("--short", action="store_true", help="each piece of a minute, with 60 faults at least")
    arguments.add_argument("--plant", choices=["all", *sorted(NAMES)], help="a bug to be caught")
    arguments.add_argument("--cluster", action="store_true", help="on a Redis Cluster")
    wanted = arguments.parse_args()
    if wanted.plant:
        return 0 if hunted(wanted.plant, wanted.seed) else 1
    length = SHORT if wanted.short else Length(60 * wanted.minutes, wanted.faults, wanted.every)
    reports, broken_off = [], 0
    for seed in range(wanted.seed, wanted.seed + wanted.pieces):
        try:
            reports.append(run(seed, length, form=ClusterRun if wanted.cluster else None))
        except Exception as error:  # noqa: BLE001 - whatever it is: what was measured before must not be lost by it
            traceback.print_exc()
            show({"seed": seed, "clean": False, "broken_off": type(error).__name__})
            broken_off += 1
        else:
            show(shown(reports[-1]))
    if wanted.pieces > 1 and reports:
        show(total(reports) | {"broken_off": broken_off})
    return 0 if all(report["clean"] for report in reports) and not broken_off else 1


def hunted(name: str, seed: int) -> bool:
    """Hunt one bug or all, and say whether what came of it is as it must be."""
    if name != "all":
        found = [hunt(name, seed)]
        show(found[0])
    else:
        found = []
        for one in hunt_all(NAMES, seed):
            found.append(one)
            show(one)
        print(table(found), flush=True)  # noqa: T201
    return all(one["as_expected"] for one in found)


def show(report: dict[str, Any]) -> None:
    """Print a line of JSON."""
    print(json.dumps(report), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
