"""Members whose partitions have nothing new: what they cost a node, and that their locks still count."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mqlayer import any_of
from mqlayer.consuming.ordered import ready_queues
from mqlayer.consuming.ordered.owned_partitions import OwnershipState
from mqlayer.logs import event_of
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.partition_scripts import LockHolder, LockTaken, acquire_command, acquire_reply
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until

PARTITIONS = 24
READS = 12
LONG_BACKLOG = 21_000
"""Of three partitions at most, which read a small part of it at a time."""
FILTERS: Mapping[str, Mapping[str, Any]] = {"all": {}, "tagged": {"tag_filter": any_of("eu")}}


def consuming(stage: Stage, recorder: Recorder, options: Mapping[str, Any]) -> None:
    """Start a member, and wait until all partitions are open."""
    # One whose lease ran out would take all locks, and read all, once more.
    app = stage.consume(recorder, settings=stage.settings(lease_s=20.0), **options)
    member = member_of(app)

    def are_open() -> bool:
        states = [owned.state for owned in member.ownership.all()]
        return len(states) == len(stage.partitions) and set(states) == {OwnershipState.OPEN}

    wait_until(are_open, timeout_s=20, what="all partitions open")


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_an_idle_member_s_commands_do_not_grow_with_its_partitions(
    start_redis: StartRedis, start_stage: StartStage, options: Mapping[str, Any]
) -> None:
    stage = start_stage(start_redis().url, partitions=PARTITIONS)
    consuming(stage, Recorder(), options)
    stage.redis.config_resetstat()

    def calls(name: str) -> int:
        stats: dict[str, Any] = stage.redis.info("commandstats")
        return int(stats.get(f"cmdstat_{name}", {}).get("calls", 0))

    wait_until(lambda: calls("xread") >= READS, timeout_s=20, what="the member reads")
    scripts = calls("evalsha")
    assert 0 < scripts <= 2 * calls("xread") + 4


def test_records_of_idle_partitions_count_only_under_their_locks(
    start_stage: StartStage, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another owner takes the locks of partitions that nobody has looked at for a while, then records come."""
    stage, recorder = start_stage(redis_url, partitions=8), Recorder()
    consuming(stage, recorder, {})
    group_id, later = stage.group_id(), 10**9
    with caplog.at_level(logging.WARNING):
        with stage.connection() as line:
            holders = [LockHolder(stage.prefix, one, group_id, "other", later) for one in stage.partitions]
            answers = line.call([acquire_command(line, holder, start=1) for holder in holders])
            assert all(isinstance(acquire_reply(answer, "here"), LockTaken) for answer in answers)
        stage.send_numbers(keys=40, each=2)
        lost = set[int]()

        def all_noticed() -> bool:
            lost.update(vars(one)["partition"] for one in caplog.records if event_of(one) == "partition_lost")
            return lost == set(stage.partitions)

        wait_until(all_noticed, timeout_s=20, what="the member notices each lock")
    assert recorder.begun == []


def test_an_idle_partition_s_records_come_at_once(start_stage: StartStage, redis_url: str) -> None:
    stage, recorder = start_stage(redis_url, partitions=8), Recorder()
    consuming(stage, recorder, {})
    for number in range(1, 4):
        stage.send_numbers(keys=40, each=1, first=number)
        wait_until(lambda number=number: recorder.count() == 40 * number, what="all handled")  # type: ignore[misc]
    recorder.assert_in_order()
    stage.wait_settled()


def test_idle_partitions_do_not_hold_the_reader_of_a_full_one(
    start_stage: StartStage, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that waits for records of the others goes on after the full one has room again: 10 to 100 ms each."""
    stage, recorder = start_stage(redis_url, partitions=16), Recorder()
    stage.send_numbers(keys=3, each=LONG_BACKLOG // 3)
    waits: list[int] = []

    def counted(line: NodeConnection, commands: Sequence[Command]) -> list[Any]:
        answers = call(line, commands)
        for command, answer in zip(commands, answers, strict=True):
            if command[0] == "XREAD" and "BLOCK" in command and not answer:
                waits.append(len(recorder.ended))
        return answers

    call = NodeConnection.call
    monkeypatch.setattr(NodeConnection, "call", counted)
    # Also on a loaded machine.
    monkeypatch.setattr(ready_queues, "QUICK_S", 10.0)
    consuming(stage, recorder, {})
    wait_until(lambda: len(recorder.ended) >= LONG_BACKLOG, timeout_s=60, what="all handled")
    held = [handled for handled in waits if LONG_BACKLOG // 10 < handled < LONG_BACKLOG // 2]
    assert len(held) <= 3
    recorder.assert_in_order()
