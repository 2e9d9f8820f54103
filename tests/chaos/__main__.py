"""`python -m tests.chaos --seed N --minutes M`: faults for so long; prints a report as JSON, exits 1 if not clean.

With `--plant NAME` the system has that bug, and has to be caught: pieces of half a minute, until one is not clean.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any, Final

from tests.chaos.harness.plants import HARMLESS, PLANTS
from tests.chaos.harness.run import Length, run

HUNT: Final = Length(seconds=15, faults=8, every_s=1.0, settling_s=40.0, stall_s=12.0, look_every_s=3.0)
HUNT_PIECES: Final = 6


def main() -> int:
    """Play as many pieces as are wanted, each with servers of its own and its own verdict."""
    arguments = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    arguments.add_argument("--seed", type=int, default=random.randrange(1, 10**6))
    arguments.add_argument("--minutes", type=float, default=1.0, help="of each piece")
    arguments.add_argument("--pieces", type=int, default=1, help="runs, one after the other, of seeds that follow")
    arguments.add_argument("--faults", type=int, default=0, help="at least so many in each piece")
    arguments.add_argument("--every", type=float, default=2.5, help="seconds between two faults, on average")
    arguments.add_argument("--plant", choices=sorted(PLANTS), help="a bug to be caught")
    wanted = arguments.parse_args()
    if wanted.plant:
        found = hunt(wanted.plant, wanted.seed)
        show(found)
        return 0 if bool(found["caught"]) != (wanted.plant in HARMLESS) else 1
    clean = True
    for seed in range(wanted.seed, wanted.seed + wanted.pieces):
        report = run(seed, Length(60 * wanted.minutes, wanted.faults, wanted.every))
        show(report)
        clean &= report["clean"]
    return 0 if clean else 1


def hunt(bug: str, seed: int) -> dict[str, Any]:
    """Run with a bug until it is caught, or long enough; say by what, and after how many seconds."""
    began, pieces = time.monotonic(), 1
    report = run(seed, HUNT, bug=bug)
    while report["clean"] and pieces < HUNT_PIECES:
        report = run(seed + pieces, HUNT, bug=bug)
        pieces += 1
    took = {"plant": bug, "seed": seed, "seconds": round(time.monotonic() - began, 1), "pieces": pieces}
    shown = ("violations", "stuck", "examples", "differences")
    return took | {"caught": not report["clean"]} | {name: report[name] for name in shown}


def show(report: dict[str, Any]) -> None:
    """Print a line of JSON."""
    print(json.dumps(report), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
