"""Waits for settled messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from typing import Any, Final, cast

from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.logs import event_logger
from mqlayer.producing.outcomes import Appended
from mqlayer.producing.receipts import Receipt, receipt_of
from mqlayer.producing.send_queues import Listener, PendingSend

log = event_logger(__name__)

_MADE_LATE: Final[Mapping[str, Callable[[], object]]] = {
    "_condition": threading.Condition,
    "_waiters": list,
    "_done_callbacks": list,
}
# Reentrant: what the garbage collector ends meanwhile may touch another future.
_sharing = threading.RLock()
"""Held to make a future's condition, and to settle those without."""


class ReceiptFuture(Future[Receipt], Listener):
    """A future of a receipt, and its message's listener."""

    # One object for each message: the garbage collector's work grows with their number. `Future.__init__` would make a
    # condition, a dozen objects: `__getattr__` makes it when a thread first waits, and the receipt when it is read.
    __slots__ = (
        "_condition", "_done_callbacks", "_exception", "_is_shared", "_pending", "_receipt", "_state", "_waiters",
        "_withdraw",
    )  # fmt: skip

    def __init__(self, withdraw: Callable[[PendingSend], bool], pending: PendingSend | None = None) -> None:
        self.remaining = 1
        self._state = PENDING
        self._is_shared = False
        self._withdraw = withdraw
        self._pending = pending
        self._receipt: Receipt | None = None
        self._exception: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        make = _MADE_LATE.get(name)
        if make is None:
            raise AttributeError(name)
        with _sharing:
            self._is_shared = True
            try:
                return object.__getattribute__(self, name)
            except AttributeError:
                made = make()
                setattr(self, name, made)
                return made

    # The base class reads and writes it.
    @property
    def _result(self) -> Receipt | None:
        pending = self._pending
        if pending is None or type(pending.outcome) is not Appended:
            return self._receipt
        return receipt_of(pending)

    @_result.setter
    def _result(self, result: Receipt | None) -> None:
        self._receipt = result

    def set_result(self, result: Receipt) -> None:
        """Set the receipt."""
        with _sharing:
            if not self._is_shared:
                # No thread waits, nor can begin to before the state is set.
                self._result = result
                self._state = FINISHED
                return
        super().set_result(result)

    def result(self, timeout: float | None = None) -> Receipt:
        """Return the receipt, or raise its error."""
        if self._state == FINISHED and self._exception is None:
            return cast("Receipt", self._result)
        return super().result(timeout)

    def done(self) -> bool:
        """Whether it is settled or cancelled."""
        return self._state not in (PENDING, RUNNING)

    def cancel(self) -> bool:
        """Withdraw the message; False if in flight, stored or failed."""
        pending = self._pending
        if pending is None or not self._withdraw(pending):
            return self.cancelled()
        self._pending = None
        super().cancel()
        # This notifies `concurrent.futures.wait` and `as_completed`.
        self.set_running_or_notify_cancel()
        return True

    def settle_unwatched(self) -> bool:
        """Settle a stored message's, unless a thread waits; call with `_sharing` held."""
        pending = self._pending
        if self._is_shared or pending is None or type(pending.outcome) is not Appended:
            return False
        pending.listener = None
        self._state = FINISHED
        return True

    def notify(self) -> None:
        """Settle it."""
        pending = self._pending
        if pending is None:
            return
        pending.listener = None
        if isinstance(pending.outcome, MqlayerError):
            self._pending = None
            self.set_exception(pending.outcome)
        else:
            self._pending = None
            self.set_result(receipt_of(pending))


class BatchListener(Listener):
    """Waits for the messages of one call."""

    __slots__ = ("any_failed",)

    def __init__(self, remaining: int) -> None:
        super().__init__(remaining)
        self.any_failed = False

    @property
    def all_stored(self) -> bool:
        """Whether each message has a receipt."""
        return not self.remaining and not self.any_failed

    def failed(self, pending: PendingSend) -> None:  # noqa: ARG002  # which one, its caller asks the pending sends
        """Note a missing receipt."""
        self.any_failed = True

    def drop(self, pending: PendingSend, error: MqlayerError) -> None:
        """Note messages that were never queued; call with the lock held."""
        pending.outcome = error
        self.any_failed = True
        self.remaining -= pending.count


class ThreadListener(BatchListener):
    """The same in a thread."""

    __slots__ = ("done",)

    def __init__(self, remaining: int) -> None:
        super().__init__(remaining)
        self.done: Future[None] = Future()

    def notify(self) -> None:
        """Set `done`."""
        self.done.set_result(None)


class OnewayListener(Listener):
    """Logs failures."""

    __slots__ = ()

    def __init__(self) -> None:
        # Never reaches zero, so `notify` is never called.
        super().__init__(0)

    def failed(self, pending: PendingSend) -> None:
        """Log a failure."""
        facts = {"topic": pending.queue.topic.name, "lp": pending.queue.lp, "reason": str(pending.outcome)}
        log.warning("oneway_publish_failed", extra=facts)


class CallbackState(threading.local):
    """Whether this thread runs an application's callback, and so must not wait for its own work."""

    now = False


callback: Final = CallbackState()


def notify_all(listeners: Sequence[Listener]) -> None:
    """Notify listeners, without the lock: application callbacks run here."""
    before, callback.now = callback.now, True
    try:
        for listener in _unwatched(listeners):
            listener.notify()
    finally:
        callback.now = before


def _unwatched(listeners: Sequence[Listener]) -> Sequence[Listener]:
    """Settle the futures that no thread waits for, all at once; return the other listeners."""
    with _sharing:
        return [one for one in listeners if type(one) is not ReceiptFuture or not one.settle_unwatched()]


def check_may_wait() -> None:
    """Raise InvalidInput in a callback: it would wait for its own thread."""
    if callback.now:
        raise InvalidInput("a future's callback must not wait for the producer: use send_async or send_oneway there")
