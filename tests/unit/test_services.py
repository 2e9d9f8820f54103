"""What a background loop tells of failures: one line, then one with a count, then that it goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from mqlayer.errors import StoreUnavailable
from mqlayer.logs import event_of
from mqlayer.runtime.service import Service
from tests.fixtures.wait import wait_until


class Scripted(Service):
    """Each pass raises the next error, or does nothing."""

    def __init__(self, errors: Sequence[Exception | None]) -> None:
        super().__init__("scripted", title="the script", event="reading", retry_s=0.001)
        self._errors = list(errors)

    def _wait_s(self) -> float | None:
        return 0.001

    def _pass(self) -> None:
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error

    @property
    def through(self) -> bool:
        return not self._errors


def told(errors: Sequence[Exception | None], caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    caplog.set_level(logging.INFO)
    service = Scripted([*errors, None, None])
    service.start()
    wait_until(lambda: service.through, what="the script")
    assert service.stop(10)
    return [(event_of(record), record.__dict__["failures"]) for record in caplog.records]


def test_a_store_that_is_away_is_one_line_and_then_one_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    away = [StoreUnavailable("node n-1", "it does not answer") for _ in range(33)]
    counts = [(count, "reading_waits") for count in (1, 5, 30)]
    assert told(away, caplog) == [(event, count) for count, event in counts] + [("reading_goes_on", 33)]


def test_another_reason_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    errors = [
        StoreUnavailable("n-1", "one"),
        StoreUnavailable("n-1", "one"),
        StoreUnavailable("n-1", "two"),
        KeyError(),
    ]
    waits = [("reading_waits", 1), ("reading_waits", 3), ("reading_failed", 4), ("reading_goes_on", 4)]
    assert told(errors, caplog) == waits


def test_after_it_went_on_the_next_failure_is_a_first_one(caplog: pytest.LogCaptureFixture) -> None:
    one = StoreUnavailable("n-1", "one")
    assert told([one, None, one], caplog) == [("reading_waits", 1), ("reading_goes_on", 1)] * 2
