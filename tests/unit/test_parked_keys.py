"""Parked keys in their owner's memory: each is started once, and nobody follows while one is being started."""

from __future__ import annotations

from mqlayer.consuming.clock import Lease, clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.holdings import Held
from mqlayer.consuming.parked import Parking, Parkings
from mqlayer.domain.message import ParkedRecord, Record
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.membership.members import Assigned
from mqlayer.parking import KeyRef
from mqlayer.redis.partitions import Holder, Taken

LIMITS = (100, 100_000, 8)


def opened(*due: Parking) -> tuple[Dispatcher, Held]:
    """Return a holding with parked keys, and its dispatcher."""
    lease = Lease()
    lease.until = float("inf")
    dispatcher = Dispatcher(lease)
    held = held_under(dispatcher, 1)
    for parking in due:
        held.parked.add(parking)
    return dispatcher, held


def held_under(dispatcher: Dispatcher, epoch: int) -> Held:
    """Return an open holding of partition 1."""
    held = Held(Assigned(PartitionId(1), NodeId(1), 0, 1024, epoch, 1, release=False), Holder("p", 1, 1, "m", epoch))
    dispatcher.open(held, Taken(1, 1, 1, b"", {}))
    return held


def read(seq: int) -> Record:
    """Return a message of the key from the stream."""
    return Record(seq, b"1:1:%d:0" % seq, b"k", b"body")


def test_a_key_that_waits_to_be_started_and_is_released_again_is_started_once() -> None:
    """Twice, two workers would have it at a time."""
    parkings, parking = Parkings(), Parking(KeyRef(1, b"k"), due=1.0)
    parkings.add(parking)
    assert parkings.ripe(2.0) == [parking]
    parkings.schedule(parking, 1.5)
    assert parkings.ripe(2.0) == [parking]
    parkings.take_ripe([parking])
    assert parkings.ripe(2.0) == []


def test_nothing_is_drained_while_a_key_is_being_started() -> None:
    """Case 24: the server knows the start already, the workers don't; the successor's owner would start it too."""
    parking = Parking(KeyRef(1, b"k"), due=clock())
    dispatcher, held = opened(parking)
    work = dispatcher.parking_work(held, LIMITS)
    assert work.due == [parking]
    assert not dispatcher.finish_holding(held)
    assert not dispatcher.drained(held)
    dispatcher.resume(held, parking, [ParkedRecord(1, b"1:1:1:0", b"k", b"body")])
    assert not dispatcher.finish_holding(held)
    dispatcher.rest(held, parking, 0, float("inf"))
    assert dispatcher.finish_holding(held)


def test_a_start_that_could_not_be_written_is_not_under_way() -> None:
    parking = Parking(KeyRef(1, b"k"), due=clock())
    dispatcher, held = opened(parking)
    dispatcher.not_kept(held, dispatcher.parking_work(held, LIMITS))
    assert dispatcher.drained(held)
    assert dispatcher.parking_work(held, LIMITS).due == [parking]


def test_a_key_of_which_nothing_is_left_is_not_under_way() -> None:
    parking = Parking(KeyRef(1, b"k"), due=clock())
    dispatcher, held = opened(parking)
    dispatcher.parking_work(held, LIMITS)
    dispatcher.resume(held, parking, [])
    assert dispatcher.drained(held)
    assert not held.parked


def test_after_a_death_only_so_many_messages_as_were_in_hand_go_one_by_one() -> None:
    """Else one kill by chance would have all of a long line take a transaction each."""
    parking = Parking(KeyRef(1, b"k"), due=clock())
    parking.careful = 2
    dispatcher, held = opened(parking)
    dispatcher.parking_work(held, LIMITS)
    seen = []
    for offset in range(1, 4):
        seen.append(parking.alone)
        dispatcher.resume(held, parking, [ParkedRecord(offset, b"1:1:%d:0" % offset, b"k", b"body")])
        assert parking.lane is not None
        parking.lane.line.append(parking.lane.records[0])
    dispatcher.resume(held, parking, [])
    assert seen == [True, True, True]
    assert not parking.alone


