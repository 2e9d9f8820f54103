"""Which shard a command of a cluster goes to, and which runs of a cluster are the armed ones."""

from __future__ import annotations

from typing import Any

import pytest

from mqlayer.domain.node_runs import (
    ShardRun,
    cluster_run,
    is_armed_shard,
    is_former,
    is_member,
    is_same_run,
    is_unchanged,
    members_of,
    short_run,
)
from mqlayer.errors import ConfigurationRefused, InvalidInput, StoreUnavailable
from mqlayer.redis.addresses import display_url, is_cluster_url, parse_address, shard_url
from mqlayer.redis.cluster_connection import _merged_streams, _tag, summed_info
from mqlayer.redis.slots import SLOT_COUNT, SlotMap, slot_of

A, B, C = (ShardRun(letter * 40, letter.upper() * 40, "s" * 64) for letter in "abc")
PROMOTED = ShardRun(f"{'d' * 40}/cccccccccccc", "D" * 40, "s" * 64)
MOVED = A._replace(slots_digest="t" * 64)


def test_slots_are_those_of_the_server() -> None:
    assert slot_of(b"123456789") == 12_739
    assert slot_of(b"1") == 9_842


def test_slots_that_moved_between_armed_shards_need_no_arming() -> None:
    armed = cluster_run([A, B, C])
    assert is_same_run(cluster_run([C, B, MOVED]), armed)
    assert is_unchanged(B, armed)
    assert not is_unchanged(MOVED, armed)


@pytest.mark.parametrize("found", [[A, B, PROMOTED], [A, B], [A, B, C, PROMOTED]], ids=["promoted", "gone", "added"])
def test_other_shards_are_another_run(found: list[ShardRun]) -> None:
    assert not is_same_run(cluster_run(found), cluster_run([A, B, C]))
    assert not is_same_run(cluster_run(found), None)


def test_a_replaced_shard_is_a_former_run() -> None:
    armed, former = cluster_run([A, B, PROMOTED]), [cluster_run([C])]
    assert is_former(cluster_run([A, B, C]), armed=armed, former=former)
    assert not is_former(cluster_run([A, B, PROMOTED]), armed=armed, former=former)
    promoted_again = ShardRun(f"{'c' * 40}/dddddddddddd", "C" * 40, "s" * 64)
    assert not is_former(cluster_run([A, B, promoted_again]), armed=armed, former=former)
    assert short_run(armed) == "aaaaaaaa,bbbbbbbb,dddddddd"


def test_a_shard_is_armed_whatever_its_slots() -> None:
    armed = cluster_run([A, B])
    assert is_armed_shard(A._replace(slots_digest="0" * 64), armed)
    assert not is_armed_shard(C, armed)
    assert not is_armed_shard(A, None)


def test_a_server_is_known_by_the_start_of_its_name() -> None:
    names = members_of(cluster_run([A, B]))
    assert [is_member(one, names) for one in (A.member, B.member, C.member, "")] == [True, True, False, False]
    assert members_of(None) == members_of("a" * 40) == frozenset()


def test_a_cluster_s_address_names_servers() -> None:
    url = "clusters://h1,h2:7000,[::1]:7001?ssl_check_hostname=True"
    assert is_cluster_url(url)
    assert parse_address(url).seeds == (("h1", 6379), ("h2", 7000), ("::1", 7001))
    assert shard_url(url, ("::1", 7001)) == "rediss://[::1]:7001/0?ssl_check_hostname=True"
    assert display_url("redis+cluster://u:p@h1:7000/0") == "redis+cluster://h1:7000/0"
    with pytest.raises(InvalidInput, match="cluster://host"):
        parse_address("cluster://h1:7000/1")


def test_a_name_that_the_cluster_does_not_know_is_told_with_the_setting() -> None:
    reply = [[0, SLOT_COUNT - 1, [b"?", 7_000, b"m" * 40, [b"ip", b"10.0.0.1"]]]]
    with pytest.raises(StoreUnavailable, match=r"h:1 gives out host names.* port 7000: set cluster-announce-hostname"):
        SlotMap.of(reply, ("h", 1), "cluster://h")
    reply[0][2][0] = b"r1.example.com"  # type: ignore[index]
    assert SlotMap.of(reply, ("h", 1), "cluster://h").shards[0].host == "r1.example.com"


def test_a_gap_and_too_many_shards_are_refused() -> None:
    half = [[0, 8_000, [b"", 7_000, b"m" * 40]]]
    with pytest.raises(StoreUnavailable, match="no shard serves slot 8001"):
        SlotMap.of(half, ("h", 1), "cluster://h")
    whole = SlotMap.of([*half, [8_001, SLOT_COUNT - 1, [b"other", 7_001, b"n" * 40]]], ("h", 1), "cluster://h")
    assert [shard.host for shard in whole.shards] == ["h", "other"]
    assert whole.owners[8_000] != whole.owners[8_001]
    assert whole.members == {"m" * 40, "n" * 40}
    many = [[at * 500, at * 500 + 499, [b"h", 7_000 + at, b"%040d" % at]] for at in range(33)]
    with pytest.raises(ConfigurationRefused, match="at most 20"):
        SlotMap.of(many, ("h", 1), "cluster://h")


COMMANDS: list[tuple[tuple[Any, ...], bytes | None]] = [
    ((b"EVALSHA", b"0" * 40, 2, b"mq:{7}:meta", b"mq:{7}:marks", b"{8}"), b"7"),
    ((b"EVAL", "local t = {}", 1, b"mq:{9}:log"), b"9"),
    (("MEMORY", "USAGE", b"mq:{3}:log"), b"3"),
    (("XPENDING", b"mq:{12}:log", b"g", b"-"), b"12"),
    ((b"SCAN", b"0", b"MATCH", b"mq:{*}:meta"), None),
    (("TIME",), None),
]


@pytest.mark.parametrize(("command", "tag"), COMMANDS, ids=[str(command[0]) for command, _ in COMMANDS])
def test_a_command_goes_by_its_first_key(command: tuple[Any, ...], tag: bytes | None) -> None:
    assert _tag(command) == tag


def test_streams_of_several_slots_are_one_answer() -> None:
    missing, moved = Exception("NOGROUP no"), Exception("MOVED 1 h:1")
    assert _merged_streams([None, [["a", 1]], [["b", 2]]]) == [["a", 1], ["b", 2]]
    assert _merged_streams([None, None]) is None
    assert _merged_streams([missing, [["a", 1]]]) == [["a", 1]], "given messages must not be dropped"
    assert _merged_streams([missing, None]) is missing
    assert _merged_streams([[["a", 1]], moved]) is moved


def test_numbers_of_shards_are_summed() -> None:
    facts = summed_info(
        [{"used_memory": "5", "run_id": "a", "used_cpu_sys": "1.5"}, {"used_memory": "7", "run_id": "b"}]
    )
    assert facts == {"used_memory": "12", "run_id": "a", "used_cpu_sys": "1.500000"}
