"""A process's instruments, and their parts for members, senders and relays."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mqlayer.errors import InvalidInput
from mqlayer.metrics.byte_counts import LARGE_BODY_BYTES
from mqlayer.metrics.catalog import (
    BUCKETS_S,
    CATALOG,
    DELAY_BUCKETS_S,
    ERROR,
    GROUP,
    OPERATION,
    OPERATION_TYPE,
    SYSTEM,
    TOPIC,
)
from mqlayer.metrics.sources import CountSources, ReadCounts, ReadLevel
from mqlayer.metrics.turns import TurnTimer, failed_class
from mqlayer.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

MOST_ERROR_CLASSES: Final = 20
TOGETHER: Final = 64
OTHER: Final = "_OTHER"
"""The conventions' name for any further class."""
OUTCOMES: Final = (
    "handled", "failed", "timed_out", "paused", "blocked", "parked", "unparked", "dead", "skipped", "unmatched", "held",
    "expired",
)  # fmt: skip
CONSUMED: Final = ("handled", "failed", "paused", "held")
RECEIVED: Final = "received"
"""A receiver's count of messages that calls returned."""
PRODUCED: Final = (
    "stored", "repeated", "failed", "aborted", "withdrawn", "lost", "duplicates", "diverted", "unreplicated",
)  # fmt: skip
_OURS: Final = {SYSTEM: "mqlayer"}
_MEMBER_COUNTS: Final = {
    "mqlayer.consumer.settled": "settled",
    "mqlayer.consumer.fenced": "fenced",
    "mqlayer.consumer.leases.lost": "leases_lost",
    "mqlayer.consumer.parking.full": "parking_full",
}
Measurement = tuple[float, Mapping[str, str]]
C = TypeVar("C")
R = TypeVar("R")


