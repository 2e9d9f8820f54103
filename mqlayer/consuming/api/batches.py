"""Batches of messages for one call of a handler: of distinct keys, or of one key in order.

A fenced message is done only when the handler returns; if its transaction committed before a crash, the next fence
answers "applied".
An exception fails the only open message; several come again singly, uncounted
(`docs/design/decisions/0057-batches-blame-no-message.md`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, overload

from mqlayer.arguments import check_fields, explain
from mqlayer.consuming.api.batch_fence import BatchFence
from mqlayer.consuming.api.batch_messages import (
    BatchKind,
    BatchMessage,
    Body,
    Failed,
    Handled,
    MessageMark,
    MessageOutcome,
    Redelivered,
    outcome_of,
    outcomes_in_order,
)
from mqlayer.consuming.engine.timeouts import HandlerDeadline
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition, OwnershipState
from mqlayer.domain.codecs import Decode
from mqlayer.errors import BatchUndone, BodyMismatch, HandlerFault, InvalidInput, StaleOwner
from mqlayer.postgres.caller_connections import run, run_async

LARGEST: Final = 500
LONGEST_LINGER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class BatchOf:
    """What one call gets: one message each of `distinct` keys, or several of one `key`, in order.

    `limit`: 1 to 500 messages. `limit_bytes`: total record size; one message may exceed it. `linger_s`: 0 to 60 s that
    the first message may wait for others. Raises InvalidInput.
    """

    kind: BatchKind
    limit: int = 100
    limit_bytes: int = 1024 * 1024
    linger_s: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind not in ("distinct", "key"):
            raise InvalidInput(f"a batch is of 'distinct' keys or of one 'key', not of {self.kind!r}")
        if not 1 <= self.limit <= LARGEST:
            raise InvalidInput(f"a batch has 1 to {LARGEST} messages, not {self.limit}")
        if self.limit_bytes < 1:
            raise InvalidInput(f"a batch takes 1 byte or more, not {self.limit_bytes}")
        if not 0 <= self.linger_s <= LONGEST_LINGER_S:
            raise InvalidInput(f"a message waits 0 to {LONGEST_LINGER_S:g} s for a batch, not {self.linger_s}")


class Batch(Sequence[BatchMessage[Body]], Generic[Body]):
    """The messages of one call of a handler, their results and their fence.

    A return makes all messages not marked as failed done; an exception, those found applied, or marked done and not
    fenced.
    """

    __slots__ = ("_all", "_deadline", "_fence", "_group", "_messages", "_topic", "kind")

    def __init__(self, kind: BatchKind, topic: str, group: str, messages: Sequence[BatchMessage[Body]]) -> None:
        self.kind: BatchKind = kind
        self._topic, self._group = topic, group
        self._all = self._messages = list(messages)
        self._deadline: HandlerDeadline | None = None
        self._fence = BatchFence(kind, topic, group, self._all)

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

    @explain
    def extend(self, seconds: float | None = None) -> float:
        """As `Context.extend`."""
        return math.inf if self._deadline is None else self._deadline.extend(seconds)

    @explain
    def done(self, *messages: BatchMessage[Body]) -> None:
        """Mark messages as done, even if the handler raises later; of one key, in order.

        Raises InvalidInput for a failed message, or one behind an unfinished one of its key.
        """
        found = self._fence.own(messages)
        for message in found:
            if message.mark is MessageMark.FAILED:
                raise InvalidInput(f"message {message.index} of the batch was marked as failed: mark it once")
        self._fence.check_order(found)
        for message in found:
            if message.mark is MessageMark.OPEN:
                message.mark = MessageMark.DONE

    @explain
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
        for message in self._fence.own([messages] if isinstance(messages, BatchMessage) else messages):
            if message.mark in (MessageMark.DONE, MessageMark.APPLIED):
                raise InvalidInput(f"message {message.index} of the batch is done: it can't fail any more")
            message.mark, message.error = MessageMark.FAILED, failure
            undone = message if undone is None and message.fenced else undone
        if undone is not None:
            raise BatchUndone(self._topic, undone.identity.lp, undone.identity.seq)

    @explain
    def fence(self, connection: Any, messages: Iterable[BatchMessage[Body]] | None = None) -> list[BatchMessage[Body]]:
        """Check ownership in the effects' transaction; return the messages to apply.

        Call it first, on the transaction's connection (psycopg, SQLAlchemy, Django); one round trip. `messages`
        defaults to all unmarked ones, of one key those before the first failed one.
        Messages left out were applied before, and are done. The commit applies all returned ones: apply all, or roll
        back. Fence a message once; of one key, in order.
        Raises StaleOwner: don't catch it, so that the transaction rolls back. Raises InvalidInput without one.
        """
        return run(connection, self._fence.statements(self._messages, messages))

    @explain
    async def afence(
        self, connection: Any, messages: Iterable[BatchMessage[Body]] | None = None
    ) -> list[BatchMessage[Body]]:
        """`fence` for an async connection."""
        return await run_async(connection, self._fence.statements(self._messages, messages))

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
            if message.mark is MessageMark.FAILED:
                if self.kind == "key":
                    break
                continue
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
        self._fence.closed = True
        rest = self._when_open(raised)
        if self.kind == "key":
            return outcomes_in_order(self._all, raised, rest)
        return [outcome_of(message, raised, rest) for message in self._all]

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


def is_lost(owned: OwnedPartition, error: BaseException) -> bool:
    """Whether an error only repeats that the partition is lost."""
    return isinstance(error, StaleOwner) and owned.state is OwnershipState.GONE
