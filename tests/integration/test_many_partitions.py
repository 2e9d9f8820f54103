"""A member with more partitions than its room has shares for: reads by turns, and settles all in one write."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mqlayer import App, Context
from mqlayer.consuming.ordered.member import OrderedMember
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.record_intake import RecordIntake
from tests.fixtures.consumers import Recorder, StartStage, member_of
from tests.fixtures.wait import wait_until

PARTITIONS = 48
ROOM = 480
KEYS = 240
EACH = 20
PATIENT_S = 30.0
"""A lease that does not run out on a busy machine: records would be read again."""


def test_each_partition_is_read_in_turns_within_the_room(
    start_stage: StartStage, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share is 10 records: read by its share, each partition's 100 would take 10 reads, checks and settlements."""
    stage = start_stage(redis_url, partitions=PARTITIONS)
    stage.send_numbers(keys=KEYS, each=EACH)
    app: App | None = None
    most, reads, put = 0, list[int](), RecordIntake.put

    def watch(body: bytes, ctx: Context) -> None:
        nonlocal most
        del body, ctx
        members = [member for member in app.members if isinstance(member, OrderedMember)] if app else []
        most = max([most, *(sum(owned.room.count for owned in member.ownership.all()) for member in members)])

    def noted(intake: RecordIntake, owned: OwnedPartition, entries: list[Any]) -> None:
        reads.append(len(entries))
        put(intake, owned, entries)

    monkeypatch.setattr(RecordIntake, "put", noted)
    recorder = Recorder(watch)
    app = stage.consume(recorder, prefetch_count=ROOM, settings=stage.settings(lease_s=PATIENT_S))
    stage.wait_settled()
    assert recorder.count() == KEYS * EACH == sum(reads)
    recorder.assert_in_order()
    assert len(reads) <= 4 * PARTITIONS
    assert 0 < most <= ROOM


def test_slow_handlers_of_some_partitions_hold_no_others_up(start_stage: StartStage, redis_url: str) -> None:
    """Their messages hold all of the common room."""
    stage = start_stage(redis_url, partitions=PARTITIONS)
    slow = [stage.key_in(partition) for partition in stage.partitions[: PARTITIONS // 2]]
    quick = [stage.key_in(partition) for partition in stage.partitions[PARTITIONS // 2 :]]
    stage.send((key, b"%d" % number) for number in range(1, 2 * EACH) for key in slow)
    stage.send((key, b"%d" % number) for number in range(1, EACH) for key in quick)
    gate = threading.Event()

    def wait(body: bytes, ctx: Context) -> None:
        del body
        if ctx.key in slow:
            gate.wait(60)

    recorder = Recorder(wait)
    settings = stage.settings(lease_s=PATIENT_S)
    stage.consume(recorder, prefetch_count=ROOM, concurrency=len(slow) + 4, settings=settings)
    try:
        wait_until(lambda: recorder.count() == len(quick) * (EACH - 1), timeout_s=30, what="the others' messages")
    finally:
        gate.set()
    stage.wait_settled()
    recorder.assert_in_order()


def test_a_partition_that_refuses_settlements_keeps_no_others_from_theirs(
    start_stage: StartStage, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its ack bitmap is damaged by hand, which settlements behind a head need; it is settled once that is repaired.
    The head's key is one of the 40."""
    stage, gate = start_stage(redis_url, partitions=4), threading.Event()
    damaged, *others = stage.partitions
    head = stage.key_in(damaged)

    def act(body: bytes, ctx: Context) -> None:
        if ctx.key == head and body == b"0":
            gate.wait(90)

    recorder = Recorder(act)
    member = member_of(stage.consume(recorder, settings=stage.settings(lease_s=PATIENT_S)))
    wait_until(
        lambda: [owned.state for owned in member.ownership.all()] == [OwnershipState.OPEN] * 4,
        timeout_s=20,
        what="all partitions open",
    )
    acks = stage.group_keys(damaged).acks.decode()
    stage.send([(head, b"0")])
    stage.send_numbers(keys=40, each=3)

    def others_settled() -> bool:
        positions = map(stage.position, others)
        return all(position.committed == position.next for position in positions)

    wait_until(lambda: others_settled() and recorder.count() == 39 * 3, timeout_s=20, what="all but the head")
    wait_until(lambda: stage.redis.exists(acks), what="settlements behind the head")
    stage.redis.rename(acks, f"{acks}-kept")
    stage.redis.rpush(acks, "x")
    stage.send_numbers(keys=40, each=3, first=4)
    wait_until(lambda: others_settled() and recorder.count() == 39 * 6, timeout_s=20, what="the others' settlements")
    wait_until(lambda: "settling" in caplog.text, what="the refusal")
    stage.redis.rename(f"{acks}-kept", acks)
    gate.set()
    stage.wait_settled()
    recorder.assert_in_order()
    assert len(recorder.ended) == recorder.count() == 241