class Meters:
    """The instruments of one provider. Thread-safe."""

    def __init__(self, provider: MeterProvider) -> None:
        self._meter = provider.get_meter("mqlayer")
        self._classes: set[str] = set()
        self._labels: dict[tuple[str, str], Mapping[str, str]] = {}
        self.forget()
        self.failures = self._counter("mqlayer.consumer.failures")
        self.operations = self._histogram("messaging.client.operation.duration", BUCKETS_S)
        self.turns = self._histogram("messaging.process.duration", BUCKETS_S)
        self._delay = self._histogram("mqlayer.relay.delay", DELAY_BUCKETS_S)
        self._observe_members()
        self.observe("messaging.client.sent.messages", self._sent_messages)
        self.observe("mqlayer.producer.messages", self._produced)
        self.observe("mqlayer.producer.pending", lambda: _levels(self._producers, ()))
        self.observe("mqlayer.relay.lp_sets", lambda: _levels(self._relays, ()))
        self.observe("mqlayer.relay.progress.waits", self._failed_waits)
        self.observe("mqlayer.relay.progress.delay", self._progress_delays)
        self.observe("mqlayer.process.ready", self._readiness)
        self.observe("mqlayer.large_bodies.moved", _large_body_bytes)

    def forget(self) -> None:
        """Count from zero, in a forked child; the provider keeps its own sums."""
        # A thread that held a lock at the fork does not exist in the child.
        self._lock = threading.Lock()
        self._members, self._relays = CountSources[str](), CountSources[str]()
        self._producers = CountSources[tuple[str, str, str]]()
        self._confirmations = CountSources[str]()
        self._delays: dict[object, Callable[[], Mapping[str, float]]] = {}
        self._sent: Counter[tuple[str, str]] = Counter()
        self._durations: list[tuple[Any, float, Mapping[str, str]]] = []
        self.ready: Callable[[], bool] | None = None
        """Whether this process serves, where it has an endpoint."""

    def observe(self, name: str, read: Callable[[], Iterable[Measurement]]) -> None:
        """Have a catalogued counter or gauge read at each scrape."""
        from opentelemetry.metrics import Observation

        def callback(_: CallbackOptions) -> Sequence[Observation]:
            return [Observation(value, labels) for value, labels in read()]

        one = CATALOG[name]
        counter = one.kind == "counter"
        create = self._meter.create_observable_counter if counter else self._meter.create_observable_gauge
        create(name, callbacks=[callback], unit=one.unit, description=one.text)

    def member(self, topic: str, group: str) -> MemberMeters:
        """Return the part of a member."""
        return MemberMeters(self, topic, group)

    def add_member(self, topic: str, group: str, counts: ReadCounts[str], partitions: ReadLevel) -> Callable[[], None]:
        """Count a member until the returned function is called."""
        return self._members.add((topic, group), counts, partitions)

    def add_producer(self, counts: ReadCounts[tuple[str, str, str]], pending: ReadLevel) -> Callable[[], None]:
        """Count a producer likewise, by topic, outcome and class of error or ''."""
        return self._producers.add((), counts, pending)

    def add_relay(self, lp_sets: ReadLevel) -> Callable[[], None]:
        """Count a relay likewise."""
        return self._relays.add((), dict, lp_sets)

    def add_confirmations(
        self, failed: ReadCounts[str], delays: Callable[[], Mapping[str, float]]
    ) -> Callable[[], None]:
        """Count a relay's waits for durability classes likewise."""
        handle = object()
        self._delays[handle] = delays
        end_counts = self._confirmations.add((), failed, lambda: 0)

        def end() -> None:
            self._delays.pop(handle, None)
            end_counts()

        return end

    def sent(self, topic: str, count: int, seconds: float, error: str = "") -> None:
        """Record an answered append of `count` messages. `error`: class of its refusal."""
        known = topic, self.error_class(error) if error else ""
        with self._lock:
            self._sent[known] += count
            labels = self._labels.get(known)
            if labels is None:
                labels = self._labels[known] = {**_sent_labels(*known), OPERATION_TYPE: "send"}
        self.note(self.operations, seconds, labels)

    def note(self, histogram: Any, seconds: float, labels: Mapping[str, str]) -> None:
        """Keep a duration; a few are recorded together, since the SDK's code is slow when it is cold."""
        with self._lock:
            self._durations.append((histogram, seconds, labels))
            few = len(self._durations) < TOGETHER
        if not few:
            self._record_durations()

    def _record_durations(self) -> None:
        with self._lock:
            durations, self._durations = self._durations, []
        for histogram, seconds, labels in durations:
            histogram.record(seconds, labels)

    def relay_delay(self, seconds: float) -> None:
        """Record the age of a chunk's first row."""
        self.note(self._delay, max(0.0, seconds), {})

    def error_class(self, name: str) -> str:
        """Return a class, or `_OTHER` after 20 others."""
        if name not in self._classes:
            if len(self._classes) >= MOST_ERROR_CLASSES:
                return OTHER
            self._classes.add(name)
        return name

    def _counter(self, name: str) -> Any:
        return self._meter.create_counter(name, unit=CATALOG[name].unit, description=CATALOG[name].text)

    def _histogram(self, name: str, bounds: Sequence[float]) -> Any:
        one = CATALOG[name]
        return self._meter.create_histogram(
            name, unit=one.unit, description=one.text, explicit_bucket_boundaries_advisory=bounds
        )

    def _observe_members(self) -> None:
        self.observe("mqlayer.consumer.messages", self._outcomes)
        self.observe("messaging.client.consumed.messages", self._consumed)
        self.observe("mqlayer.consumer.partitions", lambda: _levels(self._members, ("topic", "group")))
        for name, count in _MEMBER_COUNTS.items():
            self.observe(name, lambda count=count: self._member_count(count))  # type: ignore[misc]

    def _outcomes(self) -> Iterable[Measurement]:
        for (topic, group), counts in self._members.totals().items():
            for outcome in OUTCOMES:
                yield counts[outcome], {"topic": topic, "group": group, "outcome": outcome}

    def _consumed(self) -> Iterable[Measurement]:
        for (topic, group), counts in self._members.totals().items():
            # Of a receiver: the conventions count a delivery once, when it is received.
            received = counts.get(RECEIVED)
            operation = "process" if received is None else "receive"
            labels = {**_OURS, OPERATION: operation, TOPIC: topic, GROUP: group}
            yield sum(counts[one] for one in CONSUMED) if received is None else received, labels

    def _member_count(self, name: str) -> Iterable[Measurement]:
        for (topic, group), counts in self._members.totals().items():
            yield counts[name], {"topic": topic, "group": group}

    def _sent_messages(self) -> Iterable[Measurement]:
        self._record_durations()
        with self._lock:
            found = dict(self._sent)
        for known, count in found.items():
            yield count, _sent_labels(*known)

    def _failed_waits(self) -> Iterable[Measurement]:
        for counts in self._confirmations.totals().values():
            for durability, count in counts.items():
                yield count, {"durability": durability}

    def _progress_delays(self) -> Iterable[Measurement]:
        longest: dict[str, float] = {}
        for delays in self._delays.copy().values():
            for durability, seconds in delays().items():
                longest[durability] = max(seconds, longest.get(durability, 0.0))
        for durability, seconds in longest.items():
            yield seconds, {"durability": durability}

    def _readiness(self) -> Iterable[Measurement]:
        if self.ready is not None:
            yield int(self.ready()), {}

    def _produced(self) -> Iterable[Measurement]:
        for counts in self._producers.totals().values():
            of_topics = {(topic, outcome, "") for topic, _, _ in counts for outcome in PRODUCED}
            of_classes: Counter[tuple[str, str, str]] = Counter(dict.fromkeys(of_topics, 0))
            for (topic, outcome, error), count in counts.items():
                of_classes[topic, outcome, self.error_class(error) if error else ""] += count
            for (topic, outcome, error), count in of_classes.items():
                labels = {"topic": topic, "outcome": outcome}
                yield count, {**labels, ERROR: error} if error else labels


