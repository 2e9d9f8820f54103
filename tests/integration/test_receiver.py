"""Receivers of an ordered pop: what they are given, what is withheld, and what is refused."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from typing import Any, Final

import pytest

from mqlayer import PopMessage, Receiver
from mqlayer.errors import Conflict, InvalidInput, NodeNotArmed, StaleToken, StoreUnavailable
from mqlayer.groups import apply_seek, find_group, planned_seek, rebalance_groups
from mqlayer.groups.admin import pause_group, resume_group, set_group
from mqlayer.inspect import explain_key, group_statuses
from mqlayer.redis.keys import group_keys, partition_keys, pop_keys
from mqlayer.routes import apply_change, plan_split
from mqlayer.runtime.route_cache import RouteCache, load_route
from mqlayer.topics.nodes import rearm_node
from tests.fixtures.consumers import Stage, StartStage, migrated
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.receivers import OpenReceiver
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until, within
from tests.proof.route_steps import merge
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("as_consumer")

WAIT_S: Final = 20.0


@pytest.fixture
def one(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of one partition."""
    return start_stage(redis_url, partitions=1)


def bodies(messages: list[PopMessage]) -> list[bytes]:
    return [message.body for message in messages]


def nothing(receiver: Receiver) -> bool:
    return receiver.receive(500, wait_s=0) == []


def send(stage: Stage, key: str, *numbers: int) -> None:
    stage.send((key, b"%d" % number) for number in numbers)


# -- what is withheld ------------------------------------------------------------------------------------------------


def test_a_batch_withholds_its_partition_until_it_is_settled(one: Stage, receiver_of: OpenReceiver) -> None:
    """Case 50, scope partition: nothing more is given out, of no key, until all is acknowledged."""
    a, b = (receiver_of(one, scope="partition") for _ in range(2))
    send(one, "k", 1, 2, 3)
    send(one, "other", 4)
    batch = a.receive(3)
    assert bodies(batch) == [b"1", b"2", b"3"]
    assert nothing(b)
    a.ack(batch[:2])
    assert nothing(b)
    a.ack(batch[2:])
    assert bodies(b.receive(wait_s=WAIT_S)) == [b"4"]


def test_a_batch_withholds_its_keys_only(one: Stage, receiver_of: OpenReceiver) -> None:
    """Cases 50 and 64, scope key: other keys of the partition go on."""
    a, b = receiver_of(one, scope="key"), receiver_of(one)
    send(one, "k", 1, 2, 3)
    send(one, "other", 4)
    batch = a.receive(2)
    assert bodies(batch) == [b"1", b"2"]
    assert bodies(b.receive(wait_s=WAIT_S)) == [b"4"]
    send(one, "third", 5)
    assert bodies(b.receive(wait_s=WAIT_S)) == [b"5"]
    a.ack(batch)
    assert bodies(b.receive(wait_s=WAIT_S)) == [b"3"]


def test_messages_without_a_key_withhold_nothing(one: Stage, receiver_of: OpenReceiver) -> None:
    receiver = receiver_of(one)
    one.send([(None, b"1"), (None, b"2")])
    # Without a key, the LP is as good as random: here, all of them are in the one partition.
    assert len(receiver.receive(1)) == 1
    assert len(receiver.receive(1)) == 1


@pytest.mark.parametrize("scope", some_of(["partition", "key"], 2))
def test_committed_moves_to_the_first_that_is_not_acknowledged(
    one: Stage, receiver_of: OpenReceiver, scope: str
) -> None:
    """Case 51: acks of the later ones leave committed where it is, the first one's carries it past all."""
    receiver = receiver_of(one, scope=scope)
    send(one, "k", 1, 2, 3)
    first, second, third = receiver.receive()
    (partition,) = one.partitions
    for _ in range(2):
        receiver.ack([third, second])
        assert one.position(partition).committed == 1
    for _ in range(2):
        receiver.ack([first])
        assert one.position(partition).committed == 4
    assert one.redis.exists(one.group_keys(partition).acks) == 0


