"""The exporter's thread: one sample per interval, for any number of scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from mqlayer.errors import MqlayerError
from mqlayer.exporter.samples import Samples, control_samples, outbox_samples
from mqlayer.metrics import CATALOG, Measurement, Meters
from mqlayer.runtime.runtime import Runtime
from mqlayer.runtime.service import Service

OLD_AFTER_INTERVALS: Final = 3
_OWN: Final = ("mqlayer.exporter.sample.age", "mqlayer.exporter.sample.duration", "mqlayer.exporter.failures")


class SystemExporter(Service):
    """Samples the system every `every_s` seconds for the instruments of `meters`.

    A part that could not be read has no samples until it can; all expire after three intervals.
    """

    def __init__(self, runtime: Runtime, meters: Meters, *, every_s: float = 15.0, by_partition: bool = False) -> None:
        super().__init__("mqlayer-exporter", title="the exporter", event="exporter", retry_s=0.0)
        self.every_s, self._due = every_s, True
        self._parts: tuple[Callable[[], Samples], ...] = (
            partial(control_samples, runtime, by_partition=by_partition),
            partial(outbox_samples, runtime.outbox),
        )
        self._samples: Samples = {}
        self._sampled_at = self._complete_at = time.monotonic()
        self._took_s, self._failed = 0.0, 0
        for name, one in CATALOG.items():
            if one.place == "exporter" and name not in _OWN:
                meters.observe(name, partial(self._values, name))
        meters.observe(_OWN[0], lambda: [(time.monotonic() - self._complete_at, {})])
        meters.observe(_OWN[1], lambda: [(self._took_s, {})])
        meters.observe(_OWN[2], lambda: [(self._failed, {})])

    def sample(self) -> None:
        """Take a sample now. Raises the first part's error after all parts."""
        began, found, errors = time.monotonic(), Samples(), list[MqlayerError]()
        for part in self._parts:
            try:
                found |= part()
            except MqlayerError as error:
                errors.append(error)
        ended = time.monotonic()
        self._samples, self._sampled_at, self._took_s = found, ended, ended - began
        if errors:
            self._failed += 1
            raise errors[0]
        self._complete_at = ended

    def _values(self, name: str) -> Iterable[Measurement]:
        if time.monotonic() - self._sampled_at > OLD_AFTER_INTERVALS * self.every_s:
            return ()
        return self._samples.get(name, ())

    def _wait_s(self) -> float:
        due, self._due = self._due, False
        return 0.0 if due else self.every_s

    def _pass(self) -> None:
        self.sample()
