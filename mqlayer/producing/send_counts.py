"""Counts of messages by what became of them. No I/O, no lock."""

from __future__ import annotations

from collections import Counter

OutcomeKey = tuple[str, str, str]
"""Topic, outcome, and the class of the error that failed messages, or ''."""


class SendCounts:
    """Messages since the producer started, by topic, outcome and error."""

    __slots__ = ("by_key", "connections_lost")

    def __init__(self) -> None:
        self.by_key: Counter[OutcomeKey] = Counter()
        self.connections_lost = 0

    def add(self, topic: str, outcome: str, count: int, error: str = "") -> None:
        """Add messages."""
        self.by_key[topic, outcome, error] += count

    def __getitem__(self, outcome: str) -> int:
        """Return an outcome's messages over all topics."""
        return sum(count for (_, one, _), count in self.by_key.items() if one == outcome)
