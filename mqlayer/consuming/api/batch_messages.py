"""A batch's messages: their marks and outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from mqlayer.consuming.api.context import Delivered
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition
from mqlayer.domain.message import Record

Body = TypeVar("Body")
BatchKind = Literal["distinct", "key"]


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

    __slots__ = ("_fetched", "error", "fenced", "index", "mark", "queue", "value")

    value: Body

    def __init__(self, topic: str, group: str, group_id: int, key_queue: KeyQueue, record: Record, index: int) -> None:
        super().__init__(topic, group, group_id, key_queue.owned, record)
        self.queue, self.index = key_queue, index
        self.mark = MessageMark.OPEN
        self.error: BaseException | None = None
        # Let through by the fence, in a transaction that may or may not be committed.
        self.fenced = False
        self._fetched: bytes | None = None

    @property
    def body(self) -> bytes:
        """The raw body."""
        return self._record.body if self._fetched is None else self._fetched

    @property
    def filled(self) -> bool:
        """Whether its large body is here."""
        return self._fetched is not None

    def fill(self, body: bytes) -> None:
        """Take its large body."""
        self._fetched = body

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


def outcomes_in_order(
    messages: Sequence[BatchMessage[Any]], raised: BaseException | None, rest: MessageOutcome
) -> list[MessageOutcome]:
    """Return outcomes of one key's messages; `rest`: of open ones."""
    # Messages behind an unfinished one keep their order: they come again, however marked.
    behind = rest if isinstance(rest, Redelivered) else Redelivered(singly=False)
    outcomes: list[MessageOutcome] = []
    for message in messages:
        waits = bool(outcomes) and not isinstance(outcomes[-1], Handled)
        outcomes.append(behind if waits else outcome_of(message, raised, rest))
    return outcomes


def outcome_of(message: BatchMessage[Any], raised: BaseException | None, rest: MessageOutcome) -> MessageOutcome:
    """Return a message's outcome; `rest`: an open one's."""
    if message.mark is MessageMark.FAILED and message.error is not None:
        return Failed(message.error)
    return Handled() if raised is None or message.is_done else rest
