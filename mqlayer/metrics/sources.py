"""Counts that other parts keep, summed by their labels when somebody scrapes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

Labels = tuple[str, ...]
K = TypeVar("K")
ReadCounts = Callable[[], Mapping[K, int]]
ReadLevel = Callable[[], int]


class CountSources(Generic[K]):
    """Living sources, and the sums of ended ones: totals never fall. Thread-safe."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._living: dict[object, tuple[Labels, ReadCounts[K], ReadLevel]] = {}
        self._ended: dict[Labels, Counter[K]] = {}

    def add(self, labels: Labels, counts: ReadCounts[K], level: ReadLevel) -> Callable[[], None]:
        """Add a source; return the function that ends it."""
        handle = object()
        with self._lock:
            self._living[handle] = (labels, counts, level)
        return lambda: self._end(handle)

    def totals(self) -> dict[Labels, Counter[K]]:
        """Return sums per labels."""
        with self._lock:
            found = {labels: counts.copy() for labels, counts in self._ended.items()}
            for labels, counts, _ in self._living.values():
                found.setdefault(labels, Counter()).update(counts())
        return found

    def levels(self) -> dict[Labels, int]:
        """Return present levels per labels."""
        found: Counter[Labels] = Counter()
        with self._lock:
            for labels, _, level in self._living.values():
                found[labels] += level()
        return dict(found)

    def _end(self, handle: object) -> None:
        with self._lock:
            source = self._living.pop(handle, None)
            if source is not None:
                self._ended.setdefault(source[0], Counter()).update(source[1]())
