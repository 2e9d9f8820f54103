"""`python -m tests.chaos --seed N --minutes M`: faults for so long; prints a report as JSON, exits with 1 if unclean."""

from __future__ import annotations

import argparse
import json
import random
import sys

from tests.chaos.harness.run import Length, run


def main() -> int:
    """Play as many pieces as are wanted, each with servers of its own and its own verdict."""
    arguments = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    arguments.add_argument("--seed", type=int, default=random.randrange(1, 10**6))
    arguments.add_argument("--minutes", type=float, default=1.0, help="of each piece")
    arguments.add_argument("--pieces", type=int, default=1, help="runs, one after the other, of seeds that follow")
    arguments.add_argument("--faults", type=int, default=0, help="at least so many in each piece")
    arguments.add_argument("--every", type=float, default=2.5, help="seconds between two faults, on average")
    wanted = arguments.parse_args()
    clean = True
    for seed in range(wanted.seed, wanted.seed + wanted.pieces):
        print(f"seed {seed}", file=sys.stderr, flush=True)  # noqa: T201
        report = run(seed, Length(60 * wanted.minutes, wanted.faults, wanted.every))
        print(json.dumps(report), flush=True)  # noqa: T201
        clean &= report["clean"]
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
