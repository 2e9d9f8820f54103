"""A receiver's messages in hand, by key.

Receivers share the epoch, so only the fence's seq per key separates effects: after a later effect, an earlier message
counts as applied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final

from mqlayer.receiving.pop_message import PopMessage, Token

MAX_KEPT: Final = 100_000


class KeyOrder:
    """Messages by partition and key. Thread-safe."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, str], list[PopMessage]] = {}
        self._void: dict[Token, None] = {}
        self._lock = threading.Lock()

    def delivered(self, messages: Iterable[PopMessage]) -> None:
        """Note a batch; it replaces its keys' earlier messages."""
        queues: dict[tuple[int, str], list[PopMessage]] = {}
        for message in messages:
            if message.key is not None:
                queues.setdefault((message.token.partition, message.key), []).append(message)
        with self._lock:
            for group_partition, queue in queues.items():
                self._queues.pop(group_partition, None)
                self._queues[group_partition] = queue
            _forget_oldest(self._queues)

    def settled(self, messages: Iterable[PopMessage]) -> None:
        """Note settled messages."""
        with self._lock:
            for message in messages:
                self._cut(message, behind=False)

    def returned(self, message: PopMessage) -> None:
        """Note a return, also of the key's later messages."""
        with self._lock:
            self._cut(message, behind=True)

    def before(self, message: PopMessage) -> PopMessage | None:
        """Return the key's unsettled message before this one."""
        with self._lock:
            queue = self._queues.get((message.token.partition, message.key or ""), [])
            earlier = [one for one in queue if one.token.offset < message.token.offset]
            return earlier[-1] if earlier else None

    def is_void(self, message: PopMessage) -> bool:
        """Whether it, or an earlier one of its key, was returned here."""
        return message.token in self._void

    def _cut(self, message: PopMessage, *, behind: bool) -> None:
        group_partition, offset = (message.token.partition, message.key or ""), message.token.offset
        queue = self._queues.get(group_partition)
        if queue is None or message.key is None:
            return
        left = [one for one in queue if one.token.offset < offset or (not behind and one.token.offset > offset)]
        if behind:
            self._void |= dict.fromkeys(one.token for one in queue if one.token.offset >= offset)
            _forget_oldest(self._void)
        if left:
            self._queues[group_partition] = left
        else:
            del self._queues[group_partition]


def _forget_oldest(kept: dict[Any, Any]) -> None:
    while len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]