@pytest.mark.parametrize("scope", some_of(["partition", "key"], 2))
def test_what_was_acknowledged_does_not_come_again_with_the_first(
    one: Stage, receiver_of: OpenReceiver, scope: str
) -> None:
    """Case 52: redelivery starts at the first that is not settled, and passes over what is."""
    a, b = receiver_of(one, scope=scope), receiver_of(one)
    send(one, "k", 1, 2, 3, 4)
    batch = a.receive(3, visibility_timeout_s=0.05)
    a.ack([batch[1]])
    again = b.receive(wait_s=WAIT_S)
    assert bodies(again) == [b"1", b"3", b"4"]


@pytest.mark.parametrize("scope", ["partition", "key"])
def test_an_old_token_is_refused_and_settles_nothing(one: Stage, receiver_of: OpenReceiver, scope: str) -> None:
    """Case 53: nothing that is said of a message that was given out again counts; the rest of an ack is done."""
    a, b = receiver_of(one, scope=scope), receiver_of(one)
    (partition,) = one.partitions
    send(one, "k", 1, 2)
    send(one, "other", 3)
    old = a.receive(2, visibility_timeout_s=0.05)
    late = a.receive(visibility_timeout_s=0.05, wait_s=0)
    new = b.receive(wait_s=WAIT_S)
    if len(new) == 2:
        # The other key's is free again a moment later.
        new += b.receive(wait_s=WAIT_S)
    assert bodies(new) == [b"1", b"2", b"3"]
    with pytest.raises(StaleToken, match=f"{partition}/1, {partition}/2"):
        a.ack(old)
    with pytest.raises(StaleToken, match=f"{partition}/1"):
        a.nack(old[0])
    with pytest.raises(StaleToken, match=f"{partition}/2"):
        a.extend(old[1], 0.0)
    assert one.position(partition).committed == 1
    assert nothing(a)
    with pytest.raises(StaleToken) as refused_for:
        b.ack([*old, new[0]])
    assert refused_for.value.offsets == ((partition, 1), (partition, 2))
    assert one.position(partition).committed == 2
    b.ack(new)
    # Settled by the other: no harm.
    a.ack([*old, *late])


def test_an_offset_that_was_never_given_out_is_an_error_and_changes_nothing(
    one: Stage, receiver_of: OpenReceiver
) -> None:
    """Case 54."""
    receiver = receiver_of(one)
    (partition,) = one.partitions
    send(one, "k", 1, 2)
    first = receiver.receive(1)[0]
    unknown = _with(first, offset=3)
    with pytest.raises(InvalidInput, match=f"{partition}/3"):
        receiver.ack([first, unknown])
    assert one.position(partition).committed == 1
    # There, but nobody has it.
    with pytest.raises(StaleToken):
        receiver.ack([_with(first, offset=2)])
    receiver.ack([first])
    receiver.ack([first])
    assert one.position(partition).committed == 2


def _with(message: PopMessage, **changes: int) -> PopMessage:
    facts = {name: getattr(message, name) for name in ("key", "body", "headers", "identity", "attempt", "at_ms")}
    return PopMessage(**facts, token=message.token._replace(**changes))


# -- visibility timeouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", some_of(["partition", "key"], 2))
def test_extending_one_extends_that_one_and_the_batch_waits_for_the_latest(
    one: Stage, receiver_of: OpenReceiver, scope: str
) -> None:
    """Case 56: blocked until the latest end of what is not settled; a shortened one frees it at that time."""
    a, b = receiver_of(one, scope=scope), receiver_of(one)
    send(one, "k", 1, 2)
    second = a.receive(visibility_timeout_s=0.1)[1]
    a.extend(second, 30)
    (partition,) = one.partitions
    pops = pop_keys(one.prefix, partition, one.group_id()).pops
    entries: Any = one.redis.hgetall(pops)
    visible = {int(offset): int(entry.split(b":")[1]) for offset, entry in entries.items()}
    assert visible[2] - visible[1] > 25_000
    assert b.receive(wait_s=0.3) == []
    began = time.monotonic()
    a.extend(second, 0.2)
    again = b.receive(wait_s=WAIT_S)
    assert bodies(again) == [b"1", b"2"]
    assert time.monotonic() - began > 0.05


