"""Key classes of ordered pop: receivers get a flooding tenant's messages and others' in turn."""

from __future__ import annotations

import time

import pytest

from mqlayer import PopMessage, Receiver
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.groups.admin import set_group
from mqlayer.redis.keys import PopKeys, pop_keys
from tests.fixtures.consumers import Stage, StartStage
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.receivers import OpenReceiver
from tests.fixtures.wait import awake_s, wait_until

FLOOD = 1_500
BY_PREFIX = "prefix:/"


@pytest.fixture
def one(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of one partition."""
    return start_stage(redis_url, partitions=1)


@pytest.fixture
def classed_receiver(receiver_of: OpenReceiver) -> OpenReceiver:
    """Open receivers of a group with these rules."""

    def opened(stage: Stage, **rules: object) -> Receiver:
        receiver = receiver_of(stage)
        if rules:
            change(stage, **rules)
            receiver.close()
            receiver.open()
        return receiver

    return opened


def change(stage: Stage, **rules: object) -> None:
    """Change the group's rules as an operator."""
    set_group(stage.runtime, stage.topic, "g", **rules)  # type: ignore[arg-type]


def flood(stage: Stage, count: int, tenant: str = "big") -> None:
    """Append messages of a tenant."""
    stage.send((f"{tenant}/{number}", b"%d" % number) for number in range(count))


def kept_of(stage: Stage) -> PopKeys:
    """Return the group's keys at the partition."""
    return pop_keys(stage.prefix, stage.partitions[0], stage.group_id())


def tenants(messages: list[PopMessage]) -> list[str]:
    return [(message.key or "").partition("/")[0] for message in messages]


def test_a_flood_lets_another_tenants_messages_pass(one: Stage, classed_receiver: OpenReceiver) -> None:
    """Ten messages behind 1,500: they come in turn with the flood's, and all come once."""
    flood(one, FLOOD)
    flood(one, 10, tenant="small")
    receiver = classed_receiver(one, key_class=BY_PREFIX)
    came: list[PopMessage] = []

    def is_through() -> bool:
        batch = receiver.receive(50, wait_s=1.0)
        receiver.ack(batch)
        came.extend(batch)
        return len(came) >= FLOOD + 10

    wait_until(is_through, timeout_s=30, what="all to come")
    assert max(place for place, tenant in enumerate(tenants(came)) if tenant == "small") < 200, "after two calls' looks"
    assert len({message.key for message in came}) == len(came) == FLOOD + 10
    assert receiver.receive(wait_s=0) == []


def test_a_class_has_so_many_keys_out_and_the_end_of_one_wakes_who_waits(
    one: Stage, classed_receiver: OpenReceiver
) -> None:
    first = classed_receiver(one, key_class=BY_PREFIX, class_concurrency=2)
    second = classed_receiver(one)
    flood(one, 5)
    flood(one, 1, tenant="small")
    batch = first.receive(10, wait_s=5.0)
    assert sorted(tenants(batch)) == ["big", "big", "small"]
    assert second.receive(10, wait_s=0) == []
    big = [message for message in batch if tenants([message]) == ["big"]]
    first.ack(big[:1])
    assert tenants(second.receive(10, wait_s=0.9)) == ["big"]
    assert second.receive(10, wait_s=0) == []
    first.nack(big[1], delay_s=60)
    assert tenants(second.receive(10, wait_s=0.9)) == ["big"], "a key that is given back is not out"


def test_a_class_keeps_to_its_rate_and_others_pass(one: Stage, classed_receiver: OpenReceiver) -> None:
    """A new bucket begins with one message; the rest come at the rate."""
    receiver = classed_receiver(one, key_class=BY_PREFIX, class_rate=20.0)
    flood(one, 60)
    began, awake, came = time.monotonic(), awake_s(), 0

    def take() -> bool:
        nonlocal came
        batch = receiver.receive(10, wait_s=1.0)
        receiver.ack(batch)
        came += len(batch)
        return came >= 20

    wait_until(take, timeout_s=10, what="a second's worth")
    assert time.monotonic() - began > 0.6
    assert awake_s() - awake < 3
    flood(one, 1, tenant="small")
    wait_until(lambda: "small" in tenants(receiver.receive(10, wait_s=0.1)), what="the other tenant's message")


def test_another_rule_and_none_take_what_waits(one: Stage, classed_receiver: OpenReceiver) -> None:
    """Queues that wait under a former rule's classes come, once each; so do those of a removed index."""
    receiver = classed_receiver(one, key_class=BY_PREFIX)
    flood(one, 60)
    keys = {message.key for message in receiver.receive(1, visibility_timeout_s=60, wait_s=5.0)}
    for rule in ("header:tenant", "none"):
        change(one, key_class=rule)
        receiver.close()
        receiver.open()
        batch = receiver.receive(20, wait_s=5.0)
        assert len(batch) == 20
        keys |= {message.key for message in batch}
        assert one.redis.exists(kept_of(one).ready)
        receiver.ack(batch)
    batch = receiver.receive(60, wait_s=5.0)
    assert len(keys | {message.key for message in batch}) == 41 + len(batch) == 60
    receiver.receive(wait_s=0)
    assert not one.redis.exists(kept_of(one).ready, kept_of(one).class_out), "nothing waits by class"


def test_a_removed_index_gives_again_what_is_not_settled(one: Stage, classed_receiver: OpenReceiver) -> None:
    receiver = classed_receiver(one, key_class=BY_PREFIX)
    flood(one, 30)
    receiver.ack(receiver.receive(10, visibility_timeout_s=0.2, wait_s=5.0))
    one.redis.delete(kept_of(one).ready)
    came: set[str | None] = set()

    def is_through() -> bool:
        batch = receiver.receive(10, visibility_timeout_s=0.2, wait_s=1.0)
        receiver.ack(batch)
        came.update(message.key for message in batch)
        return len(came) == 20

    wait_until(is_through, what="the others to come")


def test_classes_are_of_keys(one: Stage) -> None:
    """With scope partition all messages are one queue: nothing could take turns."""
    with (
        Receiver(one.topic, group="g", scope="partition", settings=one.settings()),
        pytest.raises(InvalidInput, match="scope partition"),
    ):
        change(one, key_class=BY_PREFIX)


def test_classes_wait_until_no_receiver_of_the_former_release_can_live(one: Stage) -> None:
    """A receiver without classes gives out all that is due, without turns and limits."""
    with Receiver(one.topic, group="g", settings=one.settings()):
        ask_postgres(one.dsn, "UPDATE mqlayer.protocol SET serves_from = 1, in_force = 1")
        with pytest.raises(Conflict, match="upgrade finalize"):
            change(one, key_class=BY_PREFIX)
        change(one, key_class="none", rate_limit=100.0)
        ask_postgres(one.dsn, "UPDATE mqlayer.protocol SET serves_from = 2, in_force = 2")
        change(one, key_class=BY_PREFIX)
