"""The rules of the document's OrderInfo, each by its name, and where ours is stricter on purpose.

The document: RocketMQ 5's ConsumerOrderInfoManager, one OrderInfo per group and queue, in the broker's memory. Ours is
the scripts pop_receive and pop_settle, with scope `partition`, which is what the document has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqlayer.domain.routing import NodeId
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import Refused
from mqlayer.redis.pop_scripts import NoBatch, PopBatch, PopSettled, Scope, SettleAction
from mqlayer.stack import RedisServer
from tests.fixtures.partition_harness import HOUR_MS, PartitionHarness


class Queue(PartitionHarness):
    """One partition with messages of one key or several, and a group at it."""

    def __init__(self, connection: NodeConnection, prefix: str, scope: Scope = "partition") -> None:
        super().__init__(connection, prefix)
        self.asker = self.receiver(scope, 5)
        self.next, self.attempts = 1, 0
        self.create()

    def put(self, *keys: str) -> None:
        self.add(range(self.next, self.next + len(keys)), lambda offset: keys[offset - self.next].encode())
        self.next += len(keys)

    def pop(self, limit: int = 500, *, invisible_ms: int = HOUR_MS, attempt: str = "") -> PopBatch | NoBatch:
        self.attempts += 1
        answer = self.asker.receive(attempt or f"a{self.attempts}", limit, invisible_ms)
        assert isinstance(answer, PopBatch | NoBatch)
        return answer

    def given(self, limit: int = 500) -> PopBatch:
        answer = self.pop(limit)
        assert isinstance(answer, PopBatch)
        return answer

    def say(self, word: SettleAction, batch: int, *offsets: int, ms: int = 0) -> object:
        return self.asker.settle(word, [(batch, offset) for offset in offsets], ms=ms)


def offsets(given: PopBatch) -> list[int]:
    return [record.offset for record in given.records]


@pytest.fixture
def connection(every_redis: RedisServer) -> Iterator[NodeConnection]:
    """A connection to a Redis of each version."""
    with NodeConnection(Node(NodeId(1), "n", every_redis.url, None), any_run=True) as connection:
        yield connection


@pytest.fixture
def queue(connection: NodeConnection, key_prefix: str) -> Queue:
    return Queue(connection, key_prefix)


def test_update_counts_a_message_when_the_same_batch_is_given_again(queue: Queue) -> None:
    """`update`: the same offsets again count one more. Ours: per message, not per batch."""
    queue.put("k", "k")
    first = queue.given()
    queue.say("extend", first.batch, 1, 2)
    again = queue.given()
    assert (list(first.delivery_counts), list(again.delivery_counts)) == ([1, 1], [2, 2])


def test_update_does_not_reset_counts_because_the_batch_changed(queue: Queue) -> None:
    """`update` sets the count to 0 when the offsets differ ("reset, because msgs are changed"), so that a message that
    fails with ever new neighbours never reaches its limit. Ours keeps each message's count (case 58)."""
    queue.put("k", "k")
    first = queue.given()
    queue.say("extend", first.batch, 1, 2)
    queue.put("k")
    assert list(queue.given().delivery_counts) == [2, 2, 1]


def test_update_puts_a_new_batch_in_the_place_of_the_old_one(queue: Queue) -> None:
    """`update` overwrites the OrderInfo. Ours: the old batch's tokens are void from then on (case 53), where the
    document takes any ack of an offset that the new batch happens to hold."""
    queue.put("k", "k")
    first = queue.given()
    queue.say("extend", first.batch, 1, 2)
    second = queue.given()
    assert queue.say("ack", first.batch, 1, 2) == PopSettled(1, [1, 2])
    assert queue.committed == 1
    assert queue.say("ack", second.batch, 1) == PopSettled(2, [])


def test_check_block_refuses_while_a_batch_is_neither_done_nor_visible(queue: Queue) -> None:
    """`checkBlock`: within the visibility timeout and not done. Ours blocks by each message's own time (case 56)."""
    queue.put("k", "l", "m")
    batch = queue.given(2)
    assert isinstance(blocked := queue.pop(), NoBatch)
    assert blocked.status == "blocked"
    queue.say("extend", batch.batch, 1)
    assert isinstance(queue.pop(), NoBatch), "2 is invisible still"
    queue.say("extend", batch.batch, 2)
    assert offsets(queue.given()) == [1, 2, 3]


