"""`python -m tests.chaos.day --seed N --minutes M`: a day in some minutes, with automatic routes and with fixed ones.

Prints a report of each as JSON and one that compares them; exits 1 if one is not clean. `--spark` has Spark's order
audit judge the day with automatic routes too.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator

from tests.chaos.__main__ import show
from tests.chaos.actors import TOPIC
from tests.chaos.harness.day import compared, play_day
from tests.chaos.harness.run import Audit, shown
from tests.chaos.harness.scene import Scene


def main() -> int:
    """Play the days that are wanted."""
    arguments = argparse.ArgumentParser(prog="python -m tests.chaos.day", description=__doc__)
    arguments.add_argument("--seed", type=int, default=random.randrange(1, 10**6))
    arguments.add_argument("--minutes", type=float, default=10.0, help="of a day")
    arguments.add_argument("--spark", action="store_true", help="Spark's order audit judges it too")
    arguments.add_argument("--only-automatic", action="store_true", help="no second day with the best fixed route")
    wanted = arguments.parse_args()
    audits: list[Audit] = [spark_audit] if wanted.spark else []
    automatic = play_day(wanted.seed, 60 * wanted.minutes, automatic=True, audits=audits)
    show(shown(automatic))
    if wanted.only_automatic:
        return 0 if automatic["clean"] else 1
    fixed = play_day(wanted.seed, 60 * wanted.minutes, automatic=False, partitions=max(4, automatic["partitions_most"]))
    show(shown(fixed))
    show(compared(automatic, fixed))
    return 0 if automatic["clean"] and fixed["clean"] else 1


def spark_audit(scene: Scene) -> Iterator[str]:
    """Have Spark judge what is archived of a run."""
    from mqlayer.spark.session import session
    from tests.proof.audit import archive_and_audit

    spark = session("mqlayer-day", master="local[2]", **{"spark.ui.enabled": "false"})
    try:
        found = archive_and_audit(spark, scene.settings.control_dsn(), prefix=scene.prefix, topics=[TOPIC])
    finally:
        spark.stop()
    if not found.good or found.facts["records"] != scene.committed():
        yield f"order audit: {found.facts} of {scene.committed()} messages"


if __name__ == "__main__":
    sys.exit(main())
