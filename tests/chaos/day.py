"""`python -m tests.chaos.day --seed N --minutes M`: a day in some minutes, with automatic routes and with fixed ones.

Prints a report of each as JSON and one that compares them; exits 1 if one is not clean. `--spark` has Spark's audits of
order and effects, and a certificate, judge the day with automatic routes too.
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
    arguments.add_argument("--spark", action="store_true", help="Spark's audits and a certificate judge it too")
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
    """Have Spark judge order and effects of a run, and a certificate of it."""
    from mqlayer.spark.session import session
    from tests.proof.audit import complaints

    spark = session("mqlayer-day", master="local[2]", **{"spark.ui.enabled": "false"})
    try:
        dsn = scene.settings.control_dsn()
        yield from complaints(spark, dsn, prefix=scene.prefix, topics=[TOPIC], records=scene.committed())
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
