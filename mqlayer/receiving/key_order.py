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
        # The last batch, not sorted by key yet: most are settled as a whole.
        self._last: list[PopMessage] = []
        self._void: dict[Token, None] = {}
        self._lock = threading.Lock()

    def delivered(self, messages: Iterable[PopMessage]) -> None:
        """Note a batch; it replaces its keys' earlier messages."""
        with self._lock:
            self._sort_last()
            self._last = list(messages)

    def settled(self, messages: Iterable[PopMessage]) -> None:
        """Note settled messages."""
        settled = list(messages)
        with self._lock:
            if not self._queues and self._last == settled:
                self._last = []
                return
            self._sort_last()
            for key, of_key in _by_key(settled).items():
                offsets = {one.token.offset for one in of_key}
                self._keep(key, [one for one in self._queues.get(key, ()) if one.token.offset not in offsets])

    def returned(self, message: PopMessage) -> None:
        """Note a return, also of the key's later messages."""
        if message.key is None:
            return
        key, offset = (message.token.partition, message.key), message.token.offset
        with self._lock:
            self._sort_last()
            queue = self._queues.get(key, [])
            self._void |= dict.fromkeys(one.token for one in queue if one.token.offset >= offset)
            _forget_oldest(self._void)
            self._keep(key, [one for one in queue if one.token.offset < offset])

    def before(self, message: PopMessage) -> PopMessage | None:
        """Return the key's unsettled message before this one."""
        with self._lock:
            self._sort_last()
            queue = self._queues.get((message.token.partition, message.key or ""), [])
            earlier = [one for one in queue if one.token.offset < message.token.offset]
            return earlier[-1] if earlier else None

    def is_void(self, message: PopMessage) -> bool:
        """Whether it, or an earlier one of its key, was returned here."""
        return message.token in self._void

    def _sort_last(self) -> None:
        for key, queue in _by_key(self._last).items():
            self._queues.pop(key, None)
            self._queues[key] = queue
        self._last = []
        _forget_oldest(self._queues)

    def _keep(self, key: tuple[int, str], left: list[PopMessage]) -> None:
        if left:
            self._queues[key] = left
        else:
            self._queues.pop(key, None)


def _by_key(messages: Iterable[PopMessage]) -> dict[tuple[int, str], list[PopMessage]]:
    queues: dict[tuple[int, str], list[PopMessage]] = {}
    for message in messages:
        if message.key is not None:
            queues.setdefault((message.token.partition, message.key), []).append(message)
    return queues


def _forget_oldest(kept: dict[Any, Any]) -> None:
    while len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]
