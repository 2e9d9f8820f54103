"""`python -m tests.matrix` runs a selection of the tests on other versions of servers and Python, row by row.

It prints a table at the end, and exits 1 where a test failed or a row could not be run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence

from tests.matrix.chaos import chaos_table, pairs, run_pair
from tests.matrix.engine import IMAGES_PLACE
from tests.matrix.plan import PAIRS, PARTS, ROWS
from tests.matrix.programs import UnpackedSeries, cache_place
from tests.matrix.report import table
from tests.matrix.runs import run_row


def main() -> int:
    """Run the rows that are wanted."""
    arguments = argparse.ArgumentParser(prog="scripts/matrix", description=__doc__)
    names = [row.name for row in ROWS]
    arguments.add_argument("--list", action="store_true", help="print rows and parts, and run nothing")
    arguments.add_argument("--only", action="append", choices=names, metavar="ROW", help="this row; may be repeated")
    arguments.add_argument("--part", action="append", choices=[*PARTS], metavar="NAME", help="this part of the tests")
    arguments.add_argument("--chaos", action="store_true", help="chaos on each pair of servers, in place of rows")
    arguments.add_argument(
        "--pair", action="append", choices=[one.name for one in PAIRS], metavar="NAME", help="only these"
    )
    arguments.add_argument("--fresh", action="store_true", help="take the packages of today, not those kept")
    arguments.add_argument("-n", default="4", metavar="PROCESSES", help="processes of pytest (4)")
    wanted = arguments.parse_args()
    if wanted.chaos:
        return chaos(wanted.pair or (), only_list=wanted.list)
    rows = [row for row in ROWS if row.name in (wanted.only or names)]
    if wanted.list:
        for row in rows:
            say(f"{row.name}: {', '.join(row.parts)}")
        return 0
    cache = cache_place()
    if wanted.fresh:
        for series in {series for row in rows for series in row.series}:
            UnpackedSeries(series, cache).remove()
        if any(row.images for row in rows):
            shutil.rmtree(cache / IMAGES_PLACE, ignore_errors=True)
    results = []
    for row in rows:
        sys.stderr.write(f"matrix: {row.name}\n")
        results.append(run_row(row, cache, parts=tuple(wanted.part or ()), processes=wanted.n))
    say(table(results))
    for result in results:
        for line in (*([result.trouble] if result.trouble else []), *result.failed, *result.notes):
            say(f"{result.name}: {line}")
    return 0 if all(result.good for result in results) else 1


def chaos(names: Sequence[str], *, only_list: bool) -> int:
    """Run chaos on these pairs."""
    chosen = pairs(names)
    if only_list:
        for pair in chosen:
            say(pair.name)
        return 0
    results = []
    for pair in chosen:
        sys.stderr.write(f"matrix: chaos on {pair.name}\n")
        results.append(run_pair(pair, cache_place()))
        say(chaos_table(results[-1:]).splitlines()[-1])
    say(chaos_table(results))
    for result in results:
        if result.trouble:
            say(f"{result.name}: {result.trouble}")
    return 0 if all(result.good for result in results) else 1


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
