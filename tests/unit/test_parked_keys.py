"""Parked keys in their owner's memory: each is started once, and nobody follows while one is being started."""

from __future__ import annotations

from mqlayer.consuming.engine.clock import Lease, clock
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.consuming.ordered.parked_keys import OwnedParkedKey, OwnedParkedKeys
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.groups.members import Assignment
from mqlayer.parking import KeyRef
from mqlayer.redis.partition_scripts import LockHolder, LockTaken

LIMITS = (100, 100_000, 8)


def opened(*due: OwnedParkedKey) -> tuple[Dispatcher, OwnedPartition]:
    """Return an owned partition with parked keys, and its dispatcher."""
    lease = Lease()
    lease.until = float("inf")
    dispatcher = Dispatcher(lease)
    owned = owned_under(dispatcher, 1)
    for parked_key in due:
        owned.parked.add(parked_key)
    return dispatcher, owned


def owned_under(dispatcher: Dispatcher, epoch: int) -> OwnedPartition:
    """Return an open owned partition of partition 1."""
    owned = OwnedPartition(
        Assignment(PartitionId(1), NodeId(1), 0, 1024, epoch, 1, release=False), LockHolder("p", 1, 1, "m", epoch)
    )
    dispatcher.open(owned, LockTaken(1, 1, 1, b"", {}))
    return owned


def read(seq: int) -> Record:
    """Return a message of the key from the stream."""
    return Record(seq, b"1:1:%d:0" % seq, b"k", b"body")


def test_a_key_that_waits_to_be_started_and_is_released_again_is_started_once() -> None:
    """Twice, two workers would have it at a time."""
    parked_keys, parked_key = OwnedParkedKeys(), OwnedParkedKey(KeyRef(1, b"k"), due=1.0)
    parked_keys.add(parked_key)
    assert parked_keys.due_now(2.0) == [parked_key]
    parked_keys.schedule(parked_key, 1.5)
    assert parked_keys.due_now(2.0) == [parked_key]
    parked_keys.take_due([parked_key])
    assert parked_keys.due_now(2.0) == []


def test_nothing_is_drained_while_a_key_is_being_started() -> None:
    """Case 24: the server knows the start already, the workers don't; the successor's owner would start it too."""
    parked_key = OwnedParkedKey(KeyRef(1, b"k"), due=clock())
    dispatcher, owned = opened(parked_key)
    work = dispatcher.parking.take_tasks(owned, LIMITS)
    assert work.due == [parked_key]
    assert not dispatcher.stop_starting(owned)
    assert not dispatcher.is_idle(owned)
    dispatcher.parking.resume(owned, parked_key, [ParkedRecord(1, b"1:1:1:0", b"k", b"body")])
    assert not dispatcher.stop_starting(owned)
    dispatcher.parking.reschedule(owned, parked_key, 0, float("inf"))
    assert dispatcher.stop_starting(owned)


def test_a_start_that_could_not_be_written_is_not_under_way() -> None:
    parked_key = OwnedParkedKey(KeyRef(1, b"k"), due=clock())
    dispatcher, owned = opened(parked_key)
    dispatcher.parking.not_written(owned, dispatcher.parking.take_tasks(owned, LIMITS))
    assert dispatcher.is_idle(owned)
    assert dispatcher.parking.take_tasks(owned, LIMITS).due == [parked_key]


def test_a_key_of_which_nothing_is_left_is_not_under_way() -> None:
    parked_key = OwnedParkedKey(KeyRef(1, b"k"), due=clock())
    dispatcher, owned = opened(parked_key)
    dispatcher.parking.take_tasks(owned, LIMITS)
    dispatcher.parking.resume(owned, parked_key, [])
    assert dispatcher.is_idle(owned)
    assert not owned.parked


def test_after_a_death_only_so_many_messages_as_were_in_hand_go_one_by_one() -> None:
    """Else one kill by chance would have all of a long line take a transaction each."""
    parked_key = OwnedParkedKey(KeyRef(1, b"k"), due=clock())
    parked_key.guarded_count = 2
    dispatcher, owned = opened(parked_key)
    dispatcher.parking.take_tasks(owned, LIMITS)
    seen = []
    for offset in range(1, 4):
        seen.append(parked_key.alone)
        dispatcher.parking.resume(owned, parked_key, [ParkedRecord(offset, b"1:1:%d:0" % offset, b"k", b"body")])
        assert parked_key.queue is not None
        parked_key.queue.handled.append(parked_key.queue.records[0])
    dispatcher.parking.resume(owned, parked_key, [])
    assert seen == [True, True, True]
    assert not parked_key.alone


