"""Case 79: the order audit on histories that are clean, and on the same with one fault each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from mqlayer.domain.routing import LP_COUNT, lp_of
from mqlayer.postgres.database import Database
from mqlayer.spark.transforms import order
from mqlayer.spark.transforms.lp import lp_of_key
from mqlayer.topics import rearm_node
from tests.fixtures.archive_scenes import LOW, ArchiveScene
from tests.fixtures.archived_topics import CUT, LINEAGE, RECORDS, ArchivedTopic, Row, random_topic
from tests.fixtures.servers import StartRedis
from tests.proof.audit import archive_and_audit
from tests.proof.fall_back import FallBack
from tests.proof.route_steps import merge, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

KEYS: Final = [
    "",
    "a",
    "k1",
    "Größe",
    "鍵",
    "🔑",
    "a\x00b",
    "x" * 512,
    " ",
    "'\"<&>",
    *(f"key-{n}" for n in range(200)),
]


def audit(spark: Any, topics: Sequence[ArchivedTopic], *, cut: bool = True) -> tuple[list[Row], dict[str, Row]]:
    """Return the findings and the totals by topic."""
    records = spark.createDataFrame([row for one in topics for row in one.records], RECORDS)
    lineage = spark.createDataFrame([row for one in topics for row in one.lineage], LINEAGE)
    ends = spark.createDataFrame([row for one in topics for row in one.ends], CUT) if cut else None
    found = order.audited(records, lineage, ends)
    total = {row["topic"]: row.asDict() for row in order.totals(order.chains(found)).collect()}
    return [row.asDict() for row in order.findings(found).collect()], total


class Spoilt(ArchivedTopic):
    """Two partitions; the first one is split once, its second part moved; eight messages of each of two keys."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.key, self.other = "k1", "k4"
        for _ in range(4):
            self.publish(self.key, self.other, None)
        (home,) = {row["partition"] for row in self.records if row["key"] == self.key}
        r = self.lineage[home - 1]
        self.children = self.split(home, (r["lp_from"] + r["lp_to"]) // 2)
        for _ in range(4):
            self.publish(self.key, self.other, None)
        self.ends = self.cut()

    def of(self, key: str) -> list[Row]:
        """Return the rows of a key, by seq."""
        return sorted((row for row in self.records if row["key"] == key), key=lambda row: row["seq"])


def swap(first: Row, second: Row) -> None:
    for name in ("partition", "offset", "batch", "version"):
        first[name], second[name] = second[name], first[name]


def spot(row: Row) -> tuple[int, int]:
    return row["partition"], row["offset"]


def finding(kind: str, row: Row, behind: Row | None = None, **facts: Any) -> Row:
    """Return what the audit is to say of a record."""
    said = {"topic": row["topic"], "kind": kind, "key": row["key"], "source": row["source"], "lp": row["lp"]}
    said |= {"first_seq": row["seq"], "last_seq": row["seq"], "partition": row["partition"], "offset": row["offset"]}
    front = behind or {}
    said |= {f"behind_{name}": front.get(name) for name in ("seq", "partition", "offset")}
    return said | {"reason": None} | facts


def inversion_in_a_partition(topic: Spoilt) -> list[Row]:
    rows = topic.of("k1")
    swap(rows[1], rows[2])
    return [finding("inversion", rows[1], rows[2], reason=order.KEY_BROKEN)]


def child_before_its_parent(topic: Spoilt) -> list[Row]:
    """The last message before the split is in the successor, the first one behind it in the parent."""
    rows = topic.of("k1")
    assert rows[3]["partition"] != rows[4]["partition"]
    swap(rows[3], rows[4])
    return [finding("inversion", rows[3], rows[4], reason=order.KEY_BROKEN)]


def inversion_of_two_keys_in_an_lp(topic: Spoilt) -> list[Row]:
    """Of two keys that share an LP: the chain is broken, no key's order is."""
    twin = next(key for key in map(str, range(10_000_000)) if lp_of(key.encode()) == lp_of(b"k1"))
    row, last = *topic.publish(twin), *topic.publish("k1")
    topic.ends = topic.cut()
    swap(row, last)
    return [finding("inversion", row, last, reason=order.LP_BROKEN)]


def gap(topic: Spoilt) -> list[Row]:
    rows = topic.of("k1")
    for row in rows[2:5]:
        topic.records.remove(row)
    return [finding("gap", rows[5], rows[1], key=None, first_seq=3, last_seq=5)]


def missing_head(topic: Spoilt) -> list[Row]:
    rows = topic.of("k1")
    topic.records.remove(rows[0])
    return [finding("gap", rows[1], key=None, first_seq=1, last_seq=1)]


def missing_tail(topic: Spoilt) -> list[Row]:
    rows = topic.of("k4")
    topic.records.remove(rows[7])
    return [finding("gap", rows[7], rows[6], key=None, partition=None, offset=None)]


def missing_chain(topic: Spoilt) -> list[Row]:
    rows = topic.of("k1")
    topic.records = [row for row in topic.records if row["key"] != "k1"]
    return [finding("gap", rows[0], key=None, first_seq=1, last_seq=8, partition=None, offset=None)]


def duplicate_in_a_partition(topic: Spoilt) -> list[Row]:
    rows = topic.of("k1")
    again = rows[1] | {"offset": 1000}
    # A copy behind what followed: neither the chain nor the key is out of order, but for the copy itself.
    again["partition"] = rows[2]["partition"]
    topic.records.append(again)
    return [finding("duplicate", again, rows[1])]


def duplicate_in_the_successor(topic: Spoilt) -> list[Row]:
    rows = topic.of("k1")
    again = rows[3] | {"partition": rows[4]["partition"], "offset": 1000, "version": 2}
    topic.records.append(again)
    return [finding("duplicate", again, rows[3])]


def outside_of_its_partition(topic: Spoilt) -> list[Row]:
    row = topic.of("k1")[6]
    right = topic.lineage[row["partition"] - 1]
    wrong = next(r for r in topic.lineage if r["partition"] in topic.children and r is not right)
    row["partition"], row["offset"] = wrong["partition"], 1000
    return [finding("misplaced", row, reason=f"its partition serves LPs [{wrong['lp_from']}, {wrong['lp_to']})")]


def unknown_partition(topic: Spoilt) -> list[Row]:
    row = topic.of("k1")[6]
    row["partition"] = 77
    return [finding("misplaced", row, reason="its partition is not in the lineage")]


def wrong_lp(topic: Spoilt) -> list[Row]:
    row = topic.of("k1")[6]
    row["key"] = "k4"
    assert lp_of(b"k4") != lp_of(b"k1")
    return [finding("misplaced", row, reason=f"its key's LP is {lp_of(b'k4')}")]


FAULTS: Final[list[Callable[[Spoilt], list[Row]]]] = [
    inversion_in_a_partition,
    child_before_its_parent,
    inversion_of_two_keys_in_an_lp,
    gap,
    missing_head,
    missing_tail,
    missing_chain,
    duplicate_in_a_partition,
    duplicate_in_the_successor,
    outside_of_its_partition,
    unknown_partition,
    wrong_lp,
]


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: [str(value) for value in row.values()])


