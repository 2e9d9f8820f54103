"""Metrics without servers: turns are added up, totals never fall, labels stay few."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from mqlayer.errors import InvalidInput
from mqlayer.metrics import CATALOG, LARGE_BODY_BYTES, Meters, meters_of, metrics_page
from mqlayer.metrics import meters as meters_module
from mqlayer.metrics.sources import CountSources
from mqlayer.metrics.turns import TurnTimer, failed_class
from mqlayer.settings import Settings


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Turns:
    """A timer whose samples are kept."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.samples: list[tuple[float, str]] = []
        self._timer = TurnTimer(lambda *sample: self.samples.append(sample), self.clock)

    def take(self, seconds: float, error: str = "") -> None:
        def work() -> None:
            self.clock.spend(seconds)
            failed_class.set(error)

        self._timer.timed(work)()

    def take_async(self, seconds: float) -> None:
        async def work() -> None:
            self.clock.spend(seconds)

        asyncio.run(self._run(self._timer.timed_async(work)))

    @staticmethod
    async def _run(turn: object) -> None:
        assert callable(turn)
        await turn()


@pytest.fixture
def turns() -> Turns:
    return Turns()


def rounded(samples: list[tuple[float, str]]) -> list[tuple[float, str]]:
    return [(round(seconds, 6), error) for seconds, error in samples]


def test_quick_turns_are_one_sample_of_five_milliseconds(turns: Turns) -> None:
    for _ in range(11):
        turns.take(0.001)
    assert rounded(turns.samples) == [(0.005, ""), (0.005, "")]


def test_a_slow_turn_is_a_sample_of_its_own_behind_the_quick_ones(turns: Turns) -> None:
    turns.take(0.002)
    turns.take(0.3)
    turns.take_async(0.02)
    assert rounded(turns.samples) == [(0.002, ""), (0.3, ""), (0.02, "")]


def test_a_turn_with_a_failure_is_a_sample_with_its_class(turns: Turns) -> None:
    turns.take(0.001, "KeyError")
    turns.take(0.001)
    assert rounded(turns.samples) == [(0.001, "KeyError")]


def test_a_seldom_turn_is_a_sample_at_once(turns: Turns) -> None:
    turns.clock.spend(5.0)
    turns.take(0.0001)
    assert rounded(turns.samples) == [(0.0001, "")]


def test_totals_keep_what_ended_sources_counted_and_levels_do_not() -> None:
    sources, counts = CountSources[str](), {"handled": 3}
    end = sources.add(("orders", "g"), lambda: counts, lambda: 2)
    sources.add(("orders", "g"), lambda: {"handled": 10}, lambda: 1)
    assert sources.totals() == {("orders", "g"): Counter(handled=13)}
    assert sources.levels() == {("orders", "g"): 3}
    counts["handled"] = 4
    end()
    end()
    counts["handled"] = 99
    assert sources.totals() == {("orders", "g"): Counter(handled=14)}
    assert sources.levels() == {("orders", "g"): 1}


@pytest.fixture
def reader() -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    yield reader
    reader.shutdown()


@pytest.fixture
def meters(reader: InMemoryMetricReader) -> Meters:
    return Meters(MeterProvider(metric_readers=[reader], shutdown_on_exit=False))


def points(reader: InMemoryMetricReader) -> dict[str, list[dict[str, object]]]:
    """Return the labels of each point by its instrument."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: [dict(point.attributes or {}) for point in metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_every_point_has_the_labels_of_the_catalog_only(meters: Meters, reader: InMemoryMetricReader) -> None:
    member = meters.member("orders", "ledger")
    member.count(lambda: {"handled": 1}, lambda: 1)
    member.failed(ValueError("order-7"))
    with pytest.raises(ZeroDivisionError):
        member.settling(lambda _: 1 / 0, ())
    member.settling(len, ())
    member.receiving(len, ())
    member.turn_timer().timed(lambda: None)()
    meters.add_producer(lambda: {("orders", "stored", ""): 1, ("orders", "failed", "BacklogFull"): 1}, lambda: 0)
    meters.add_relay(lambda: 16)
    meters.sent("orders", 500, 0.01)
    meters.sent("orders", 1, 0.01, "BacklogFull")
    meters.relay_delay(0.02)
    meters.add_confirmations(lambda: {"quorum": 1}, lambda: {"quorum": 2.0})
    meters.ready = lambda: True
    LARGE_BODY_BYTES.add("read", "postgres", 5)
    found = points(reader)
    assert set(found) == {one.name for one in CATALOG.values() if one.place == "process"} - {
        "messaging.process.duration"
    }
    for name, labels in found.items():
        assert all(set(one) <= set(CATALOG[name].labels) for one in labels), name
    assert {"topic": "orders", "group": "ledger", "error.type": "ValueError"} in found["mqlayer.consumer.failures"]


def test_classes_of_errors_are_bounded(meters: Meters, reader: InMemoryMetricReader) -> None:
    member = meters.member("orders", "ledger")
    for number in range(50):
        member.failed(type(f"Error{number}", (Exception,), {})())
    classes = {one["error.type"] for one in points(reader)["mqlayer.consumer.failures"]}
    assert len(classes) == 21
    assert "_OTHER" in classes


def test_metrics_that_are_off_make_nothing() -> None:
    assert meters_of(Settings()) is None
    assert metrics_page(Settings()) is None


def test_the_setting_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters_module._process, "meters", None)
    monkeypatch.setattr(meters_module, "find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match=r"pip install 'mqlayer\[otel\]'"):
        meters_of(Settings(metrics=True))