def test_check_block_goes_by_the_time_that_the_batch_was_given_with(queue: Queue) -> None:
    """`checkBlock` compares with the visibility timeout of whoever asks *now*: who asks with a shorter one gets a batch
    that another still works on. Ours goes by the time that was promised to the one who has it."""
    queue.put("k")
    queue.given()
    assert isinstance(queue.pop(invisible_ms=1), NoBatch)


def test_check_block_lets_the_first_receiver_pass(queue: Queue) -> None:
    """`checkBlock`: no OrderInfo, no block."""
    queue.put("k")
    assert offsets(queue.given()) == [1]


def test_check_block_lets_the_same_attempt_pass(queue: Queue) -> None:
    """Later versions of `checkBlock`: an attempt id gets its own batch again (case 57)."""
    queue.put("k", "k")
    wish = {"attempt": "once"}
    first, again = queue.pop(**wish), queue.pop(**wish)  # type: ignore[arg-type]
    assert first == again


def test_commit_and_next_moves_on_when_all_are_acknowledged(queue: Queue) -> None:
    """`commitAndNext`: the offset after the last one, once all bits are set (case 51)."""
    queue.put("k", "k", "k")
    batch = queue.given()
    assert queue.say("ack", batch.batch, 3) == PopSettled(1, [])
    assert queue.say("ack", batch.batch, 2) == PopSettled(1, [])
    assert queue.say("ack", batch.batch, 1) == PopSettled(4, [])


def test_commit_and_next_moves_committed_on_with_every_first_one(queue: Queue) -> None:
    """`commitAndNext` answers -2 until the whole batch is done: what was acknowledged at its front is given out again
    where the last one's receiver dies. Ours commits up to the first that is not acknowledged."""
    queue.put("k", "k", "k")
    batch = queue.given()
    assert queue.say("ack", batch.batch, 1) == PopSettled(2, [])
    queue.say("extend", batch.batch, 2, 3)
    assert offsets(queue.given()) == [2, 3]


def test_commit_and_next_refuses_an_offset_of_no_batch(queue: Queue) -> None:
    """`commitAndNext` answers -1 for an offset that the batch does not hold; but offset + 1, which commits past what
    nobody was given, where it holds no OrderInfo at all. Ours refuses both (case 54)."""
    queue.put("k", "k")
    queue.fence(5)
    queue.given(1)
    assert queue.say("ack", 1, 2) == PopSettled(1, [1])
    assert queue.say("ack", 1, 1, 3) == Refused("unknown", "3")
    assert queue.committed == 1


def test_commit_and_next_takes_what_is_committed_for_done(queue: Queue) -> None:
    """The ack processor returns at once for an offset below the committed one."""
    queue.put("k", "k")
    batch = queue.given(1)
    for _ in range(2):
        assert queue.say("ack", batch.batch, 1) == PopSettled(2, [])
    assert queue.say("ack", 0, 1) == PopSettled(2, []), "whoever says so"


def test_is_done_when_every_bit_of_the_batch_is_set(queue: Queue) -> None:
    """`isDone`: then, and not before, the next batch is given out (case 50). The document's bitmap is a long of 64 bits
    whose index is a byte; ours holds 500, and more are refused (case 60)."""
    queue.put(*["k"] * 501)
    batch = queue.given()
    assert offsets(batch) == list(range(1, 501))
    queue.say("ack", batch.batch, *range(2, 501))
    assert isinstance(queue.pop(), NoBatch)
    queue.say("ack", batch.batch, 1)
    assert offsets(queue.given()) == [501]


def test_is_done_of_nothing(queue: Queue) -> None:
    """`isDone`: an empty batch blocks nobody; ours gives none."""
    assert isinstance(empty := queue.pop(), NoBatch)
    assert (empty.status, empty.wait_ms) == ("empty", -1)
    queue.put("k")
    assert offsets(queue.given()) == [1]


def test_by_key_only_the_keys_that_are_out_are_withheld(connection: NodeConnection, key_prefix: str) -> None:
    """Not in the document (case 64): a batch that is out leaves the other keys of its partition alone."""
    queue = Queue(connection, key_prefix, "key")
    queue.put("k", "l", "k", "m", "k")
    first = queue.given(1)
    second = queue.given()
    assert (offsets(first), offsets(second)) == ([1], [2, 4])
    queue.say("nack", first.batch, 1, ms=HOUR_MS)
    assert isinstance(queue.pop(), NoBatch)
    queue.put("k", "n")
    assert offsets(queue.given()) == [7]
    assert queue.committed == 1
