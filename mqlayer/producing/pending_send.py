"""What one call publishes to one LP, and who is told what became of it."""

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
"""How many pieces a message has: facts, key, head of the body, body, end of line."""


class Receipt(NamedTuple):
    """Where a stored message is.

    `offset` is None where an earlier try had stored the message and it was not found again among the last 5,000 of
    its partition. `replicas` is how many received it, where the producer waits for replicas.
    """

    topic: str
    partition: int
    offset: int | None
    identity: Identity
    replicas: int | None = None
    duplicate: bool = False
    """Nothing was stored: this is where the first message with its dedup id is."""


class Appended(NamedTuple):
    """Where a batch was appended; the pending sends of the batch share it."""

    partition: int
    source: int
    replicas: int | None


class Recovered(NamedTuple):
    """Where the messages of a pending send are when an earlier try had stored some: partition and offset of each."""

    source: int
    replicas: int | None
    positions: tuple[tuple[int, int | None], ...]


class Duplicate(NamedTuple):
    """The message was a duplicate by its dedup id: where the first one is."""

    partition: int
    offset: int
    identity: Identity
    replicas: int | None


SendOutcome = Appended | Recovered | Duplicate
"""What became of a pending send that did not fail."""


class PendingSend(msgspec.Struct, eq=False, gc=False):
    """Consecutive messages of one LP, published by one call: queued, sent and settled as one.

    `chunks` are its messages for the wire, `size` their bytes. A definite refusal becomes a failure once `deadline`
    (monotonic) has passed. `queue` and `first`, the seq of the first message, are set when it is queued; `outcome` when
    it is settled, and `offset` if it was stored by one append. One with a `token`, a dedup id, is one message. An
    `eager` one fails as soon as its partition is at its backlog limit.

    There is one per message at worst, so it is of the kind that is cheapest to make, and the garbage collector does
    not look at it: whatever it is in a cycle with must let go of it.
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
        """The seq of the last message."""
        return self.first + self.count - 1

    def mark_reordered(self) -> int:
        """Mark its messages that have a key as possibly reordered; return by how many bytes it grew."""
        chunks, before = list(self.chunks), self.size
        for at in range(0, len(chunks), CHUNKS_PER_MESSAGE):
            if chunks[at + 1] != NO_KEY_BULK:
                facts = chunks[at]
                chunks[at] = bulk(mark_reordered(facts[facts.index(b"\n") + 1 : -2]))
                self.size += len(chunks[at]) - len(facts)
        self.chunks = tuple(chunks)
        return self.size - before

    def receipt(self, index: int = 0) -> Receipt:
        """Return the receipt of one message; raise the error if the pending send failed."""
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
    """Who waits for pending sends. `remaining` counts the messages not settled yet; `notify` is called once, when none
    is left.

    `remaining` changes under the in-flight store's lock, `notify` is called without it: it may run the application's
    callbacks.
    """

    __slots__ = ("remaining",)

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def notify(self) -> None:
        """Pass the outcome on."""
        raise NotImplementedError

    def failed(self, pending: PendingSend) -> None:
        """Hear that a pending send failed; called under the lock."""


class ReceiptFuture(Future[Receipt]):
    """A future of a receipt. To cancel it takes the message back, which works while its partition refuses it."""

    def __init__(self, promise: ReceiptPromise) -> None:
        super().__init__()
        self._promise: ReceiptPromise | None = promise

    def cancel(self) -> bool:
        """Take the message back; False where it is on its way, stored, or failed: its outcome comes then."""
        promise = self._promise
        if promise is None or not promise.withdrawn():
            return self.cancelled()
        self._promise = None
        super().cancel()
        # Whoever waits for several futures is told by this.
        self.set_running_or_notify_cancel()
        return True

    def forget(self) -> None:
        """Let go of the message: its outcome is about to come."""
        self._promise = None


class ReceiptPromise(Listener):
    """A future for the one message of a pending send. `withdraw` takes a pending send back, if that can be done."""

    __slots__ = ("_withdraw", "future", "pending")

    def __init__(self, withdraw: Callable[[PendingSend], bool]) -> None:
        super().__init__(1)
        self.future = ReceiptFuture(self)
        self._withdraw = withdraw
        self.pending: PendingSend | None = None

    def withdrawn(self) -> bool:
        """Take the message back; say whether that was done."""
        pending = self.pending
        if pending is None or not self._withdraw(pending):
            return False
        self.pending = None
        return True

    def notify(self) -> None:
        """Set the future's result or error."""
        pending, self.pending = self.pending, None
        self.future.forget()
        if pending is None:
            return
        if isinstance(pending.outcome, MqlayerError):
            self.future.set_exception(pending.outcome)
        else:
            self.future.set_result(pending.receipt())


class BatchListener(Listener):
    """Waits for all messages of a batch."""

    __slots__ = ("any_failed", "done")

    def __init__(self, remaining: int) -> None:
        super().__init__(remaining)
        self.any_failed = False
        self.done: Future[None] = Future()

    def failed(self, pending: PendingSend) -> None:  # noqa: ARG002  # which one, its caller asks the pending sends
        """Note that there is no receipt for everything."""
        self.any_failed = True

    def notify(self) -> None:
        """Say that all are settled."""
        self.done.set_result(None)


class OnewayListener(Listener):
    """Nobody waits; failures are logged, and counted by the in-flight store."""

    __slots__ = ()

    def __init__(self) -> None:
        # Never reaches zero, so `notify` is never called.
        super().__init__(0)

    def failed(self, pending: PendingSend) -> None:
        """Log the loss of a message that nobody waits for."""
        facts = {"topic": pending.queue.topic.name, "lp": pending.queue.lp, "reason": str(pending.outcome)}
        log.warning("oneway_publish_failed", extra=facts)
