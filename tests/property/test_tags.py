"""What a filter takes by hashes on the node and by names in the member is what a plain model takes: case 62."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mqlayer.domain.message import Record, encode_facts, pop_command, records_of
from mqlayer.domain.offsets import as_ranges, covers, joined
from mqlayer.domain.routing import NodeId
from mqlayer.domain.tags import (
    FILTER_LIMIT,
    TAG_FORM,
    TAG_LIMIT,
    TagFilter,
    all_of,
    any_of,
    check_tags,
    tag_hash,
    tags_of,
    tags_text,
)
from mqlayer.errors import InvalidInput
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.partition_scripts import create, seal_command
from mqlayer.redis.read_scripts import SELECT_LIMIT, select_command, select_reply
from mqlayer.stack import RedisServer

ALIKE = ("t26821", "t49091")
"""Two tags with one hash."""
TAGS = ("eu", "us", "vip", "a.b-c_d", *ALIKE)

any_tags = st.lists(st.from_regex(TAG_FORM, fullmatch=True), max_size=TAG_LIMIT, unique=True)
few_tags = st.lists(st.sampled_from(TAGS), max_size=len(TAGS), unique=True)
filters = st.tuples(st.sampled_from(["any", "all"]), few_tags.filter(bool)).map(
    lambda both: TagFilter.of(f"{both[0]}:{','.join(both[1])}")
)
numbers = itertools.count(1)


def is_wanted(wanted: TagFilter, tags: tuple[str, ...]) -> bool:
    """Say what the words any and all say."""
    quantifier = any if wanted.match == "any" else all
    return quantifier(tag in tags for tag in wanted.tags)


@given(tags=any_tags, headers=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4))
def test_a_records_tags_and_headers_are_what_was_sent(tags: list[str], headers: dict[str, str]) -> None:
    headers = {name: value for name, value in headers.items() if not name.startswith("mq-")}
    record = Record(7, b"1:2:3:" + encode_facts(99, headers, tags_text(tags) if tags else ""), b"k", b"b")
    assert record.tags == tuple(sorted(tags))
    assert record.headers == headers
    assert record.at_ms == 99
    assert record.identity == (1, 2, 3)


def test_two_tags_have_one_hash() -> None:
    """What the tests of collisions stand on."""
    assert tag_hash(ALIKE[0]) == tag_hash(ALIKE[1])


def test_a_message_without_tags_has_no_byte_more() -> None:
    assert encode_facts(99, None) == b"99"
    assert encode_facts(99, {"a": "b"}) == b'99:{"a":"b"}'


@given(wanted=filters, tags=few_tags)
def test_a_filter_takes_what_its_words_say(wanted: TagFilter, tags: list[str]) -> None:
    assert wanted.takes(tuple(tags)) == is_wanted(wanted, tuple(tags))
    assert TagFilter.of(str(wanted)) == wanted


def test_filters_have_one_text() -> None:
    assert any_of("vip", "eu", "vip") == "any:eu,vip"
    assert all_of("vip", "eu") == "all:eu,vip"
    assert TagFilter.of("none") is None
    assert tags_of(tags_text(["vip", "eu"])) == ("eu", "vip")
    assert len(check_tags(f"t{number}" for number in range(TAG_LIMIT))) == TAG_LIMIT


@pytest.mark.parametrize(
    "text", ["", "eu", "any:", "any", "every:eu", "all:eu,", "any:Eu", "any:eu vip", "any:eu\n", "none:eu",
             "any:" + "a" * 64, "all:" + ",".join(f"t{n}" for n in range(TAG_LIMIT + 1)),
             "any:" + ",".join(f"t{n}" for n in range(FILTER_LIMIT + 1))],
)  # fmt: skip
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        TagFilter.of(text)


@pytest.mark.parametrize(
    "tags", ["eu", ["Eu"], [""], ["-a"], ["a,b"], ["a" * 64], ["é"], [1], [["eu"]], 7, [f"t{n}" for n in range(9)]]
)
def test_what_is_no_tag_is_refused(tags: list[str]) -> None:
    with pytest.raises(InvalidInput):
        tags_text(tags)


def test_a_filter_of_nothing_is_refused() -> None:
    for make in (any_of, all_of):
        with pytest.raises(InvalidInput, match="needs a tag"):
            make()


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)).map(lambda two: (two[0], sum(two))), max_size=12))
def test_joined_ranges_cover_what_they_covered(ranges: list[tuple[int, int]]) -> None:
    offsets = {offset for first, last in ranges for offset in range(first, last + 1)}
    assert joined(ranges) == as_ranges(offsets)
    assert {offset for offset in range(80) if covers(joined(ranges), offset)} == offsets


# -- the script ------------------------------------------------------------------------------------------------------


@pytest.fixture
def connection(every_redis: RedisServer) -> Iterator[NodeConnection]:
    """A connection to each version of Redis."""
    with NodeConnection(Node(NodeId(1), "n", every_redis.url, ""), any_run=True, unsafe=True) as connection:
        yield connection


def facts_of(number: int, tags: list[str], style: int) -> bytes:
    """Return what stands in m for a message: as Python writes it, as jsonb is written, among other headers, or not."""
    text = tags_text(tags) if tags else ""
    others = {"x": 'mq-tags": "ffff:', 'a"mq-tags': "00000000:eu", "y\\": tag_hash("eu")}
    if style == 0:
        return encode_facts(number, None, text)
    if style == 1:
        return encode_facts(number, others, text)
    headers = others | ({"mq-tags": text} if text else {})
    return b"%d:%b" % (number, json.dumps(headers, separators=(", ", ": ") if style == 2 else (",", ":")).encode())


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    messages=st.lists(st.tuples(few_tags, st.integers(0, 3), st.sampled_from([0, 1, 300])), max_size=60),
    wanted=filters,
    looks=st.sampled_from([1, 2, 17, SELECT_LIMIT]),
    room=st.sampled_from([1, 3, 500]),
    size=st.sampled_from([1, 500, 1_000_000]),
    hole=st.integers(0, 80),
    sealed=st.booleans(),
)
@example(
    messages=[([ALIKE[1]], 0, 1)], wanted=TagFilter("any", (ALIKE[0],)), looks=9, room=9, size=9, hole=0, sealed=True
)
def test_a_partition_read_through_a_filter_is_what_a_model_leaves_of_it(
    connection: NodeConnection,
    key_prefix: str,
    messages: list[tuple[list[str], int, int]],
    wanted: TagFilter,
    looks: int,
    room: int,
    size: int,
    hole: int,
    sealed: bool,
) -> None:
    """Case 62: mismatch, collision of hashes, hole and command record: every offset is accounted for, once."""
    partition = next(numbers)
    keys = partition_keys(key_prefix, partition)
    create(connection, key_prefix, partition, "t", 0, 1024, "open", "")
    log = {
        offset: (b"1:0:%d:" % offset + facts_of(offset, tags, style), tuple(sorted(tags)), b"b" * length)
        for offset, (tags, style, length) in enumerate(messages, 1)
    }
    for offset, (m, _, body) in log.items():
        connection.call([("XADD", keys.log, f"{offset}-0", "m", m, "k", b"k", "b", body)])
    # Removed, not left out: where no record ever was, the node has lost its log, and refuses the seal.
    if log.pop(hole, None):
        connection.call([("XDEL", keys.log, f"{hole}-0")])
    connection.call([("HSET", keys.meta, "next", len(messages) + 1)])
    if sealed:
        connection.call([seal_command(connection, key_prefix, partition, 5, "seal")])
    found: dict[int, Record] = {}
    unmatched: list[tuple[int, int]] = []
    after, calls, command = 0, 0, None
    while True:
        ask = select_command(
            connection, key_prefix, partition, wanted, after=after, max_scanned=looks, limit=room, size=size
        )
        selected = select_reply(connection.call([ask])[0], "")
        command = pop_command(selected.entries)
        records = records_of(selected.entries)
        assert len(records) <= room
        assert sum(len(record.body) for record in records[:-1]) < size
        looked = len(records) + sum(last - first + 1 for first, last in selected.unmatched)
        assert looked <= looks
        assert selected.last >= after
        assert joined(selected.unmatched) == selected.unmatched
        found |= {record.offset: record for record in records}
        unmatched += selected.unmatched
        after, calls = selected.last, calls + 1
        if not selected.more:
            break
        assert looked > 0
    assert calls <= len(log) + 1
    assert after == max(log, default=0)
    assert (command is not None) == sealed
    assert command is None or command.end == len(messages) + 1
    passed = {offset for first, last in unmatched for offset in range(first, last + 1)}
    assert passed | set(found) == set(log)
    assert not passed & set(found)
    taken = {offset: record.body for offset, record in found.items() if wanted.takes(record.tags)}
    assert taken == {offset: body for offset, (_, tags, body) in log.items() if is_wanted(wanted, tags)}
    hashes = set(wanted.hashes)
    for record in found.values():
        assert hashes & set(map(tag_hash, record.tags)), "a message without any of the hashes travelled"


def test_large_bodies_bound_what_one_call_looks_at(connection: NodeConnection, key_prefix: str) -> None:
    """What the node copies for one call is bounded by bytes too, whatever is asked for."""
    partition = next(numbers)
    keys = partition_keys(key_prefix, partition)
    body = b"b" * 250_000
    connection.call([("XADD", keys.log, f"{n}-0", "m", f"1:0:{n}:0", "k", "k", "b", body) for n in range(1, 61)])
    wanted = TagFilter("any", ("eu",))
    after, calls = 0, 0
    while True:
        ask = select_command(
            connection, key_prefix, partition, wanted, after=after, max_scanned=1_000, limit=500, size=1
        )
        selected = select_reply(connection.call([ask])[0], "")
        assert selected.last - after <= 20
        assert selected.entries == []
        after, calls = selected.last, calls + 1
        if not selected.more:
            break
    assert after == 60
    assert calls <= 5
