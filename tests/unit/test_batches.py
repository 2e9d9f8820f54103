"""What becomes of a batch's messages: whoever is to blame, none is lost, none dies for another, no key is reversed."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.consuming.api.batch_handlers import batch_shape
from mqlayer.consuming.api.batch_messages import (
    BatchKind,
    BatchMessage,
    Failed,
    Handled,
    MessageMark,
    MessageOutcome,
    Redelivered,
)
from mqlayer.consuming.api.batches import Batch
from mqlayer.consuming.api.context import Context
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition, key_queue_of
from mqlayer.domain.codecs import decoder_for
from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.errors import BatchUndone, BodyMismatch, HandlerFault, InvalidInput, StaleOwner
from mqlayer.groups.members import Assignment
from mqlayer.redis.partition_scripts import LockHolder

BOOM = RuntimeError("boom")
KINDS: list[BatchKind] = ["distinct", "key"]


def batch_of(kind: BatchKind, count: int, *, bodies: list[bytes] | None = None, partitions: int = 1) -> Batch[Any]:
    """Return a batch of so many messages, in turn of so many partitions."""
    helds = [
        OwnedPartition(
            Assignment(PartitionId(n), NodeId(1), 0, 1024, n + 1, 1, release=False), LockHolder("p", n, 1, "m", n + 1)
        )
        for n in range(partitions)
    ]
    messages: list[BatchMessage[Any]] = []
    for n in range(count):
        record = Record(n + 1, b"1:5:%d:0" % (n + 1), b"k" if kind == "key" else b"k%d" % n, b"1")
        if bodies is not None:
            record = record._replace(body=bodies[n])
        lane = key_queue_of(helds[n % partitions], record.key, record)
        messages.append(BatchMessage("orders", "g", 1, lane, record, n))
    batch: Batch[Any] = Batch(kind, "orders", "g", messages)
    batch.begin(None, decoder_for(int))
    return batch


def words(outcomes: list[MessageOutcome]) -> str:
    """Return outcomes as letters: done, failed, again, singly."""
    names = {Handled: "d", Failed: "f"}
    return "".join("s" if isinstance(o, Redelivered) and o.singly else names.get(type(o), "a") for o in outcomes)


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_return_all_are_done(kind: BatchKind) -> None:
    assert words(batch_of(kind, 3).end(None)) == "ddd"


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_blames_nobody_of_several(kind: BatchKind) -> None:
    assert words(batch_of(kind, 3).end(BOOM)) == "sss"


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_blames_the_only_one(kind: BatchKind) -> None:
    assert batch_of(kind, 1).end(BOOM) == [Failed(BOOM)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_blames_the_only_one_that_is_not_done(kind: BatchKind) -> None:
    batch = batch_of(kind, 3)
    batch.done(*batch[:2])
    assert batch.end(BOOM) == [Handled(), Handled(), Failed(BOOM)]


def test_an_exception_of_whoever_named_the_failed_one_blames_nobody_else() -> None:
    """`except Exception as error: batch.fail(message, error); raise` says it twice of one."""
    batch = batch_of("distinct", 2)
    batch.fail(batch[0], BOOM)
    assert words(batch.end(BOOM)) == "fs"


def test_of_distinct_keys_each_fails_for_itself() -> None:
    batch = batch_of("distinct", 4)
    batch.fail([batch[1], batch[3]], BOOM)
    assert words(batch.end(None)) == "dfdf"


def test_of_one_key_the_first_failed_one_counts_and_the_rest_waits() -> None:
    batch = batch_of("key", 4)
    batch.fail([batch[1], batch[3]], "no stock")
    outcomes = batch.end(None)
    assert words(outcomes) == "dfaa"
    assert isinstance(outcomes[1], Failed)
    assert str(outcomes[1].error) == "no stock"


@pytest.mark.parametrize(("kind", "seen", "outcomes"), [("distinct", [1, 3], "dfd"), ("key", [1], "dfa")])
def test_a_body_that_does_not_fit_is_not_seen(kind: BatchKind, seen: list[int], outcomes: str) -> None:
    batch = batch_of(kind, 3, bodies=[b"1", b"secret", b"3"])
    assert batch.values == seen
    ended = batch.end(None)
    assert words(ended) == outcomes
    assert isinstance(ended[1], Failed)
    assert isinstance(ended[1].error, BodyMismatch)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_fence_let_through_is_done_only_by_a_return(kind: BatchKind) -> None:
    """Until then its transaction may be rolled back, whatever is marked."""
    for raised, expected in ((None, "ddd"), (BOOM, "sss")):
        batch = batch_of(kind, 3)
        batch._fence.judge(batch[:], ["current"] * 3, [1] * 3)
        batch.done(*batch)
        assert words(batch.end(raised)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_is_named_twice_is_fenced_once(kind: BatchKind) -> None:
    """The second answer would be "applied" for the first one's sake, in a transaction that may be rolled back."""
    batch = batch_of(kind, 2)
    assert batch._fence.choose(batch[:], [batch[0], batch[0], batch[1]]) == batch[:]