def test_a_key_that_waits_for_an_earlier_handler_and_is_parked_by_an_operator_is_not_lost() -> None:
    """Its messages of the stream go behind those that were given back; both wait until that handler has ended."""
    dispatcher, former = opened()
    hand = dispatcher.new_hand()
    dispatcher.put(former, [Record(1, b"1:1:1:0", b"k", b"running")])
    assert dispatcher.take_now(hand)
    running = hand.popleft()
    dispatcher.drop(former)
    held = Held(Assigned(PartitionId(1), NodeId(1), 0, 1024, 2, 1, release=False), Holder("p", 1, 1, "m", 2))
    dispatcher.open(held, Taken(1, 3, 1, b"", {}))
    dispatcher.put(held, [Record(1, b"1:1:1:0", b"k", b"again"), Record(2, b"1:1:2:0", b"k", b"next")])
    assert not dispatcher.take_now(hand)
    dispatcher.reload_parked(held, [Parking(KeyRef(1, b"k"), due=clock())])
    work = dispatcher.parking_work(held, LIMITS)
    [lane], [parking] = work.lanes, work.due
    assert [record.body for record in lane.batch] == [b"again", b"next"]
    dispatcher.kept(held, lane, parked=True)
    dispatcher.resume(held, parking, [ParkedRecord(1, b"1:1:1:0", b"k", b"given back")])
    assert not dispatcher.take_now(hand)
    dispatcher.done(running)
    assert dispatcher.take_now(hand)
    assert [record.body for record in hand.popleft().batch] == [b"given back"]


def test_nobody_looks_for_what_is_due_while_nothing_may_be_started() -> None:
    """Else the keeper would never rest: while Postgres is away, a hand-over lasts, or successors are waited for."""
    dispatcher, held = opened(Parking(KeyRef(1, b"k"), due=clock()))
    assert dispatcher.next_parking_s([held]) == 0
    dispatcher.lease.until = 0.0
    assert dispatcher.next_parking_s([held]) == float("inf")
    dispatcher.lease.until = float("inf")
    dispatcher.finish_holding(held)
    assert dispatcher.next_parking_s([held]) == float("inf")
    held.finished = False
    dispatcher.drain(held, clock() + 30)
    assert dispatcher.next_parking_s([held]) == float("inf")


def test_a_key_that_is_given_back_to_while_it_still_runs_under_a_former_holding_goes_on_from_postgres_alone() -> None:
    """What of it waits for that handler is parked; let go beside it, two workers would have the key."""
    dispatcher, former = opened()
    hand = dispatcher.new_hand()
    dispatcher.put(former, [read(5)])
    assert dispatcher.take(hand, 0.0)
    running = hand.popleft()
    dispatcher.drop(former)
    held = held_under(dispatcher, 2)
    dispatcher.put(held, [read(5)])
    dispatcher.reload_parked(held, [Parking(KeyRef(1, b"k"), due=clock())])
    dispatcher.finish(running, [])
    assert not dispatcher.take(hand, 0.0)
    assert [lane.batch for lane in dispatcher.parking_work(held, LIMITS).lanes] == [[read(5)]]


def test_what_was_to_be_parked_of_a_key_that_an_operator_ended_holds_up_no_later_holding() -> None:
    """The holding went while that was written: the next one would wait for ever for what nobody runs."""
    parking = Parking(KeyRef(1, b"k"), due=clock())
    dispatcher, held = opened(parking)
    hand = dispatcher.new_hand()
    dispatcher.parking_work(held, LIMITS)
    dispatcher.resume(held, parking, [ParkedRecord(1, b"1:1:1:0", b"k", b"body")])
    assert dispatcher.take(hand, 0.0)
    dispatcher.put(held, [read(2)])
    (lane,) = dispatcher.parking_work(held, LIMITS).lanes
    dispatcher.drop(held)
    dispatcher.kept(held, lane, parked=False)
    assert dispatcher.runs_on(PartitionId(1))
    dispatcher.finish(hand.popleft(), [])
    assert not dispatcher.runs_on(PartitionId(1))


def test_what_may_be_parked_already_is_written_before_its_key_goes_on() -> None:
    """The answer to parking it was lost: gone on with first, it would be handled from Postgres and once more from here.

    Found by the model, `docs/model`: turn-alone.
    """
    parking, other = Parking(KeyRef(1, b"k")), Parking(KeyRef(1, b"other"))
    dispatcher, held = opened(parking, other)
    dispatcher.put(held, [read(1)])
    lost = dispatcher.parking_work(held, (2, 100_000, 8))
    assert [list(lane.batch) for lane in lost.lanes] == [[read(1)]]
    more = [Record(seq, b"1:1:%d:0" % seq, b"other", b"body") for seq in (2, 3, 4)]
    dispatcher.put(held, [*more, read(5)])
    dispatcher.not_kept(held, lost)
    assert held.unsure
    held.parked.schedule(parking, clock())
    work = dispatcher.parking_work(held, (2, 100_000, 8))
    assert work.due == [parking]
    assert [list(lane.batch) for lane in work.lanes] == [[read(1)], more[:1]]