def test_a_message_given_back_comes_again_after_its_delay_with_all_behind_it(
    one: Stage, receiver_of: OpenReceiver
) -> None:
    """Case 58: each message counts for itself, and keeps its count when batches change."""
    receiver = receiver_of(one)
    send(one, "k", 1, 2)
    first, second = receiver.receive(2)
    assert [first.attempt, second.attempt] == [1, 1]
    send(one, "k", 3)
    began = time.monotonic()
    receiver.nack(first, delay_s=2.0)
    # What was behind it must not go on before it.
    with pytest.raises(StaleToken):
        receiver.ack([second])
    assert nothing(receiver)
    again = receiver.receive(wait_s=WAIT_S)
    assert time.monotonic() - began > 1.9
    assert [(message.body, message.attempt) for message in again] == [(b"1", 2), (b"2", 2), (b"3", 1)]
    receiver.ack(again[:1])
    receiver.nack(again[1])
    last = receiver.receive(wait_s=WAIT_S)
    assert [(message.body, message.attempt) for message in last] == [(b"2", 3), (b"3", 2)]


def test_the_same_attempt_gets_the_same_batch_again_and_counts_nothing(one: Stage, receiver_of: OpenReceiver) -> None:
    """Case 57: also in another process's place; another attempt is blocked."""
    a, b = (receiver_of(one, scope="partition") for _ in range(2))
    send(one, "k", 1, 2, 3)
    batch = a.receive(3, attempt_id="try-1")
    a.ack(batch[:1])
    again = b.receive(3, attempt_id="try-1", wait_s=0)
    assert [(message.body, message.attempt) for message in again] == [(b"2", 1), (b"3", 1)]
    assert b.receive(3, attempt_id="try-2", wait_s=0) == []
    # Either's tokens are the batch's.
    a.ack(batch)
    assert b.receive(3, attempt_id="try-1", wait_s=0) == []


def test_a_lost_reply_is_asked_for_again_by_the_next_call(one: Stage, receiver_of: OpenReceiver) -> None:
    """Case 57, without a word of the caller: a receiver knows which calls were not answered."""
    receiver = receiver_of(one, scope="partition")
    send(one, "k", 1, 2)
    with broken_off_at("pop.after_receive"):
        receiver.receive(wait_s=0)
    again = receiver.receive(wait_s=WAIT_S)
    assert [(message.body, message.attempt) for message in again] == [(b"1", 1), (b"2", 1)]


@pytest.mark.parametrize("count", [0, 501, -1])
def test_more_than_a_batch_can_hold_is_refused(one: Stage, receiver_of: OpenReceiver, count: int) -> None:
    """Case 60: not truncated silently."""
    receiver = receiver_of(one)
    send(one, "k", 1)
    with pytest.raises(InvalidInput, match=r"1 to 500"):
        receiver.receive(count)
    assert len(receiver.receive(500)) == 1


def test_a_whole_batch_of_the_largest_size_is_tracked(one: Stage, receiver_of: OpenReceiver) -> None:
    """Case 60: and with bodies, a batch ends where they are many, at one message at least."""
    receiver = receiver_of(one)
    send(one, "k", *range(1, 502))
    batch = receiver.receive(500)
    assert [int(message.body) for message in batch] == list(range(1, 501))
    receiver.ack(reversed(batch))
    one.send([("large", b"x" * 900_000)] * 7)
    assert bodies(receiver.receive(1)) == [b"501"]
    assert [len(receiver.receive(500)) for _ in range(1)] == [5]


# -- waiting ---------------------------------------------------------------------------------------------------------


