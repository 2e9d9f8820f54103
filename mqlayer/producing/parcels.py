"""What one call publishes to one LP, and who is told what became of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from mqlayer.domain.message import NO_KEY, Identity, mark_reordered
from mqlayer.errors import MqlayerError
from mqlayer.redis.packets import bulk

if TYPE_CHECKING:
    from mqlayer.producing.lanes import Lane

log = logging.getLogger(__name__)

NOTHING: Final[tuple[bytes, ...]] = ()
NO_KEY_BULK: Final = bulk(NO_KEY)
PIECES: Final = 5
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


class Place(NamedTuple):
    """Where a batch was appended; the parcels of the batch share it."""

    partition: int
    source: int
    replicas: int | None


class Found(NamedTuple):
    """Where the messages of a parcel are when an earlier try had stored some: partition and offset of each."""

    source: int
    replicas: int | None
    positions: tuple[tuple[int, int | None], ...]


class Original(NamedTuple):
    """The message was a duplicate by its dedup id: where the first one is."""

    partition: int
    offset: int
    identity: Identity
    replicas: int | None


Outcome = Place | Found | Original
"""What became of a parcel that did not fail."""


class Parcel(msgspec.Struct, eq=False, gc=False):
    """Consecutive messages of one LP, published by one call: queued, sent and settled as one.

    `pieces` are its messages for the wire, `size` their bytes. A definite refusal becomes a failure once `deadline`
    (monotonic) has passed. `lane` and `first`, the seq of the first message, are set when it is queued; `outcome` when
    it is settled, and `offset` if it was stored by one append. One with a `token`, a dedup id, is one message. An
    `eager` one fails as soon as its partition is at its backlog limit.

    There is one per message at worst, so it is of the kind that is cheapest to make, and the garbage collector does
    not look at it: whatever it is in a cycle with must let go of it.
    """

    pieces: tuple[bytes, ...]
    count: int
    size: int
    deadline: float
    listener: Listener | None
    outcome: Outcome | MqlayerError | None = None
    offset: int = 0
    first: int = 0
    lane: Lane = cast("Lane", None)
    token: bytes = b""
    eager: bool = False

    @property
    def last(self) -> int:
        """The seq of the last message."""
        return self.first + self.count - 1

    def mark_reordered(self) -> int:
        """Mark its messages that have a key as possibly reordered; return by how many bytes it grew."""
        pieces, before = list(self.pieces), self.size
        for at in range(0, len(pieces), PIECES):
            if pieces[at + 1] != NO_KEY_BULK:
                facts = pieces[at]
                pieces[at] = bulk(mark_reordered(facts[facts.index(b"\n") + 1 : -2]))
                self.size += len(pieces[at]) - len(facts)
        self.pieces = tuple(pieces)
        return self.size - before

    def receipt(self, index: int = 0) -> Receipt:
        """Return the receipt of one message; raise the error if the parcel failed."""
        outcome = self.outcome
        if isinstance(outcome, Place):
            partition, offset = outcome.partition, self.offset + index
        elif isinstance(outcome, Found):
            partition, known = outcome.positions[index]
            if known is None:
                return self._receipt(outcome, partition, None, index)
            offset = known
        elif isinstance(outcome, Original):
            topic = self.lane.topic.name
            return Receipt(topic, outcome.partition, outcome.offset, outcome.identity, outcome.replicas, duplicate=True)
        elif outcome is None:
            raise RuntimeError("the parcel is not settled yet")
        else:
            raise outcome
        return self._receipt(outcome, partition, offset, index)

    def _receipt(self, outcome: Place | Found, partition: int, offset: int | None, index: int) -> Receipt:
        identity = Identity(outcome.source, self.lane.lp, self.first + index)
        return Receipt(self.lane.topic.name, partition, offset, identity, outcome.replicas)


class Listener:
    """Who waits for parcels. `left` counts the messages not settled yet; `tell` is called once, when none is left.

    `left` changes under the ledger's lock, `tell` is called without it: it may run the application's callbacks.
    """

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def tell(self) -> None:
        """Pass the outcome on."""
        raise NotImplementedError

    def failed(self, parcel: Parcel) -> None:
        """Hear that a parcel failed; called under the lock."""


class ReceiptFuture(Future[Receipt]):
    """A future of a receipt. To cancel it takes the message back, which works while its partition refuses it."""

    def __init__(self, promise: Promise) -> None:
        super().__init__()
        self._promise: Promise | None = promise

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


class Promise(Listener):
    """A future for the one message of a parcel. `withdraw` takes a parcel back, if that can be done."""

    __slots__ = ("_withdraw", "future", "parcel")

    def __init__(self, withdraw: Callable[[Parcel], bool]) -> None:
        super().__init__(1)
        self.future = ReceiptFuture(self)
        self._withdraw = withdraw
        self.parcel: Parcel | None = None

    def withdrawn(self) -> bool:
        """Take the message back; say whether that was done."""
        parcel = self.parcel
        if parcel is None or not self._withdraw(parcel):
            return False
        self.parcel = None
        return True

    def tell(self) -> None:
        """Set the future's result or error."""
        parcel, self.parcel = self.parcel, None
        self.future.forget()
        if parcel is None:
            return
        if isinstance(parcel.outcome, MqlayerError):
            self.future.set_exception(parcel.outcome)
        else:
            self.future.set_result(parcel.receipt())


class Gathering(Listener):
    """Waits for all messages of a batch."""

    __slots__ = ("any_failed", "done")

    def __init__(self, left: int) -> None:
        super().__init__(left)
        self.any_failed = False
        self.done: Future[None] = Future()

    def failed(self, parcel: Parcel) -> None:  # noqa: ARG002  # which one, its caller asks the parcels
        """Note that there is no receipt for everything."""
        self.any_failed = True

    def tell(self) -> None:
        """Say that all are settled."""
        self.done.set_result(None)


class Oneway(Listener):
    """Nobody waits; failures are logged, and counted by the ledger."""

    __slots__ = ()

    def __init__(self) -> None:
        # Never reaches zero, so `tell` is never called.
        super().__init__(0)

    def failed(self, parcel: Parcel) -> None:
        """Log the loss of a message that nobody waits for."""
        facts = {"topic": parcel.lane.topic.name, "lp": parcel.lane.lp, "reason": str(parcel.outcome)}
        log.warning("oneway_publish_failed", extra=facts)
