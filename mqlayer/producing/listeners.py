"""Waits for settled messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, PENDING, RUNNING
from typing import Any, Final

from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.logs import event_logger
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
"""Held to make a future's condition, and to settle one without."""


class ReceiptFuture(Future[Receipt]):
    """A future of a receipt."""

    # As `Future.__init__` sets them. `__getattr__` makes the others when they are first used: a condition is a dozen
    # objects, and costs more than the rest of a send.
    _state = PENDING
    _result: Receipt | None = None
    _exception: BaseException | None = None
    _is_shared = False

    def __init__(self, promise: ReceiptPromise) -> None:
        self._promise: ReceiptPromise | None = promise

    def __getattr__(self, name: str) -> Any:
        make = _MADE_LATE.get(name)
        if make is None:
            raise AttributeError(name)
        with _sharing:
            self._is_shared = True
            return self.__dict__.setdefault(name, make())

    def set_result(self, result: Receipt) -> None:
        """Set the receipt."""
        with _sharing:
            if not self._is_shared:
                # Nobody waits, nor can begin to before the state is set.
                self._result = result
                self._state = FINISHED
                return
        super().set_result(result)

    def result(self, timeout: float | None = None) -> Receipt:
        """Return the receipt, or raise its error."""
        if self._state == FINISHED and self._result is not None:
            return self._result
        return super().result(timeout)

    def done(self) -> bool:
        """Whether it is settled or cancelled."""
        return self._state not in (PENDING, RUNNING)

    def cancel(self) -> bool:
        """Withdraw the message; False if in flight, stored or failed."""
        promise = self._promise
        if promise is None or not promise.withdrawn():
            return self.cancelled()
        self._promise = None
        super().cancel()
        # This notifies `concurrent.futures.wait` and `as_completed`.
        self.set_running_or_notify_cancel()
        return True

    def forget(self) -> None:
        """Drop the promise."""
        self._promise = None


class ReceiptPromise(Listener):
    """A single message's future."""

    __slots__ = ("_withdraw", "future", "pending")

    def __init__(self, withdraw: Callable[[PendingSend], bool]) -> None:
        super().__init__(1)
        self.future = ReceiptFuture(self)
        self._withdraw = withdraw
        self.pending: PendingSend | None = None

    def withdrawn(self) -> bool:
        """Withdraw the message, if possible."""
        pending = self.pending
        if pending is None or not self._withdraw(pending):
            return False
        self.pending = None
        return True

    def notify(self) -> None:
        """Set the future."""
        pending, self.pending = self.pending, None
        self.future.forget()
        if pending is None:
            return
        if isinstance(pending.outcome, MqlayerError):
            self.future.set_exception(pending.outcome)
        else:
            self.future.set_result(receipt_of(pending))


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
        for listener in listeners:
            listener.notify()
    finally:
        callback.now = before


def check_may_wait() -> None:
    """Raise InvalidInput in a callback: it would wait for its own thread."""
    if callback.now:
        raise InvalidInput("a future's callback must not wait for the producer: use send_async or send_oneway there")