class Waiter:
    """A receiver that waits in a thread, and when it got something."""

    def __init__(self, receiver: Receiver, **options: Any) -> None:
        self.receiver, self.options = receiver, {"wait_s": 10.0} | options
        self.found: list[PopMessage] = []
        self.at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        before = receiver.fetch_count
        self._thread.start()
        wait_until(lambda: receiver.fetch_count > before, what="it asked in vain, and waits")

    def _run(self) -> None:
        self.found = self.receiver.receive(**self.options)
        self.at = time.monotonic()

    def used_s(self) -> float:
        """Return how much of a core the waiting thread has used so far, in s."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0))

    def after(self, began: float) -> float:
        """Return how long after a time it had something, in s."""
        self._thread.join(10)
        assert self.found
        return self.at - began


LATE_S: Final = 0.2


@pytest.mark.parametrize("scope", ["partition", "key"])
def test_a_waiting_receiver_wakes_at_once_when_something_can_be_given(
    one: Stage, receiver_of: OpenReceiver, scope: str
) -> None:
    """Case 61: within 200 ms of an append, the last ack, the end of a visibility timeout, and a message given back.

    The quickest of three of each, for the machine may be busy.
    """
    a, b = receiver_of(one, scope=scope), receiver_of(one)
    rounds = [wakes_s(one, a, b, 2 * number) for number in range(3)]
    quickest = {what: min(one[what] for one in rounds) for what in rounds[0]}
    assert max(quickest.values()) < LATE_S, rounds


def wakes_s(one: Stage, a: Receiver, b: Receiver, number: int) -> dict[str, float]:
    """Have one of two receivers wake the other in every way; return how late each time, and leave nothing unsettled."""
    late: dict[str, float] = {}
    waiter = Waiter(a)
    began = time.monotonic()
    send(one, "k", number + 1)
    late["append"] = waiter.after(began)
    send(one, "k", number + 2)
    first, waiter = waiter.found, Waiter(b)
    began = time.monotonic()
    a.ack(first)
    late["last ack"] = waiter.after(began)
    assert bodies(waiter.found) == [b"%d" % (number + 2)]
    began = time.monotonic()
    b.extend(waiter.found[0], 0.3)
    waiter = Waiter(a)
    late["end of its time"] = waiter.after(began) - 0.3
    # Withheld for long, then for less: who waits hears of it.
    a.extend(waiter.found[0], 30)
    held, waiter = waiter.found[0], Waiter(b)
    began = time.monotonic()
    a.extend(held, 0.3)
    late["shortened time"] = waiter.after(began) - 0.3
    assert min(late["end of its time"], late["shortened time"]) > -0.15
    held, waiter = waiter.found[0], Waiter(a)
    began = time.monotonic()
    b.nack(held)
    late["given back"] = waiter.after(began)
    a.ack(waiter.found)
    return late


@pytest.mark.parametrize(("scope", "looks_per_s"), some_of([("partition", 3), ("key", 22)], 2))
def test_appends_behind_a_blocked_head_cost_a_waiting_receiver_next_to_nothing(
    one: Stage, receiver_of: OpenReceiver, scope: str, looks_per_s: int
) -> None:
    """Case 61: by partition, its log is not even watched; by key, where others may come, it is looked at seldom."""
    a, b = receiver_of(one, scope=scope), receiver_of(one)
    send(one, "k", 0)
    held = a.receive(visibility_timeout_s=60)
    waiter = Waiter(b)
    asked, used_s = b.fetch_count, waiter.used_s()
    elapsed_s = one.send_evenly("k", range(1, 1_200), per_s=1_000)
    assert (b.fetch_count - asked) / (elapsed_s + 0.2) <= looks_per_s, elapsed_s
    # Twenty looks a second are some 2 % of a core; one for each append would be a multiple of this bound.
    assert (waiter.used_s() - used_s) / elapsed_s < 0.15
    # Each of the two waits for the other by turns.
    at_work, waits, late_s = a, b, list[float]()
    while len(late_s) < 3:
        began = time.monotonic()
        at_work.ack(held)
        late_s.append(waiter.after(began))
        held, at_work, waits = waiter.found, waits, at_work
        if len(late_s) == 1:
            assert bodies(held)[:2] == [b"1", b"2"]
        if len(late_s) < 3:
            waiter = Waiter(waits)
    assert min(late_s) < LATE_S, late_s


# -- whose group it is -----------------------------------------------------------------------------------------------


def test_a_group_is_consumed_in_one_mode(one: Stage, receiver_of: OpenReceiver) -> None:
    """The mode is said once; an error names both."""
    receiver_of(one, group="popped")
    with pytest.raises(Conflict, match=r"mode pop, not exclusive: consume it with mqlayer\.Receiver"):
        one.consume(lambda body: None, group="popped", backoff_s=None)
    one.consume(lambda body: None, group="owned")
    with pytest.raises(Conflict, match=r"mode exclusive, not pop: consume it with mqlayer\.App"):
        receiver_of(one, group="owned")
    with pytest.raises(Conflict, match="scope = key"):
        receiver_of(one, group="popped", scope="partition")


def test_settings_that_need_an_owner_are_refused_for_ordered_pop(one: Stage, receiver_of: OpenReceiver) -> None:
    receiver = receiver_of(one)
    assert receiver.group.rules.policy == "block"
    with pytest.raises(InvalidInput, match="leave backoff_s out"):
        set_group(runtime_of(one.database, actor="test"), one.topic, "g", backoff_s=(1.0,))
    with pytest.raises(InvalidInput, match="no members to balance"):
        set_group(runtime_of(one.database, actor="test"), one.topic, "g", balance="rate")
    with pytest.raises(InvalidInput, match="scope of ordered pop is partition or key"):
        receiver_of(one, group="other", scope="queue")


def test_nobody_rebalances_a_group_without_members(stage: Stage, receiver_of: OpenReceiver) -> None:
    receiver = receiver_of(stage)
    stage.send_numbers(4, 2)
    receiver.receive()
    before = stage.assignments()
    assert [(owner, target) for _, owner, _, target in before] == [(None, None)] * 2
    rebalance_groups(stage.database)
    pause_group(runtime_of(stage.database, actor="test"), stage.topic, "g")
    resume_group(runtime_of(stage.database, actor="test"), stage.topic, "g")
    assert stage.assignments() == before


def test_a_paused_group_is_given_nothing_and_may_settle(one: Stage, receiver_of: OpenReceiver) -> None:
    receiver = receiver_of(one)
    send(one, "k", 1, 2)
    batch = receiver.receive(1)
    pause_group(runtime_of(one.database, actor="test"), one.topic, "g")
    wait_until(lambda: not receiver._opened().fetcher._cache.views or receiver.receive(wait_s=0), what="it rests")
    receiver.ack(batch)
    assert nothing(receiver)
    waiter = threading.Thread(target=lambda: found.extend(receiver.receive(wait_s=WAIT_S)))
    found: list[PopMessage] = []
    waiter.start()
    resume_group(runtime_of(one.database, actor="test"), one.topic, "g")
    waiter.join()
    assert bodies(found) == [b"2"]


def received(receiver: Receiver, count: int) -> list[PopMessage]:
    """Return so many messages, of one batch or of several."""
    found: list[PopMessage] = []
    while len(found) < count:
        batch = receiver.receive(500, wait_s=WAIT_S)
        assert batch, found
        found += batch
    assert len(found) == count
    return found


def test_a_seek_voids_every_token_and_gives_all_again(stage: Stage, receiver_of: OpenReceiver) -> None:
    """Case 53 and 31: what was given out before is refused; counts begin anew; nothing of the old state is left."""
    a, b = receiver_of(stage), receiver_of(stage)
    stage.send_numbers(6, 2)
    old = received(a, 12)
    a.ack(old[:7])
    routes = RouteCache(stage.database)
    plan = planned_seek(stage.runtime, routes, topic=stage.topic, name="g", to="earliest")
    apply_seek(runtime_of(stage.database, stage.prefix, actor="test"), plan)
    with pytest.raises(StaleToken):
        a.ack(old)
    again = received(b, 12)
    assert sorted(bodies(again)) == sorted(bodies(old))
    assert {message.attempt for message in again} == {1}
    with pytest.raises(StaleToken):
        a.ack(old)
    b.ack(again)
    assert stage.all_settled()


def test_arming_a_node_again_voids_every_token(one: Stage, receiver_of: OpenReceiver) -> None:
    """Case 53: a node that fell back may number batches again; the epoch tells them apart."""
    a = receiver_of(one)
    send(one, "k", 1)
    old = a.receive(visibility_timeout_s=0.1)
    with one.database.connection() as connection:
        connection.execute("UPDATE mqlayer.node SET armed_run_id = 'another'")
    rearm_node(runtime_of(one.database, one.prefix, application=one.database, actor="test"), "node-1")
    with pytest.raises(StaleToken):
        a.ack(old)
    again = a.receive(wait_s=WAIT_S)
    assert [(message.body, message.attempt) for message in again] == [(b"1", 2)]
    assert again[0].token.epoch > old[0].token.epoch
    with pytest.raises(StaleToken):
        a.ack(old)
    a.ack(again)
    assert one.all_settled()


@pytest.mark.usefixtures("as_who_may_arm")
def test_a_receiver_arms_a_node_that_restarted_with_all_that_is_out(
    start_stage: StartStage, start_redis: Any, receiver_of: OpenReceiver
) -> None:
    """Case 42: what was given out stays withheld over a restart, its tokens are void, and it comes again."""
    server = start_redis()
    stage = start_stage(server.url, partitions=1)
    receiver = receiver_of(stage, scope="partition")
    send(stage, "k", 1, 2)
    old = receiver.receive(1, visibility_timeout_s=1.0)
    server.kill()
    server.start()
    again = receiver.receive(wait_s=30)
    assert [(message.body, message.attempt) for message in again] == [(b"1", 2), (b"2", 1)]
    with pytest.raises((StaleToken, NodeNotArmed)):
        receiver.ack(old)
    receiver.ack(again)


def test_receivers_go_on_while_postgres_is_away(
    start_stage: StartStage, redis_url: str, start_postgres: Any, receiver_of: OpenReceiver
) -> None:
    """Case 43: what is known serves on, and nothing waits for the database."""
    server = start_postgres()
    stage = start_stage(redis_url, partitions=1, dsn=migrated(server))
    receiver = receiver_of(stage)
    send(stage, "k", 1)
    receiver.ack(receiver.receive())
    server.kill()
    numbers = itertools.count(2)

    def receive_one() -> float:
        number, began = next(numbers), time.monotonic()
        send(stage, "k", number)
        batch = receiver.receive(wait_s=WAIT_S)
        assert bodies(batch) == [b"%d" % number]
        receiver.ack(batch)
        assert receiver.receive(wait_s=0.3) == []
        return time.monotonic() - began

    for _ in range(2):
        within(receive_one, 1.0, what="a message is received and settled")


@pytest.mark.usefixtures("as_who_may_arm")
def test_a_node_that_is_away_is_said_so_when_no_other_can_be_asked(
    start_stage: StartStage, start_redis: Any, receiver_of: OpenReceiver
) -> None:
    server = start_redis()
    stage = start_stage(server.url, partitions=3)
    receiver = receiver_of(stage)
    assert nothing(receiver)
    server.kill()
    with pytest.raises(StoreUnavailable):
        receiver.receive(wait_s=0.3)
    server.start()
    stage.send_numbers(6, 1)

    def goes_on() -> bool:
        # Until it tries the node again.
        with suppress(StoreUnavailable, NodeNotArmed):
            return receiver.receive(wait_s=1) != []
        return False

    wait_until(goes_on, timeout_s=30, what="it goes on")


def test_an_epoch_that_a_node_refuses_is_renewed(one: Stage, receiver_of: OpenReceiver) -> None:
    """A database that lost commits gives out epochs that the node has seen already."""
    receiver = receiver_of(one)
    send(one, "k", 1)
    (partition,) = one.partitions
    with one.database.connection() as connection:
        connection.execute("SELECT setval('mqlayer.epoch', 500)")
    one.redis.hset(group_keys(one.prefix, partition, one.group_id()).lock, mapping={"owner": "pop", "epoch": 400})
    assert bodies(receiver.receive(wait_s=WAIT_S)) == [b"1"]


# -- over route changes ----------------------------------------------------------------------------------------------


def test_successors_are_given_out_when_their_parent_is_drained(one: Stage, receiver_of: OpenReceiver) -> None:
    """Cases 20 and 61: not before its last message is settled; whoever waits hears of it at once."""
    a, b = receiver_of(one), receiver_of(one)
    send(one, "k", 1, 2)
    batch = a.receive()
    split(one)
    one.route = load_route(one.database, one.topic)
    send(one, "k", 3)
    a.ack(batch[:1])
    assert b.receive(wait_s=0.3) == []
    waiter = Waiter(b)
    began = time.monotonic()
    a.ack(batch[1:])
    assert waiter.after(began) >= 0
    assert bodies(waiter.found) == [b"3"]
    b.ack(waiter.found)
    assert find_group(one.database, one.topic, "g").version == 2
    # What was settled in the parent is settled for ever.
    a.ack(batch)
    one.wait_retired(*one.partitions)
    parent = partition_keys(one.prefix, one.partitions[0])
    left = [parent.log, parent.marks, *group_keys(one.prefix, one.partitions[0], one.group_id())]
    assert one.redis.exists(*left, *pop_keys(one.prefix, one.partitions[0], one.group_id())) == 0
    with pytest.raises(StaleToken):
        a.ack(batch)


@pytest.mark.parametrize("in_hand", some_of([True, False], 2))
def test_a_waiting_receiver_has_a_successors_messages_at_once(
    one: Stage, receiver_of: OpenReceiver, in_hand: bool
) -> None:
    """Case 61, of seal and advance: within 200 ms of the last ack in the parent, or of the append behind its seal where
    nothing was left in it. The quickest of three, for the machine may be busy."""
    a, b = receiver_of(one), receiver_of(one)
    late_s = []
    for number in range(3):
        if in_hand:
            send(one, "k", 2 * number)
        batch = a.receive(wait_s=WAIT_S if in_hand else 0)
        waiter = Waiter(b)
        split_or_merge(one)
        send(one, "k", 2 * number + 1)
        began = time.monotonic()
        a.ack(batch)
        late_s.append(waiter.after(began))
        assert bodies(waiter.found) == [b"%d" % (2 * number + 1)]
        b.ack(waiter.found)
    assert min(late_s) < LATE_S, late_s


def split(stage: Stage) -> None:
    """Split the one partition of a stage."""
    route = load_route(stage.database, stage.topic)
    plan = plan_split(route, route.ranges[0].partition, [512])
    apply_change(runtime_of(stage.database, stage.prefix, application=stage.database, actor="test"), plan)


def split_or_merge(stage: Stage) -> None:
    """Make two partitions of one, or one of two."""
    parents = [line.partition for line in stage.route.ranges]
    if len(parents) == 1:
        split(stage)
    else:
        merge(runtime_of(stage.database, stage.prefix, actor="test"), stage.topic, parents)
    stage.route = load_route(stage.database, stage.topic)


# -- what people see -------------------------------------------------------------------------------------------------


def test_where_a_group_stands_is_told_as_of_any_other(one: Stage, receiver_of: OpenReceiver) -> None:
    receiver = receiver_of(one, scope="partition")
    send(one, "k", 1, 2, 3)
    first, *rest = receiver.receive()
    (status,) = group_statuses(runtime_of(one.database, one.prefix), one.topic, "g")
    assert (status.facts.mode, status.facts.scope, status.facts.alive, status.lag) == ("pop", "partition", 0, 3)
    (partition,) = status.partitions
    assert partition.stall is None
    receiver.ack([first])
    (status,) = group_statuses(runtime_of(one.database, one.prefix), one.topic, "g")
    assert status.lag == 2
    second = rest[0]
    receiver.nack(second)
    receiver.receive(wait_s=WAIT_S)
    (status,) = group_statuses(runtime_of(one.database, one.prefix), one.topic, "g")
    (partition,) = status.partitions
    assert partition.stall is not None
    assert (partition.stall.reason, partition.head and partition.head.attempts) == ("failing", 1)
    told = explain_key(runtime_of(one.database, one.prefix), one.topic, "k", "g")
    assert "receivers" in told.run_next
