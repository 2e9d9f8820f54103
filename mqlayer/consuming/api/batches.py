"""Batches of messages for one call of a handler: of distinct keys, or of one key in order.

A batch says of each of its messages what became of it: nothing as yet (*open*), *done* or *failed* by its handler's
word, *applied* before by the fence's. One that the fence let through counts as done only if the handler returns: until
then nobody knows whether its transaction was committed, and if it was, the fence says so the next time.

Who is to blame for an exception of a batch's handler? The message that was its only open one; else nobody: all that are
open come again one by one, and what they do then counts. So no message dies of what another one beside it did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, overload

from mqlayer.consuming.api.bodies import Decode
from mqlayer.consuming.api.context import Delivered
from mqlayer.consuming.engine.timeouts import HandlerDeadline
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.domain.message import Record
from mqlayer.errors import BatchUndone, BodyMismatch, HandlerFault, InvalidInput, StaleOwner
from mqlayer.failpoints import failpoint
from mqlayer.postgres.caller_connections import caller_errors, run_one, run_one_async
from mqlayer.postgres.queries import query

Body = TypeVar("Body")
Kind = Literal["distinct", "key"]

LARGEST: Final = 500
LONGEST_LINGER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class BatchOf:
    """What one call of a handler gets: messages of `distinct` keys, one of each, or of one `key`, in order.

    `limit`: messages at most, up to 500. `limit_bytes`: of records, which a single message may exceed. `linger_s`: for
    how long the first message may wait for others, 60 s at most. Raises InvalidInput.
    """

    kind: Kind
    limit: int = 100
    limit_bytes: int = 1024 * 1024
    linger_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if self.kind not in ("distinct", "key"):
            raise InvalidInput(f"a batch is of 'distinct' keys or of one 'key', not of {self.kind!r}")
        if not 1 <= self.limit <= LARGEST:
            raise InvalidInput(f"a batch has 1 to {LARGEST} messages, not {self.limit}")
        if self.limit_bytes < 1:
            raise InvalidInput(f"a batch takes 1 byte or more, not {self.limit_bytes}")
        if not 0 <= self.linger_s <= LONGEST_LINGER_S:
            raise InvalidInput(f"a message waits 0 to {LONGEST_LINGER_S:g} s for a batch, not {self.linger_s}")


class MessageMark(Enum):
    """What is known of a message of a batch."""

    OPEN = auto()
    DONE = auto()
    APPLIED = auto()
    FAILED = auto()


class Handled(NamedTuple):
    """It is handled."""


class Failed(NamedTuple):
    """It failed, by this error."""

    error: BaseException


class Redelivered(NamedTuple):
    """It comes again, and nobody says that it failed. `singly`: by itself."""

    singly: bool


MessageOutcome = Handled | Failed | Redelivered


class BatchMessage(Delivered, Generic[Body]):
    """A message of a batch: what a Context knows of one, and its decoded body as `value`."""

    __slots__ = ("error", "fenced", "index", "mark", "queue", "value")

    value: Body

    def __init__(self, topic: str, group: str, group_id: int, key_queue: KeyQueue, record: Record, index: int) -> None:
        super().__init__(topic, group, group_id, key_queue.owned, record)
        self.queue, self.index = key_queue, index
        self.mark = MessageMark.OPEN
        self.error: BaseException | None = None
        # Let through by the fence, in a transaction that may be committed or not.
        self.fenced = False

    @property
    def owned(self) -> OwnedPartition:
        """The owned partition it is of."""
        return self._owned

    @property
    def record(self) -> Record:
        """The record."""
        return self._record

    @property
    def is_done(self) -> bool:
        """Whether it is done even if its handler raises."""
        return self.mark is MessageMark.APPLIED or (self.mark is MessageMark.DONE and not self.fenced)


class Batch(Sequence[BatchMessage[Body]], Generic[Body]):
    """The messages of one call of a handler, what became of them, and their fence.

    When the handler returns, all that it did not mark as failed are done. When it raises, those are done that it
    marked so and that are not fenced; see the module for the others.
    """

    __slots__ = ("_ahead", "_all", "_closed", "_deadline", "_group", "_messages", "_topic", "kind")

    def __init__(self, kind: Kind, topic: str, group: str, messages: Sequence[BatchMessage[Body]]) -> None:
        self.kind: Kind = kind
        self._topic, self._group = topic, group
        self._all = self._messages = list(messages)
        self._deadline: HandlerDeadline | None = None
        self._closed = False
        # Of one key: so many messages from the first one on are done or fenced.
        self._ahead = 0

    # -- what handlers see -------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> BatchMessage[Body]: ...

    @overload
    def __getitem__(self, index: slice) -> list[BatchMessage[Body]]: ...

    def __getitem__(self, index: int | slice) -> BatchMessage[Body] | list[BatchMessage[Body]]:
        """Return a message, or some."""
        return self._messages[index]

    def __len__(self) -> int:
        """Return how many messages it has."""
        return len(self._messages)

    def __iter__(self) -> Iterator[BatchMessage[Body]]:
        """Go through the messages."""
        return iter(self._messages)

    @property
    def values(self) -> list[Body]:
        """The decoded bodies."""
        return [message.value for message in self._messages]

    @property
    def topic(self) -> str:
        """The topic."""
        return self._topic

    @property
    def group(self) -> str:
        """The group that this process consumes for."""
        return self._group

    @property
    def unmarked(self) -> list[BatchMessage[Body]]:
        """The messages of which nothing is said yet: neither marked, nor let through or found applied by the fence."""
        return [message for message in self._messages if message.mark is MessageMark.OPEN and not message.fenced]

    @property
    def remaining_s(self) -> float:
        """Seconds until the group's time limit ends this handler; without end where there is none."""
        return math.inf if self._deadline is None else self._deadline.remaining_s

    def extend(self, seconds: float | None = None) -> float:
        """Have so many seconds from now, as `Context.extend` does; return how many seconds are left."""
        return math.inf if self._deadline is None else self._deadline.extend(seconds)

    def done(self, *messages: BatchMessage[Body]) -> None:
        """Mark messages as done: they stay so, whatever the handler raises later.

        Of a batch of one key in order only. A message that the fence let through needs no mark, and has none until the
        handler returns. Raises InvalidInput for one that is failed, or before which another one of its key is not done.
        """
        found = self._own(messages)
        for message in found:
            if message.mark is MessageMark.FAILED:
                raise InvalidInput(f"message {message.index} of the batch was marked as failed: mark it once")
        self._in_order(found)
        for message in found:
            if message.mark is MessageMark.OPEN:
                message.mark = MessageMark.DONE

    def fail(
        self, messages: BatchMessage[Body] | Iterable[BatchMessage[Body]], error: BaseException | str = "failed"
    ) -> None:
        """Mark messages as failed, by an error: an attempt of each is counted, and its key waits.

        RetryLater, Reject, Skip and PauseKey say the same as where a handler of single messages raises them. Of a
        batch of one key the first failed one counts; what is behind it comes again. Raises InvalidInput for one that
        is done, BatchUndone for one that the fence let through: to roll its transaction back, so let it pass.
        """
        failure = HandlerFault(error) if isinstance(error, str) else error
        undone: BatchMessage[Body] | None = None
        for message in self._own([messages] if isinstance(messages, BatchMessage) else messages):
            if message.mark in (MessageMark.DONE, MessageMark.APPLIED):
                raise InvalidInput(f"message {message.index} of the batch is done: it can't fail any more")
            message.mark, message.error = MessageMark.FAILED, failure
            undone = message if undone is None and message.fenced else undone
        if undone is not None:
            raise BatchUndone(self._topic, undone.identity.lp, undone.identity.seq)

    def fence(self, connection: Any, messages: Iterable[BatchMessage[Body]] | None = None) -> list[BatchMessage[Body]]:
        """Check, in the effects' own transaction, that this process is still the owner; return what is to be applied.

        Call it first in the transaction, on the connection of the effects (psycopg, SQLAlchemy, Django); it is one
        round trip. `messages`: those that this transaction applies; by default all that are not marked, of one key
        those before the first that failed. What it leaves out was applied before, and is done. When the transaction
        commits, all that it returned count as applied: apply all of them, or let an exception roll it back. Raises
        StaleOwner, which rolls back too: let it pass. Each message is fenced once; of one key in order.
        """
        chosen = self._to_fence(messages)
        failpoint("fence.before")
        if chosen:
            with caller_errors(connection):
                answers, epochs = run_one(connection, query("fence_many"), _facts_of(chosen))
            self._judge(chosen, answers, epochs)
        failpoint("fence.after")
        return [message for message in chosen if message.fenced]

    async def afence(
        self, connection: Any, messages: Iterable[BatchMessage[Body]] | None = None
    ) -> list[BatchMessage[Body]]:
        """Do what `fence` does on an async connection."""
        chosen = self._to_fence(messages)
        failpoint("fence.before")
        if chosen:
            with caller_errors(connection):
                answers, epochs = await run_one_async(connection, query("fence_many"), _facts_of(chosen))
            self._judge(chosen, answers, epochs)
        failpoint("fence.after")
        return [message for message in chosen if message.fenced]

    def _to_fence(self, messages: Iterable[BatchMessage[Body]] | None) -> list[BatchMessage[Body]]:
        if messages is None:
            chosen = self._own(m for m in self._ahead_of_failed() if m.mark is MessageMark.OPEN)
        else:
            # Named twice, a message would be answered "applied" for its own sake, before anything is committed.
            chosen = [m for m in dict.fromkeys(self._own(messages)) if not m.is_done]
        if any(message.fenced for message in chosen):
            raise HandlerFault("the fence was called twice for one message: call it once, in one transaction")
        if any(message.mark is MessageMark.FAILED for message in chosen):
            raise InvalidInput("a message that is marked as failed is not to be applied: leave it out of the fence")
        self._in_order(chosen)
        return chosen

    def _ahead_of_failed(self) -> Iterator[BatchMessage[Body]]:
        for message in self._messages:
            if message.mark is not MessageMark.FAILED:
                yield message
            elif self.kind == "key":
                return

    def _judge(self, chosen: list[BatchMessage[Body]], answers: list[str | None], epochs: list[int | None]) -> None:
        for message, answer, epoch in zip(chosen, answers, epochs, strict=True):
            if answer == "stale":
                # Of all that its owned partition has in here, whatever else is said.
                for other in self._all:
                    if other.owned is message.owned and not other.is_done:
                        other.mark, other.error = MessageMark.FAILED, self._stale(message, epoch or 0)
                raise self._stale(message, epoch or 0)
        for message, answer in zip(chosen, answers, strict=True):
            if answer == "applied":
                message.mark = MessageMark.APPLIED
            else:
                message.fenced = True

    def _stale(self, message: BatchMessage[Body], epoch: int) -> StaleOwner:
        return StaleOwner(self._group, self._topic, message.identity.lp, message.epoch, epoch)

    def _own(self, messages: Iterable[BatchMessage[Body]]) -> list[BatchMessage[Body]]:
        found = list(messages)
        if self._closed:
            raise HandlerFault("the batch's handler has ended: nothing more is marked or fenced of it")
        for message in found:
            if not (message.index < len(self._all) and self._all[message.index] is message):
                raise InvalidInput("the message is of another batch")
        return found

    def _in_order(self, messages: list[BatchMessage[Body]]) -> None:
        """Refuse messages of one key before which another one is left out."""
        if self.kind == "distinct" or not messages:
            return
        named = {message.index for message in messages}
        for before in self._all[self._ahead : max(named)]:
            passed = before.mark is not MessageMark.FAILED and (before.is_done or before.fenced)
            if passed and before.index == self._ahead:
                self._ahead += 1
            elif not passed and before.index not in named:
                raise InvalidInput(
                    f"message {before.index} of the batch comes before message {max(named)}, of the same key, and is "
                    "not done: go through them in order, and leave what follows a failed one to its next turn"
                )

    # -- what workers ask --------------------------------------------------------------------------------------------

    @property
    def everything(self) -> list[BatchMessage[Body]]:
        """All messages, also those that the handler does not see."""
        return self._all

    def begin(self, deadline: HandlerDeadline | None, decode: Decode) -> None:
        """Decode the bodies, in the handler's time. What does not fit failed: the handler does not see it, nor what is
        behind it of its key."""
        self._deadline = deadline
        seen: list[BatchMessage[Body]] = []
        for message in self._all:
            try:
                message.value = decode(message.body)
            except BodyMismatch as error:
                message.mark, message.error = MessageMark.FAILED, error
                if self.kind == "key":
                    break
            else:
                seen.append(message)
        self._messages = seen

    def end(self, raised: BaseException | None) -> list[MessageOutcome]:
        """Return what becomes of each message; nothing more is marked or fenced after that."""
        self._closed = True
        if self.kind == "key":
            return self._of_one_key(raised)
        return self._of_distinct_keys(raised)

    def _of_distinct_keys(self, raised: BaseException | None) -> list[MessageOutcome]:
        rest = self._when_open(raised)
        return [_outcome(message, raised, rest) for message in self._all]

    def _of_one_key(self, raised: BaseException | None) -> list[MessageOutcome]:
        rest = self._when_open(raised)
        # Nothing is said of what is behind one that is not done, whatever it is marked as.
        behind = rest if isinstance(rest, Redelivered) else Redelivered(singly=False)
        outcomes: list[MessageOutcome] = []
        for message in self._all:
            waits = bool(outcomes) and not isinstance(outcomes[-1], Handled)
            outcomes.append(behind if waits else _outcome(message, raised, rest))
        return outcomes

    def _when_open(self, raised: BaseException | None) -> MessageOutcome:
        """Return what becomes of messages of which nothing is known."""
        if raised is None:
            return Handled()
        if isinstance(raised, StaleOwner):
            # Those of an owned partition that was lost are marked; where none is, nobody knows which.
            known = any(isinstance(message.error, StaleOwner) for message in self._all)
            return Redelivered(singly=False) if known else Failed(raised)
        if isinstance(raised, BatchUndone):
            # Of one key, those before the failed one have to be applied first, without it.
            return Redelivered(singly=self.kind == "key")
        open_count = sum(not m.is_done and m.mark is not MessageMark.FAILED for m in self._messages)
        marked = any(message.mark is MessageMark.FAILED for message in self._messages)
        return Failed(raised) if open_count == 1 and not marked else Redelivered(singly=True)


def _outcome(message: BatchMessage[Any], raised: BaseException | None, rest: MessageOutcome) -> MessageOutcome:
    if message.mark is MessageMark.FAILED and message.error is not None:
        return Failed(message.error)
    return Handled() if raised is None or message.is_done else rest


def _facts_of(messages: list[BatchMessage[Any]]) -> dict[str, Any]:
    """Return the parameters of `fence_many`."""
    facts = [message.fence_facts() for message in messages]
    columns = {"lps": "lp", "sources": "source", "keys": "key", "seqs": "seq", "epochs": "epoch", "replays": "replay"}
    found = {name: [f[of] for f in facts] for name, of in columns.items()}
    # An array of nulls alone goes as text, where array_nulls may be off; without an array all are null as well.
    keys = None if all(key is None for key in found["keys"]) else found["keys"]
    return {"group_id": facts[0]["group_id"], **found, "keys": keys}


def is_lost(owned: OwnedPartition, error: BaseException) -> bool:
    """Say whether an error only repeats what is known: that an owned partition is somebody else's."""
    return isinstance(error, StaleOwner) and owned.state is OwnershipState.GONE
