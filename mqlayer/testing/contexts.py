"""A handler as a function: a Context, or a Batch, from one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final, Literal, TypedDict, Unpack

from mqlayer.arguments import explain
from mqlayer.consuming import Batch, BatchMessage, Context
from mqlayer.consuming.api.batch_messages import BatchKind
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, key_queue_of
from mqlayer.domain.message import Identity, ParkedRecord, Record
from mqlayer.domain.routing import LP_COUNT, NodeId, PartitionId, lp_of
from mqlayer.errors import InvalidInput
from mqlayer.groups.members import Assignment
from mqlayer.outbox.outbox_message import message_of
from mqlayer.postgres.caller_connections import Row, StandIn, Statement, run, run_async
from mqlayer.postgres.queries import query
from mqlayer.randomness import RNG
from mqlayer.redis.partition_scripts import LockHolder
from mqlayer.testing.messages import PublishedMessage, TopicOrName, new_message, record_of, topic_name

FenceAnswer = Literal["current", "applied", "stale"]

EPOCH: Final = 1
_seqs = count(1)
# Of this process alone, so that a database that outlives the test knows none of its effects.
_GROUP_ID: Final = RNG.randrange(2**40, 2**52)


class MessageFacts(TypedDict, total=False):
    """Keyword arguments of `context`. `attempt`: 1 at the first delivery; `answer`: of a fence without a database."""

    group: str
    headers: Mapping[str, str] | None
    tags: Sequence[str]
    attempt: int
    at_ms: int
    offset: int
    answer: FenceAnswer


class FixedAnswer(StandIn):
    """Answers fence and inbox without a database."""

    def __init__(self, answer: FenceAnswer, *, asynchronous: bool = False) -> None:
        self._answer, self.asynchronous = answer, asynchronous

    def answer(self, statement: Statement) -> Row:
        """Return the answer to all."""
        if statement.text == query("fence_many"):
            count = len(statement.parameters["lps"])
            return [self._answer] * count, [EPOCH + 1] * count
        return (self._answer, EPOCH + 1) if statement.text == query("fence") else (self._answer,)


class MemoryContext(Context):
    """A Context whose fence and inbox take any connection, and ask none."""

    __slots__ = ("_given",)

    def __init__(self, topic: str, group: str, owned: OwnedPartition, record: Record, answer: FenceAnswer) -> None:
        super().__init__(topic, group, _GROUP_ID, owned, record)
        self._given: FenceAnswer = answer

    def fence(self, connection: Any) -> None:
        """Let the message through, once."""
        del connection
        run(FixedAnswer(self._given), self._fencing())

    async def afence(self, connection: Any) -> None:
        """`fence` for async code."""
        del connection
        await run_async(FixedAnswer(self._given, asynchronous=True), self._fencing())

    def inbox(self, connection: Any, *, name: str | None = None) -> None:
        """Let the message through, once for each name."""
        del connection
        super().inbox(FixedAnswer(self._given), name=name)

    async def ainbox(self, connection: Any, *, name: str | None = None) -> None:
        """`inbox` for async code."""
        del connection
        await super().ainbox(FixedAnswer(self._given, asynchronous=True), name=name)


class MemoryBatch(Batch[Any]):
    """A Batch whose fence takes any connection, and asks none."""

    __slots__ = ()

    def fence(self, connection: Any, messages: Iterable[BatchMessage[Any]] | None = None) -> list[BatchMessage[Any]]:
        """Let messages through, once."""
        del connection
        return super().fence(FixedAnswer("current"), messages)

    async def afence(
        self, connection: Any, messages: Iterable[BatchMessage[Any]] | None = None
    ) -> list[BatchMessage[Any]]:
        """`fence` for async code."""
        del connection
        return await super().afence(FixedAnswer("current", asynchronous=True), messages)


@explain
def context(
    body: Any = b"",
    *,
    topic: TopicOrName = "tests",
    key: str | None = None,
    connection: Any = None,
    **facts: Unpack[MessageFacts],
) -> Context:
    """Return the Context of one message, with which a handler is called as a function.

    `body`: a body, encoded as the topic does; or a PublishedMessage. A typed topic gives the key too. Without
    `connection`, fence and inbox ask no database and answer `answer`; with the test's own connection to a database with
    the application schema, they ask that on the connection that the handler gives them. Each call is another message.
    Raises InvalidInput.
    """
    answer: FenceAnswer = facts.get("answer", "current")
    if connection is not None and answer != "current":
        raise InvalidInput("with a connection, its database answers: leave `answer` out")
    name = topic_name(topic)
    record = _record(body, topic, key, facts)
    group, owned = facts.get("group", "tests"), _owned()
    if connection is None:
        return MemoryContext(name, group, owned, record, answer)
    return Context(name, group, _GROUP_ID, owned, record)


@explain
def batch(
    bodies: Sequence[Any],
    *,
    topic: TopicOrName = "tests",
    kind: BatchKind = "distinct",
    key: str | None = None,
    connection: Any = None,
    group: str = "tests",
) -> Batch[Any]:
    """Return the Batch of some messages, to call a batch handler as a function; arguments as of `context`.

    `key`: of all, for the kind "key". Raises InvalidInput, BodyMismatch.
    """
    name, owned, queues = topic_name(topic), _owned(), dict[bytes, KeyQueue]()
    messages: list[BatchMessage[Any]] = []
    for index, body in enumerate(bodies):
        record = _record(body, topic, key, {})
        queue = queues.setdefault(record.key, key_queue_of(owned, record.key, record))
        messages.append(BatchMessage(name, group, _GROUP_ID, queue, record, index))
    made = (MemoryBatch if connection is None else Batch)(kind, name, group, messages)
    for message in messages:
        message.value = message.body if isinstance(topic, str) else topic.decode(message.body)
    return made


def _record(body: Any, topic: TopicOrName, key: str | None, facts: MessageFacts) -> Record:
    headers, tags = facts.get("headers"), facts.get("tags", ())
    if isinstance(body, PublishedMessage):
        key, headers, tags, data = key or body.key, headers or body.headers, tags or body.tags, body.body
    else:
        said = new_message(topic, body, key)
        data, key = said["body"], said["key"]
    message = message_of(topic_name(topic), key=key, body=data, headers=headers, tags=tags)
    seq = next(_seqs)
    identity = Identity(1, 0 if key is None else lp_of(key.encode()), seq)
    record = record_of(message, facts.get("offset", seq), identity, facts.get("at_ms", 0))
    attempt = facts.get("attempt", 1)
    if attempt < 1:
        raise InvalidInput(f"a message's first attempt is 1, not {attempt}")
    plain = record.offset, record.m, record.key, record.body
    return record if attempt == 1 else ParkedRecord.of(plain, attempts=attempt - 1, redriven=False)


def _owned() -> OwnedPartition:
    partition = PartitionId(1)
    assignment = Assignment(partition, NodeId(1), 0, LP_COUNT, EPOCH, 1, release=False)
    return OwnedPartition(assignment, LockHolder("", partition, _GROUP_ID, "test", EPOCH))