def test_a_key_that_waits_for_an_earlier_handler_and_is_parked_by_an_operator_is_not_lost() -> None:
    """Its messages of the stream go behind those that were given back; both wait until that handler has ended."""
    dispatcher, former = opened()
    local_queue = dispatcher.new_local_queue()
    dispatcher.put(former, [Record(1, b"1:1:1:0", b"k", b"running")])
    assert dispatcher.fill(local_queue, 0.0)
    running = local_queue.popleft()
    dispatcher.drop(former)
    owned = OwnedPartition(
        Assignment(PartitionId(1), NodeId(1), 0, 1024, 2, 1, release=False), LockHolder("p", 1, 1, "m", 2)
    )
    dispatcher.open(owned, LockTaken(1, 3, 1, b"", {}))
    dispatcher.put(owned, [Record(1, b"1:1:1:0", b"k", b"again"), Record(2, b"1:1:2:0", b"k", b"next")])
    assert not dispatcher.fill(local_queue, 0.0)
    dispatcher.parking.sync(owned, [OwnedParkedKey(KeyRef(1, b"k"), due=clock())])
    work = dispatcher.parking.take_tasks(owned, LIMITS)
    [key_queue], [parked_key] = work.queues, work.due
    assert [record.body for record in key_queue.batch] == [b"again", b"next"]
    dispatcher.parking.batch_parked(owned, key_queue, parked=True)
    dispatcher.parking.resume(owned, parked_key, [ParkedRecord(1, b"1:1:1:0", b"k", b"given back")])
    assert not dispatcher.fill(local_queue, 0.0)
    dispatcher.done(running)
    assert dispatcher.fill(local_queue, 0.0)
    assert [record.body for record in local_queue.popleft().batch] == [b"given back"]


def test_nobody_looks_for_what_is_due_while_nothing_may_be_started() -> None:
    """Else the parking worker would never rest: while Postgres is away, a hand-over lasts, or successors are waited
    for."""
    dispatcher, owned = opened(OwnedParkedKey(KeyRef(1, b"k"), due=clock()))
    assert dispatcher.parking.next_due_s([owned]) == 0
    dispatcher.lease.until = 0.0
    assert dispatcher.parking.next_due_s([owned]) == float("inf")
    dispatcher.lease.until = float("inf")
    dispatcher.stop_starting(owned)
    assert dispatcher.parking.next_due_s([owned]) == float("inf")
    owned.finished = False
    dispatcher.drain(owned, clock() + 30)
    assert dispatcher.parking.next_due_s([owned]) == float("inf")


def test_a_key_that_is_given_back_to_while_it_still_runs_under_a_former_epoch_goes_on_from_postgres_alone() -> None:
    """What of it waits for that handler is parked; let go beside it, two workers would have the key."""
    dispatcher, former = opened()
    local_queue = dispatcher.new_local_queue()
    dispatcher.put(former, [read(5)])
    assert dispatcher.fill(local_queue, 0.0)
    running = local_queue.popleft()
    dispatcher.drop(former)
    owned = owned_under(dispatcher, 2)
    dispatcher.put(owned, [read(5)])
    dispatcher.parking.sync(owned, [OwnedParkedKey(KeyRef(1, b"k"), due=clock())])
    dispatcher.finish(running, [])
    assert not dispatcher.fill(local_queue, 0.0)
    assert [key_queue.batch for key_queue in dispatcher.parking.take_tasks(owned, LIMITS).queues] == [[read(5)]]


def test_what_was_to_be_parked_of_a_key_that_an_operator_ended_holds_up_no_later_epoch() -> None:
    """The owned partition went while that was written: the next one would wait for ever for what nobody runs."""
    parked_key = OwnedParkedKey(KeyRef(1, b"k"), due=clock())
    dispatcher, owned = opened(parked_key)
    local_queue = dispatcher.new_local_queue()
    dispatcher.parking.take_tasks(owned, LIMITS)
    dispatcher.parking.resume(owned, parked_key, [ParkedRecord(1, b"1:1:1:0", b"k", b"body")])
    assert dispatcher.fill(local_queue, 0.0)
    dispatcher.put(owned, [read(2)])
    (key_queue,) = dispatcher.parking.take_tasks(owned, LIMITS).queues
    dispatcher.drop(owned)
    dispatcher.parking.batch_parked(owned, key_queue, parked=False)
    assert dispatcher.runs_on(PartitionId(1))
    dispatcher.finish(local_queue.popleft(), [])
    assert not dispatcher.runs_on(PartitionId(1))


def test_what_may_be_parked_already_is_written_before_its_key_goes_on() -> None:
    """The answer to parking it was lost: gone on with first, it would be handled from Postgres and once more from here.

    Found by the model, `docs/model`: turn-alone.
    """
    parked_key, other = OwnedParkedKey(KeyRef(1, b"k")), OwnedParkedKey(KeyRef(1, b"other"))
    dispatcher, owned = opened(parked_key, other)
    dispatcher.put(owned, [read(1)])
    lost = dispatcher.parking.take_tasks(owned, (2, 100_000, 8))
    assert [list(key_queue.batch) for key_queue in lost.queues] == [[read(1)]]
    more = [Record(seq, b"1:1:%d:0" % seq, b"other", b"body") for seq in (2, 3, 4)]
    dispatcher.put(owned, [*more, read(5)])
    dispatcher.parking.not_written(owned, lost)
    assert owned.to_park.uncertain
    owned.parked.schedule(parked_key, clock())
    work = dispatcher.parking.take_tasks(owned, (2, 100_000, 8))
    assert work.due == [parked_key]
    assert [list(key_queue.batch) for key_queue in work.queues] == [[read(1)], more[:1]]