def test_each_planted_fault_is_found_exactly_and_nothing_else(spark: Any) -> None:
    """Case 79: one topic with one fault each, audited in one run."""
    topics, expected = [], []
    for fault in FAULTS:
        topic = Spoilt(fault.__name__)
        expected += fault(topic)
        topics.append(topic)
    found, total = audit(spark, topics)
    assert in_order(found) == in_order(expected)
    for topic in topics:
        row = total[topic.topic]
        assert row["records"] == len(topic.records)
        assert not order.clean(row)
        assert sum(row[name] for name in ("inversions", "gaps", "duplicates", "misplaced")) == 1


@pytest.mark.full
def test_histories_with_splits_merges_and_moves_are_clean(spark: Any) -> None:
    """Case 79: whatever the changes, with several sources, without keys, with keys beyond ASCII."""
    topics = []
    for seed in range(12):
        topic = random_topic(f"t{seed}", seed)
        topic.ends = topic.cut()
        topics.append(topic)
    assert {len(row["parents"]) for topic in topics for row in topic.lineage} == {0, 1, 2}
    found, total = audit(spark, topics)
    assert found == []
    assert {row["topic"]: row["records"] for row in total.values()} == {t.topic: len(t.records) for t in topics}
    assert all(order.clean(row) for row in total.values())


@pytest.mark.full
def test_without_a_cut_only_missing_ends_go_unnoticed(spark: Any) -> None:
    topics = [Spoilt(fault.__name__) for fault in (missing_head, missing_tail, gap)]
    expected = [
        said for topic, fault in zip(topics, (missing_head, missing_tail, gap), strict=True) for said in fault(topic)
    ]
    found, _ = audit(spark, topics, cut=False)
    assert found == expected[-1:]


