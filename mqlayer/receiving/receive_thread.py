"""The asking thread of an AsyncReceiver."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from mqlayer.receiving.fetcher import FetchAnswer
from mqlayer.receiving.pop_session import PopSession, ReceiveCall
from mqlayer.receiving.receiver import not_open
from mqlayer.runtime.service import Service

IDLE_S: Final = 60.0


@dataclass(eq=False, slots=True)
class PendingReceive:
    """A call and its answer."""

    call: ReceiveCall
    answer: Future[FetchAnswer] = field(default_factory=Future)


class ReceiveThread(Service):
    """Serves calls of `receive`, the oldest first.

    A cancelled call's messages go to a later one under the same attempt, unless the caller named it: then it asks
    again. Otherwise they come again after their visibility timeout.
    """

    def __init__(self, session: PopSession) -> None:
        super().__init__("mqlayer-receives", title="the receiving thread", event="receive")
        self._session = session
        self._lock = threading.Lock()
        self._closed = False
        self._new: list[PendingReceive] = []
        self._unread: list[PendingReceive] = []
        self._pending: list[PendingReceive] = []

    def receive(self, call: ReceiveCall) -> PendingReceive:
        """Begin a call. Raises Conflict once closed."""
        pending = PendingReceive(call)
        with self._lock:
            if self._closed:
                raise not_open()
            self._new.append(pending)
        self.wake.set()
        return pending

    def cancel(self, pending: PendingReceive) -> None:
        """End a call that no caller awaits."""
        if not pending.answer.cancel():
            self._unread.append(pending)
            self.wake.set()

    def _wait_s(self) -> float:
        return 0.0 if self._pending else IDLE_S

    def _pass(self) -> None:
        self._take_back()
        with self._lock:
            self._pending += self._new
            self._new = []
        self._pending = [pending for pending in self._pending if not self._serve(pending)]
        if self._pending:
            self._session.wait(pending.call for pending in self._pending)

    def _take_back(self) -> None:
        while self._unread:
            pending = self._unread.pop()
            if pending.answer.exception() is None:
                self._give_on(pending, pending.answer.result())

    def _serve(self, pending: PendingReceive) -> bool:
        if pending.answer.done():
            return True
        try:
            fetched = self._session.poll(pending.call)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            if pending.answer.set_running_or_notify_cancel():
                pending.answer.set_exception(error)
            return True
        if fetched is None:
            return False
        if pending.answer.set_running_or_notify_cancel():
            self._session.delivered(pending.call, fetched.messages)
            pending.answer.set_result(fetched)
        else:
            self._give_on(pending, fetched)
        return True

    def _give_on(self, pending: PendingReceive, fetched: FetchAnswer) -> None:
        if not pending.call.own_attempt:
            self._session.fetcher.take_back(fetched)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            left = self._pending + self._new
        for pending in left:
            if not pending.answer.done() and pending.answer.set_running_or_notify_cancel():
                pending.answer.set_exception(not_open())