class MemberMeters:
    """One member's recordings."""

    def __init__(self, meters: Meters, topic: str, group: str) -> None:
        self._meters, self._topic, self._group = meters, topic, group
        names = {TOPIC: topic, GROUP: group}
        self._process = {**_OURS, OPERATION: "process", OPERATION_TYPE: "process", **names}
        self._receive, self._settle = (
            {**_OURS, OPERATION: operation, OPERATION_TYPE: operation, **names} for operation in ("receive", "settle")
        )

    def count(self, counts: ReadCounts[str], partitions: ReadLevel) -> Callable[[], None]:
        """Count this member until the returned function is called."""
        return self._meters.add_member(self._topic, self._group, counts, partitions)

    def turn_timer(self) -> TurnTimer:
        """Return a worker's timer."""
        return TurnTimer(self._turn)

    def failed(self, error: BaseException) -> None:
        """Record a failed attempt, in its worker."""
        name = self._meters.error_class(type(error).__name__)
        failed_class.set(name)
        self._meters.failures.add(1, {"topic": self._topic, "group": self._group, ERROR: name})

    def settling(self, call: Callable[[C], R], commands: C) -> R:
        """Make and record a settling call."""
        return self._timed(call, commands, self._settle)

    def receiving(self, call: Callable[[C], R], commands: C) -> R:
        """Make and record a receiving call."""
        return self._timed(call, commands, self._receive)

    def _timed(self, call: Callable[[C], R], commands: C, labels: Mapping[str, str]) -> R:
        began = time.perf_counter()
        try:
            answer = call(commands)
        except BaseException as error:
            labels = {**labels, ERROR: self._meters.error_class(type(error).__name__)}
            raise
        finally:
            self._meters.note(self._meters.operations, time.perf_counter() - began, labels)
        return answer

    def _turn(self, seconds: float, error: str) -> None:
        labels = {**self._process, ERROR: error} if error else self._process
        self._meters.note(self._meters.turns, seconds, labels)


def _sent_labels(topic: str, error: str) -> dict[str, str]:
    labels = {**_OURS, OPERATION: "send", TOPIC: topic}
    return {**labels, ERROR: error} if error else labels


def _large_body_bytes() -> Iterable[Measurement]:
    for (operation, store), size in LARGE_BODY_BYTES.totals().items():
        yield size, {"operation": operation, "store": store}


def _levels(sources: CountSources[Any], names: tuple[str, ...]) -> Iterable[Measurement]:
    for labels, level in sources.levels().items():
        yield level, dict(zip(names, labels, strict=True))


def check_packages() -> None:
    """Raise InvalidInput without the extra."""
    if find_spec("opentelemetry") is None or find_spec("prometheus_client") is None:
        raise InvalidInput("metrics need more packages: pip install 'mqlayer[otel]'")


class _Process:
    def __init__(self) -> None:
        self.making = threading.Lock()
        self.meters: Meters | None = None

    def forked(self) -> None:
        self.making = threading.Lock()
        if self.meters is not None:
            self.meters.forget()


_process: Final = _Process()
os.register_at_fork(after_in_child=_process.forked)


def meters_of(settings: Settings) -> Meters | None:
    """Return this process's meters; None if off. Raises InvalidInput without the extra."""
    return process_meters() if settings.metrics else None


def process_meters() -> Meters:
    """Return this process's meters, on the global provider. Raises as `meters_of`."""
    with _process.making:
        if _process.meters is None:
            check_packages()
            from opentelemetry.metrics import get_meter_provider

            _process.meters = Meters(get_meter_provider())
        return _process.meters


def use_provider(provider: MeterProvider) -> None:
    """Record to another provider than the global one from now on."""
    with _process.making:
        _process.meters = Meters(provider)
