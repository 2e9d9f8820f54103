"""Batches of messages for one call of a handler: of distinct keys, or of one key in order.

A message that the fence let through is done only when the handler returns; if its transaction committed before a crash,
the next fence answers "applied".
An exception fails the only open message; of several, all come again singly, uncounted
(`docs/design/decisions/0057-batches-blame-no-message.md`).
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
from mqlayer.postgres.caller_connections import Statement, Statements, run, run_async
from mqlayer.postgres.queries import query

Body = TypeVar("Body")
Kind = Literal["distinct", "key"]

LARGEST: Final = 500
LONGEST_LINGER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class BatchOf:
    """What one call gets: one message each of `distinct` keys, or several of one `key`, in order.

    `limit`: 1 to 500 messages. `limit_bytes`: total record size; one message may exceed it. `linger_s`: 0 to 60 s that
    the first message may wait for others. Raises InvalidInput.
    """

    kind: Kind
    limit: int = 100
    limit_bytes: int = 1024 * 1024
    linger_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("distinct", "key"):
            raise InvalidInput(f"a batch is of 'distinct' keys or of one 'key', not of {self.kind!r}")
        if not 1 <= self.limit <= LARGEST:
            raise InvalidInput(f"a batch has 1 to {LARGEST} messages, not {self.limit}")
        if self.limit_bytes < 1:
            raise InvalidInput(f"a batch takes 1 byte or more, not {self.limit_bytes}")
        if not 0 <= self.linger_s <= LONGEST_LINGER_S:
            raise InvalidInput(f"a message waits 0 to {LONGEST_LINGER_S:g} s for a batch, not {self.linger_s}")


class MessageMark(Enum):
    """State of a message in its batch."""

    OPEN = auto()
    DONE = auto()
    APPLIED = auto()
    FAILED = auto()


class Handled(NamedTuple):
    """The message is handled."""


class Failed(NamedTuple):
    """The message failed."""

    error: BaseException


class Redelivered(NamedTuple):
    """The message comes again without a failed attempt; alone where `singly`."""

    singly: bool


MessageOutcome = Handled | Failed | Redelivered


class BatchMessage(Delivered, Generic[Body]):
    """A message of a batch: a Context's data, and the decoded body as `value`."""

    __slots__ = ("error", "fenced", "index", "mark", "queue", "value")

    value: Body

    def __init__(self, topic: str, group: str, group_id: int, key_queue: KeyQueue, record: Record, index: int) -> None:
        super().__init__(topic, group, group_id, key_queue.owned, record)
        self.queue, self.index = key_queue, index
        self.mark = MessageMark.OPEN
        self.error: BaseException | None = None
        # Let through by the fence, in a transaction that may or may not be committed.
        self.fenced = False

    @property
    def owned(self) -> OwnedPartition:
        """Its owned partition."""
        return self._owned

    @property
    def record(self) -> Record:
        """Its record."""
        return self._record

    @property
    def is_done(self) -> bool:
        """Whether it stays done if its handler raises."""
        return self.mark is MessageMark.APPLIED or (self.mark is MessageMark.DONE and not self.fenced)


