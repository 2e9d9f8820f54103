"""Keeps messages in hand withheld while their handlers run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mqlayer.errors import StaleToken
from mqlayer.receiving.pop_message import PopMessage, Token
from mqlayer.runtime.service import Service

SHARE: Final = 3
"""Calls within one visibility timeout, so that two may fail."""
SHORTEST_S: Final = 0.05
IDLE_S: Final = 60.0

Extend = Callable[[Sequence[PopMessage], float], None]


@dataclass(slots=True)
class _InHand:
    message: PopMessage
    visible_s: float
    until: float


class RenewalThread(Service):
    """Extends the visibility timeout of all messages in hand, with one write per node and pass."""

    def __init__(self, extend: Extend) -> None:
        super().__init__("mqlayer-renews", title="the renewal of visibility timeouts", event="renewal")
        self._extend, self._lock = extend, threading.Lock()
        self._in_hand: dict[Token, _InHand] = {}
        self._next_at = 0.0

    def keep(self, messages: Iterable[PopMessage], *, visible_s: float, for_s: float) -> None:
        """Extend messages until they are settled, or for `for_s`."""
        now = time.monotonic()
        with self._lock:
            if not self._in_hand:
                self._next_at = 0.0
            self._in_hand |= {one.token: _InHand(one, visible_s, now + for_s) for one in messages}
            if not self.started:
                self.start()
        self.wake.set()

    def settled(self, messages: Iterable[PopMessage]) -> None:
        """Extend these no more."""
        if self._in_hand:
            self._drop(message.token for message in messages)

    def _drop(self, tokens: Iterable[Token]) -> None:
        with self._lock:
            for token in tokens:
                self._in_hand.pop(token, None)

    def _wait_s(self) -> float:
        with self._lock:
            if not self._in_hand:
                return IDLE_S
        return max(0.0, self._next_at - time.monotonic())

    def _pass(self) -> None:
        now = time.monotonic()
        by_time: dict[float, list[PopMessage]] = {}
        with self._lock:
            self._in_hand = {token: one for token, one in self._in_hand.items() if one.until > now}
            for one in self._in_hand.values():
                by_time.setdefault(one.visible_s, []).append(one.message)
        period_s = max(SHORTEST_S, min(by_time, default=IDLE_S) / SHARE)
        if now < self._next_at <= now + period_s:
            return
        # New messages wait for a share of their time, too.
        due = self._next_at and now >= self._next_at
        self._next_at = now + period_s
        for visible_s, messages in by_time.items() if due else ():
            self._renew(messages, visible_s)

    def _renew(self, messages: Sequence[PopMessage], visible_s: float) -> None:
        try:
            self._extend(messages, visible_s)
        except StaleToken as error:
            void = set(error.offsets)
            self._drop(one.token for one in messages if (one.token.partition, one.token.offset) in void)
