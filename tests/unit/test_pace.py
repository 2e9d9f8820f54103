"""The pace of a stretch of a run: by what was published and handled in it, and how long its messages waited."""

from __future__ import annotations

from tests.proof.history import Deliver, Event, Phase, Publish, Record
from tests.proof.pace import SECOND_NS, pace


def line(second: float, event: Event, phase: Phase = "ok") -> Record:
    return Record(process="p", pid=1, operation=1, phase=phase, at_ns=int(second * SECOND_NS), event=event)


def test_first_ends_count_and_waits_go_beyond_the_stretch() -> None:
    def published(second: float, seq: int, key: str = "a") -> Record:
        return line(second, Publish(topic="t", key=key, source=1, lp=1, seq=seq))

    def handled(second: float, seq: int, key: str = "a", phase: Phase = "ok") -> Record:
        event = Deliver(topic="t", key=key, source=1, lp=1, seq=seq, group="g", partition=1)
        return line(second, event, phase)

    found = pace(
        [
            published(0.5, 1), published(1.0, 2), published(1.5, 3), published(1.6, 4, "b"),
            handled(1.0, 1), handled(1.1, 2, phase="fail"), handled(1.25, 2), handled(1.3, 2), handled(5.5, 3),
            handled(1.7, 4, "b"),
        ],
        SECOND_NS, 3 * SECOND_NS, without={"b"},
    )  # fmt: skip
    assert (found.seconds, found.published, found.handled) == (2.0, 2, 2)
    assert (found.per_s, found.kept_up, found.longest_wait_s, found.p99_wait_s) == (1.0, 1.0, 4.0, 0.25)