class Batch(Sequence[BatchMessage[Body]], Generic[Body]):
    """The messages of one call of a handler, their results and their fence.

    When the handler returns, all messages not marked as failed are done. When it raises, those found applied, or marked
    done and not fenced, are.
    """

    __slots__ = ("_ahead", "_all", "_closed", "_deadline", "_group", "_messages", "_topic", "kind")

    def __init__(self, kind: Kind, topic: str, group: str, messages: Sequence[BatchMessage[Body]]) -> None:
        self.kind: Kind = kind
        self._topic, self._group = topic, group
        self._all = self._messages = list(messages)
        self._deadline: HandlerDeadline | None = None
        self._closed = False
        # Of one key: how many leading messages are done or fenced.
        self._ahead = 0

    # -- what handlers see -------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int) -> BatchMessage[Body]: ...

    @overload
    def __getitem__(self, index: slice) -> list[BatchMessage[Body]]: ...

    def __getitem__(self, index: int | slice) -> BatchMessage[Body] | list[BatchMessage[Body]]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[BatchMessage[Body]]:
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
        """The consumer group."""
        return self._group

    @property
    def unmarked(self) -> list[BatchMessage[Body]]:
        """The messages neither marked nor fenced."""
        return [message for message in self._messages if message.mark is MessageMark.OPEN and not message.fenced]

    @property
    def remaining_s(self) -> float:
        """Seconds left of the time limit, or infinity."""
        return math.inf if self._deadline is None else self._deadline.remaining_s

    def extend(self, seconds: float | None = None) -> float:
        """As `Context.extend`."""
        return math.inf if self._deadline is None else self._deadline.extend(seconds)

    def done(self, *messages: BatchMessage[Body]) -> None:
        """Mark messages as done, whatever the handler raises later; of one key, in order.

        Raises InvalidInput for a failed message, or one behind an unfinished one of its key.
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
        """Mark messages as failed: an attempt of each counts, and its key waits.

        `error` may be RetryLater, Reject, Skip or PauseKey. Of one key, messages behind the first failed one come
        again.
        Raises InvalidInput for a done message, BatchUndone for a fenced one: don't catch that, so that its transaction
        rolls back.
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
        """Check ownership in the effects' transaction; return the messages to apply.

        Call it first, on the transaction's connection (psycopg, SQLAlchemy, Django); one round trip. `messages`
        defaults to all unmarked ones, of one key those before the first failed one.
        Messages left out were applied before, and are done. The commit applies all returned ones: apply all, or roll
        back. Fence a message once; of one key, in order.
        Raises StaleOwner: don't catch it, so that the transaction rolls back.
        """
        return run(connection, self._fencing(messages))

    async def afence(
        self, connection: Any, messages: Iterable[BatchMessage[Body]] | None = None
    ) -> list[BatchMessage[Body]]:
        """`fence` for an async connection."""
        return await run_async(connection, self._fencing(messages))

    def _fencing(self, messages: Iterable[BatchMessage[Body]] | None) -> Statements[list[BatchMessage[Body]]]:
        chosen = self._to_fence(messages)
        failpoint("fence.before")
        if chosen:
            answers, epochs = yield Statement(query("fence_many"), _facts_of(chosen))
            self._judge(chosen, answers, epochs)
        failpoint("fence.after")
        return [message for message in chosen if message.fenced]

    def _to_fence(self, messages: Iterable[BatchMessage[Body]] | None) -> list[BatchMessage[Body]]:
        if messages is None:
            chosen = self._own(m for m in self._ahead_of_failed() if m.mark is MessageMark.OPEN)
        else:
            # A message named twice would be answered "applied" before anything is committed.
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
                # All messages of the lost partition fail.
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
        """All messages, including those hidden from the handler."""
        return self._all

    def begin(self, deadline: HandlerDeadline | None, decode: Decode) -> None:
        """Decode the bodies. The handler sees no undecodable message, nor its key's later ones."""
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
        """Close the batch; return each message's outcome."""
        self._closed = True
        rest = self._when_open(raised)
        if self.kind == "key":
            return _in_order(self._all, raised, rest)
        return [_outcome(message, raised, rest) for message in self._all]

    def _when_open(self, raised: BaseException | None) -> MessageOutcome:
        if raised is None:
            return Handled()
        if isinstance(raised, StaleOwner):
            # The fence marked the messages of the lost partition; without marks, it is unknown.
            known = any(isinstance(message.error, StaleOwner) for message in self._all)
            return Redelivered(singly=False) if known else Failed(raised)
        if isinstance(raised, BatchUndone):
            # Of one key, the messages before the failed one must be applied first, without it.
            return Redelivered(singly=self.kind == "key")
        open_count = sum(not m.is_done and m.mark is not MessageMark.FAILED for m in self._messages)
        marked = any(message.mark is MessageMark.FAILED for message in self._messages)
        return Failed(raised) if open_count == 1 and not marked else Redelivered(singly=True)


def _in_order(
    messages: list[BatchMessage[Any]], raised: BaseException | None, rest: MessageOutcome
) -> list[MessageOutcome]:
    # Messages behind an unfinished one keep their order: they come again, however marked.
    behind = rest if isinstance(rest, Redelivered) else Redelivered(singly=False)
    outcomes: list[MessageOutcome] = []
    for message in messages:
        waits = bool(outcomes) and not isinstance(outcomes[-1], Handled)
        outcomes.append(behind if waits else _outcome(message, raised, rest))
    return outcomes


def _outcome(message: BatchMessage[Any], raised: BaseException | None, rest: MessageOutcome) -> MessageOutcome:
    if message.mark is MessageMark.FAILED and message.error is not None:
        return Failed(message.error)
    return Handled() if raised is None or message.is_done else rest


def _facts_of(messages: list[BatchMessage[Any]]) -> dict[str, Any]:
    facts = [message.fence_facts() for message in messages]
    columns = {"lps": "lp", "sources": "source", "keys": "key", "seqs": "seq", "epochs": "epoch", "replays": "replay"}
    found = {name: [f[of] for f in facts] for name, of in columns.items()}
    # Postgres gets an array of only nulls as text, which array_nulls=off breaks; no array means all null.
    keys = None if all(key is None for key in found["keys"]) else found["keys"]
    return {"group_id": facts[0]["group_id"], **found, "keys": keys}


def is_lost(owned: OwnedPartition, error: BaseException) -> bool:
    """Whether an error only repeats that the partition is lost."""
    return isinstance(error, StaleOwner) and owned.state is OwnershipState.GONE
