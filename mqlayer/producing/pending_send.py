"""One call's messages to one LP, and their listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from mqlayer.domain.message import NO_KEY, Identity, mark_reordered
from mqlayer.errors import MqlayerError
from mqlayer.redis.wire import bulk

if TYPE_CHECKING:
    from mqlayer.producing.send_queues import LpQueue

log = logging.getLogger(__name__)

NOTHING: Final[tuple[bytes, ...]] = ()
NO_KEY_BULK: Final = bulk(NO_KEY)
CHUNKS_PER_MESSAGE: Final = 5
"""Facts, key, body head, body, line end."""


class Receipt(NamedTuple):
    """A stored message's place.

    `offset` is None if an earlier try stored it, and it is not among the partition's last 5,000. `replicas`: how many
    have it, if the producer waits for them.
    """

    topic: str
    partition: int
    offset: int | None
    identity: Identity
    replicas: int | None = None
    duplicate: bool = False
    """Nothing was stored: an earlier message with the dedup id is there."""


class Appended(NamedTuple):
    """A batch's place."""

    partition: int
    source: int
    replicas: int | None


class Recovered(NamedTuple):
    """Each message's (partition, offset), after an earlier try."""

    source: int
    replicas: int | None
    positions: tuple[tuple[int, int | None], ...]


class Duplicate(NamedTuple):
    """The earlier message with the dedup id."""

    partition: int
    offset: int
    identity: Identity
    replicas: int | None


SendOutcome = Appended | Recovered | Duplicate


class PendingSend(msgspec.Struct, eq=False, gc=False):
    """Consecutive messages of one LP from one call, settled together.

    `chunks`: encoded messages, of `size` bytes. Refusals are final after `deadline` (monotonic). Queuing sets `queue`
    and `first`, the first seq; settling sets `outcome`, and `offset` if one append stored it. With a `token` (dedup id)
    it is one message. `eager`: fail once the partition is full.

    The garbage collector skips it: break its cycles.
    """

    chunks: tuple[bytes, ...]
    count: int
    size: int
    deadline: float
    listener: Listener | None
    outcome: SendOutcome | MqlayerError | None = None
    offset: int = 0
    first: int = 0
    queue: LpQueue = cast("LpQueue", None)
    token: bytes = b""
    eager: bool = False

    @property
    def last(self) -> int:
        """The last seq."""
        return self.first + self.count - 1

    def mark_reordered(self) -> int:
        """Mark keyed messages as reordered; return the growth in bytes."""
        chunks, before = list(self.chunks), self.size
        for at in range(0, len(chunks), CHUNKS_PER_MESSAGE):
            if chunks[at + 1] != NO_KEY_BULK:
                facts = chunks[at]
                chunks[at] = bulk(mark_reordered(facts[facts.index(b"\n") + 1 : -2]))
                self.size += len(chunks[at]) - len(facts)
        self.chunks = tuple(chunks)
        return self.size - before

    def receipt(self, index: int = 0) -> Receipt:
        """Return a message's receipt, or raise its error."""
        outcome = self.outcome
        if isinstance(outcome, Appended):
            partition, offset = outcome.partition, self.offset + index
        elif isinstance(outcome, Recovered):
            partition, known = outcome.positions[index]
            if known is None:
                return self._receipt(outcome, partition, None, index)
            offset = known
        elif isinstance(outcome, Duplicate):
            topic = self.queue.topic.name
            return Receipt(topic, outcome.partition, outcome.offset, outcome.identity, outcome.replicas, duplicate=True)
        elif outcome is None:
            raise RuntimeError("the pending send is not settled yet")
        else:
            raise outcome
        return self._receipt(outcome, partition, offset, index)

    def _receipt(self, outcome: Appended | Recovered, partition: int, offset: int | None, index: int) -> Receipt:
        identity = Identity(outcome.source, self.queue.lp, self.first + index)
        return Receipt(self.queue.topic.name, partition, offset, identity, outcome.replicas)


class Listener:
    """Waits for `remaining` messages; `notify` runs once, after the last.

    `remaining` and `failed` need the lock. `notify` runs without it: it may run application callbacks.
    """

    __slots__ = ("remaining",)

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def notify(self) -> None:
        """Report the outcome."""
        raise NotImplementedError

    def failed(self, pending: PendingSend) -> None:
        """Note a failure."""


class ReceiptFuture(Future[Receipt]):
    """A future of a receipt."""

    def __init__(self, promise: ReceiptPromise) -> None:
        super().__init__()
        self._promise: ReceiptPromise | None = promise

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
            self.future.set_result(pending.receipt())


class BatchListener(Listener):
    """Waits for a batch."""

    __slots__ = ("any_failed", "done")

    def __init__(self, remaining: int) -> None:
        super().__init__(remaining)
        self.any_failed = False
        self.done: Future[None] = Future()

    def failed(self, pending: PendingSend) -> None:  # noqa: ARG002  # which one, its caller asks the pending sends
        """Note a missing receipt."""
        self.any_failed = True

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