@pytest.mark.parametrize(("kind", "outcomes"), [("distinct", "dafa"), ("key", "dsss")])
def test_a_failure_behind_the_fence_rolls_back_and_counts_once_it_is_first(kind: BatchKind, outcomes: str) -> None:
    """Those before it of its key have to be applied first, without it."""
    batch = batch_of(kind, 4)
    batch._fence.judge(batch[:], ["applied", "current", "current", "current"], [1] * 4)
    with pytest.raises(BatchUndone) as undone:
        batch.fail(batch[2], BOOM)
    assert words(batch.end(undone.value)) == outcomes
    alone = batch_of(kind, 1)
    alone._fence.judge(alone[:], ["current"], [1])
    with pytest.raises(BatchUndone) as undone:
        alone.fail(alone[0], BOOM)
    assert alone.end(undone.value) == [Failed(BOOM)]


def test_a_lost_partition_is_named_and_the_others_come_again() -> None:
    batch = batch_of("distinct", 4, partitions=2)
    with pytest.raises(StaleOwner) as stale:
        batch._fence.judge(batch[:], ["current", "stale", None, None], [1, 9, None, None])
    outcomes = batch.end(stale.value)
    assert words(outcomes) == "afaf"
    assert all(isinstance(o.error, StaleOwner) for o in outcomes if isinstance(o, Failed))


def test_a_word_about_another_batch_or_after_the_end_is_refused() -> None:
    batch, other = batch_of("distinct", 2), batch_of("distinct", 2)
    with pytest.raises(InvalidInput, match="another batch"):
        batch.done(other[0])
    batch.done(batch[0])
    with pytest.raises(InvalidInput, match="can't fail any more"):
        batch.fail(batch[0], BOOM)
    batch.end(None)
    with pytest.raises(HandlerFault, match="has ended"):
        batch.fail(batch[1], BOOM)


@given(st.integers(0, 2**32), st.sampled_from(KINDS))
def test_nothing_is_lost_and_no_key_is_reversed(seed: int, kind: BatchKind) -> None:
    """Whatever a handler says: done means said so, applied, or a return; of a key only what is in front is done."""
    rng = random.Random(seed)
    batch = batch_of(kind, rng.randint(1, 6))
    raised = say_anything(batch, rng)
    marks = [(message.mark, message.fenced) for message in batch]
    outcomes = batch.end(raised)
    for (mark, fenced), outcome in zip(marks, outcomes, strict=True):
        if isinstance(outcome, Handled):
            assert mark is not MessageMark.FAILED
            assert raised is None or mark is MessageMark.APPLIED or (mark is MessageMark.DONE and not fenced)
    if kind == "key":
        behind = words(outcomes).lstrip("d")
        assert "d" not in behind
        assert "f" not in behind[1:]


def say_anything(batch: Batch[Any], rng: random.Random) -> BaseException | None:
    """Mark and fence at random, as a handler that lets pass what it should; return what it raises."""
    for _ in range(rng.randint(0, 5)):
        some = rng.sample(batch[:], rng.randint(1, len(batch)))
        try:
            match rng.choice(["done", "fail", "fence"]):
                case "done":
                    batch.done(*some)
                case "fail":
                    batch.fail(some, BOOM)
                case "fence":
                    chosen = batch._fence.choose(batch[:], some)
                    batch._fence.judge(chosen, [rng.choice(["current", "applied"]) for _ in chosen], [1] * len(chosen))
        except InvalidInput:
            continue
        except (BatchUndone, HandlerFault) as error:
            return error
    return rng.choice([None, BOOM])


def test_a_message_of_a_batch_tells_what_a_context_does() -> None:
    of_call = {"fence", "afence", "extend", "remaining_s", "topic", "group"}
    of_singles = {"inbox", "ainbox"}
    told = {name for name in dir(Context) if not name.startswith("_")} - of_call - of_singles
    assert told <= {name for name in dir(BatchMessage) if not name.startswith("_")}
    assert of_call <= set(dir(Batch))


def test_a_handler_says_by_its_annotations_what_it_takes() -> None:
    def bodies(orders: list[int]) -> None: ...

    def both(orders: list[int], batch: Batch[int]) -> None: ...

    def whole(batch: Batch[int]) -> None: ...

    def bare(orders, batch): ...  # type: ignore[no-untyped-def]

    assert batch_shape(bodies, None) == (int, True, False)
    assert batch_shape(both, None) == (int, True, True)
    assert batch_shape(whole, None) == (int, False, False) != batch_shape(whole, str)
    assert batch_shape(bare, None) == (bytes, True, True)
    assert batch_shape(bare, str) == (str, True, True)