@pytest.mark.full
def test_findings_are_counted_per_key(spark: Any) -> None:
    topic = Spoilt("orders")
    inversion_in_a_partition(topic)
    gap(other := Spoilt("payments"))
    records = spark.createDataFrame(topic.records + other.records, RECORDS)
    lineage = spark.createDataFrame(topic.lineage + other.lineage, LINEAGE)
    (row,) = order.by_key(order.findings(order.audited(records, lineage))).collect()
    assert row.asDict() == {"topic": "orders", "key": "k1", "inversions": 1, "duplicates": 0, "misplaced": 0}


@pytest.mark.full
def test_what_a_real_system_archives_over_changes_is_clean_until_it_is_tampered_with(
    spark: Any, database_dsn: str, redis_url: str, key_prefix: str
) -> None:
    """Case 79: outbox, relay, splits and a merge between messages, archive, snapshot, audit."""
    world = World(database_dsn, key_prefix, [redis_url])
    world.add_topic("orders", partitions=2, archived=True)
    with world.relay(), Database(database_dsn) as database:
        world.publish(200)
        split(runtime_of(database, key_prefix, application=database), "orders", 1, at=[200])
        world.publish(200)
        merge(runtime_of(database, key_prefix, application=database), "orders", [4, 2])
        world.publish(200)
        world.wait_until_whole()
    found = archive_and_audit(spark, database_dsn, prefix=key_prefix)
    assert found.good, found.facts
    assert (found.facts["records"], found.facts["keys"]) == (600, 20)
    (row,) = world.rows(
        "UPDATE mqlayer_archive.record SET log_offset = log_offset + 100000 WHERE ctid = (SELECT ctid FROM "
        "mqlayer_archive.record r WHERE seq < (SELECT max(seq) FROM mqlayer_archive.record l WHERE l.lp = r.lp "
        "AND l.partition_id = r.partition_id AND l.batch = r.batch) ORDER BY seq DESC LIMIT 1) "
        "RETURNING lp, seq, log_offset"
    )
    tampered = archive_and_audit(spark, database_dsn, prefix=key_prefix)
    assert not tampered.good
    (said,) = tampered.facts["findings"]
    assert (said["kind"], said["lp"], said["first_seq"], said["offset"]) == ("inversion", *row)


@pytest.mark.full
def test_what_a_node_that_fell_back_gives_again_is_in_order(
    spark: Any, database_dsn: str, start_redis: StartRedis, key_prefix: str, tmp_path: Path
) -> None:
    """A later record stands at a lower offset than an earlier one, which the archive had before the node fell back."""
    node = start_redis()
    scene = ArchiveScene(database_dsn, key_prefix, node.url, partitions=1)
    scene.send(1, LOW, b"1", b"2")
    before = FallBack(node, tmp_path / "copy")
    scene.send(2, LOW, *[b"direct"] * 5)
    scene.send(1, LOW, b"3", b"4")
    scene.archive()
    before.happen()
    rearm_node(runtime_of(scene.database, scene.prefix), "node-1")
    scene.seqs[1, lp_of(LOW.encode())] = 2
    scene.send(1, LOW, b"3", b"4", b"5")
    found = archive_and_audit(spark, database_dsn, prefix=key_prefix)
    places = scene.rows("SELECT log_offset FROM mqlayer_archive.record WHERE source = 1 AND seq > 3 ORDER BY seq")
    scene.close()
    assert places == [(9,), (5,)]
    assert found.good, found.facts["findings"]


@pytest.mark.parametrize("source", ["made up", "hypothesis"])
def test_sparks_sha2_gives_the_same_lp_as_ours(spark: Any, source: str) -> None:
    """Case 1, by a third implementation."""
    keys = KEYS if source == "made up" else drawn_keys()
    rows = spark.createDataFrame([(key,) for key in keys], "key string")
    found = {row["key"]: row["lp"] for row in rows.select("key", lp_of_key(rows["key"]).alias("lp")).collect()}
    assert found == {key: lp_of(key.encode()) for key in keys}
    assert all(0 <= lp < LP_COUNT for lp in found.values())


def drawn_keys() -> list[str]:
    """Return texts of all of Unicode but surrogates, which UTF-8 can't hold."""
    import random

    rng = random.Random(1)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    return ["".join(map(chr, rng.choices(points, k=rng.randint(1, 20)))) for _ in range(300)]
