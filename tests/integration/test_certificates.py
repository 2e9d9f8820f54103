"""Order certificates: what was planted is found, nothing is found where nothing was planted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mqlayer.archive import create_snapshot, drop_snapshot, retain
from mqlayer.archive.certificates import AuditCounts, Block, Chain, ChainKey, Contents, Seam, continued, differences
from mqlayer.archive.certify import (
    certify_snapshot,
    check_certificate,
    ends_of,
    load_certificate,
    snapshot_contents,
    snapshot_facts,
)
from mqlayer.archive.order_counts import PlacedRecord, Served, count_findings
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.archive.record_hashes import record_hash
from mqlayer.archive.snapshots import SeqRange, find_snapshot
from mqlayer.domain.routing import lp_of
from mqlayer.errors import ArchiveBroken, InvalidInput
from tests.fixtures.archived import BEGAN, ArchivedTopics
from tests.fixtures.commands import Commands
from tests.fixtures.missing_tools import import_or_leave_out
from tests.proof.runtimes import runtime_of

import_or_leave_out("pyarrow")
serialization = import_or_leave_out("cryptography.hazmat.primitives.serialization")

KEYS = tuple(f"key-{number}" for number in range(6))
SMALL = 16
LP = lp_of(b"a")
KEY = ChainKey("orders", 1, LP)


def fill(archived: ArchivedTopics, *, batches: int = 8, **facts: Any) -> None:
    for number in range(batches):
        archived.put(*KEYS, None, body=b"%d" % number, **facts)


def certified(archived: ArchivedTopics, name: str, **options: Any) -> Any:
    return certify_snapshot(archived.database, name, block_records=SMALL, **options)


def key_pair(directory: Path, name: str = "key") -> tuple[Path, Path]:
    """Make a key as the documents say, with openssl."""
    private, public = directory / f"{name}.pem", directory / f"{name}.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    return private, public


def test_a_record_s_hash_is_that_of_its_fields_behind_their_lengths() -> None:
    """By hand."""
    at = int(datetime(2026, 11, 21, tzinfo=UTC).timestamp() * 1_000_000)
    headers = [("y", "2"), ("x", "ä")]
    row = ("orders", 3, 7, 90, 1, LP, 5, at, at + 1, "ä", ["t", ""], headers, b"body", 12)
    told = f"1,{LP},5,3,7,90,12,{at},{at + 1},2:ä2[1:t0:2{{1:x2:ä1:y1:24:body"
    assert record_hash(row) == sha256(told.encode()).hexdigest()
    bare = ("orders", 3, 7, 90, 1, LP, 5, at, at + 1, None, None, None, b"", 12)
    assert record_hash(bare) == sha256(f"1,{LP},5,3,7,90,12,{at},{at + 1},---0:".encode()).hexdigest()


@pytest.mark.parametrize(
    ("places", "cut", "found"),
    [
        ([(1, 1), (2, 2), (3, 3)], (1, 3), {}),
        ([(1, 2), (2, 1), (3, 3)], (1, 3), {"inversions": 1}),
        ([(1, 1), (3, 2)], (1, 4), {"gaps": 2}),
        ([(1, 1), (2, 2), (2, 3)], (1, 2), {"duplicates": 1}),
        ([], (1, 2), {"gaps": 1}),
    ],
)
def test_the_order_of_a_chain_is_counted(
    places: list[tuple[int, int]], cut: tuple[int, int], found: dict[str, int]
) -> None:
    records = [PlacedRecord(seq, 1, 1, offset, "a") for seq, offset in places]
    lineage = {("orders", 1): Served(0, 1024, 1)}
    assert count_findings(KEY, records, lineage, SeqRange(*KEY, *cut)) == AuditCounts(**found)


def test_a_record_out_of_its_place_is_counted_once() -> None:
    lineage = {("orders", 1): Served(0, 1024, 1), ("other", 2): Served(0, 1024, 1)}
    records = [PlacedRecord(1, 2, 1, 1, "b"), PlacedRecord(2, 1, 1, 2, "a"), PlacedRecord(3, 1, 1, 3, "b")]
    assert count_findings(KEY, records, lineage, SeqRange(*KEY, 1, 3)) == AuditCounts(misplaced=2)


def test_a_certificate_is_accepted_on_its_snapshot_and_on_an_export(archived: ArchivedTopics, tmp_path: Path) -> None:
    fill(archived, headers='{"x":"ä","b":"1"}', tags=["t", "u"])
    create_snapshot(runtime_of(archived.database), "s")
    export_snapshot(runtime_of(archived.database), "s", tmp_path / "out", file_rows=20)
    private, public = key_pair(tmp_path)
    made = certified(archived, "s", key_file=private)
    (tmp_path / "c.json").write_text(made.dump())
    loaded = load_certificate(tmp_path / "c.json")
    assert (loaded, loaded.signature) == (made, made.signature)
    assert (made.records, made.audit.verdict) == (8 * 7, "clean")
    assert {chain.key.lp: (chain.first_seq, chain.last_seq) for chain in made.chains}[7] == (1, 8)
    assert check_certificate(archived.database, loaded, public_key=public).good
    drop_snapshot(runtime_of(archived.database), "s")
    assert check_certificate(None, loaded, export=tmp_path / "out", public_key=public).good


PLANTS = {
    "a body altered": "UPDATE mqlayer_archive.record SET body = '!' WHERE seq = 5 AND lp = 7",
    "a header added": 'UPDATE mqlayer_archive.record SET headers = \'{"x":"y"}\' WHERE seq = 5 AND lp = 7',
    "a record missing": "DELETE FROM mqlayer_archive.record WHERE seq = 5 AND lp = 7",
    "a record twice": "INSERT INTO mqlayer_archive.record SELECT * FROM mqlayer_archive.record "
    "WHERE seq = 5 AND lp = 7",
    "two records swapped": "UPDATE mqlayer_archive.record SET seq = 11 - seq WHERE seq IN (5, 6) AND lp = 7",
    "two bodies swapped": "UPDATE mqlayer_archive.record r SET body = o.body FROM mqlayer_archive.record o "
    "WHERE r.lp = 7 AND o.lp = 7 AND r.seq IN (5, 6) AND o.seq = 11 - r.seq",
    "a time changed": "UPDATE mqlayer_archive.record SET published_at = published_at + interval '1 us' "
    "WHERE seq = 5 AND lp = 7",
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_what_is_planted_is_found_where_it_is(archived: ArchivedTopics, plant: str) -> None:
    fill(archived)
    create_snapshot(runtime_of(archived.database), "s")
    made = certified(archived, "s")
    assert check_certificate(archived.database, made).good
    archived.connection.execute(plant.encode())
    found = check_certificate(archived.database, made).differences
    assert (found[0].kind, found[0].topic, found[0].source, found[0].lp) == ("block", "orders", 1, 7)
    assert [one.kind for one in found[1:]] in ([], ["audit"])


def test_the_first_differing_block_is_named() -> None:
    chain = Chain(KEY, 48, (Block(1, 16, "a"), Block(17, 32, "b"), Block(33, 48, "c")))
    there = replace(chain, blocks=(Block(1, 16, "a"), Block(17, 32, "x"), Block(33, 48, "y")))
    other = Chain(ChainKey("orders", 2, LP), 1, (Block(1, 1, "d"),))
    certificate: Any = certificate_of(chain)
    (found,) = differences(certificate, Contents([there], AuditCounts()), {})
    assert (found.kind, found.first_seq, found.last_seq) == ("block", 17, 32)
    assert [one.kind for one in differences(certificate, Contents([other], AuditCounts()), {})] == [
        "missing",
        "unexpected",
    ]


def certificate_of(*chains: Chain) -> Any:
    from mqlayer.archive.certificates import Certificate

    return Certificate({}, "", "1", SMALL, AuditCounts(), chains)


def alter(path: Path, change: Callable[[dict[str, Any]], None], *, digest: bool = False) -> None:
    whole = json.loads(path.read_text())
    change(whole["certificate"])
    if digest:
        told = json.dumps(whole["certificate"], sort_keys=True, separators=(",", ":"))
        whole["digest"] = sha256(told.encode()).hexdigest()
    path.write_text(json.dumps(whole))


def test_an_altered_certificate_is_refused(
    archived: ArchivedTopics, run: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", archived.dsn)
    archived.put("a", "a")
    create_snapshot(runtime_of(archived.database), "s")
    private, public = key_pair(tmp_path)
    _, other = key_pair(tmp_path, "other")
    path = tmp_path / "c.json"
    original = certified(archived, "s", key_file=private).dump()
    path.write_text(original)

    def changed(told: dict[str, Any]) -> None:
        told["made_at"] = "2020-01-01"

    assert "signed by SHA256:" in run.text("analytics", "certify", "--check", str(path), "--public-key", str(public))
    alter(path, changed)
    assert "was altered: its digest" in run.failure("analytics", "certify", "--check", str(path))
    alter(path, changed, digest=True)
    said = run("analytics", "certify", "--check", str(path), "--hashes-only")
    assert (said.exit_code, "the certificate was altered" in said.stdout) == (1, True)
    path.write_text(original)
    alter(path, lambda told: told["audit"].update(verdict="not clean"), digest=True)
    assert "contradicts itself" in run.failure("analytics", "certify", "--check", str(path))
    path.write_text(original)
    said = run("analytics", "certify", "--check", str(path), "--public-key", str(other))
    assert (said.exit_code, "another key signed it" in said.stdout) == (1, True)
    path.write_text(certified(archived, "s").dump())
    said = run("analytics", "certify", "--check", str(path), "--public-key", str(public))
    assert (said.exit_code, "it is not signed" in said.stdout) == (1, True)
    path.write_text("{}")
    assert "no order certificate" in run.failure("analytics", "certify", "--check", str(path))


def test_key_files_that_do_not_fit_are_refused(archived: ArchivedTopics, tmp_path: Path) -> None:
    archived.put("a")
    create_snapshot(runtime_of(archived.database), "s")
    rsa = tmp_path / "rsa.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", rsa],
                   check=True, capture_output=True)  # fmt: skip
    with pytest.raises(InvalidInput, match="not of Ed25519"):
        certified(archived, "s", key_file=rsa)
    rsa.write_text("secret")
    with pytest.raises(InvalidInput, match="no private key in PEM") as raised:
        certified(archived, "s", key_file=rsa)
    assert "secret" not in str(raised.value)
    with pytest.raises(InvalidInput, match="can't read the key file"):
        certified(archived, "s", key_file=tmp_path / "none")


def test_a_later_certificate_continues_an_earlier_one(archived: ArchivedTopics) -> None:
    """By its data; and by hashes alone, where it was made to continue it."""
    fill(archived)
    create_snapshot(runtime_of(archived.database), "one")
    first = certified(archived, "one")
    fill(archived)
    create_snapshot(runtime_of(archived.database), "two")
    alone, second = certified(archived, "two"), certified(archived, "two", continues=first)
    assert continued(second, first)[:4] == ("proved", first.records, 0, 0)
    assert continued(alone, first).word == "unproven"
    assert continued(alone, first).open == len(first.chains)
    found = check_certificate(archived.database, alone, continues=first)
    assert found.good
    assert found.continuation is not None
    assert found.continuation.word == "proved"
    assert continued(first, second).word == "broken"
    archived.connection.execute(b"UPDATE mqlayer_archive.record SET body = '!' WHERE seq = 5 AND lp = 7")
    with pytest.raises(ArchiveBroken, match="LP 7, seqs 1 to 8: its records are other ones"):
        certified(archived, "two", continues=first)
    assert continued(certified(archived, "two"), first).word == "unproven"
    found = check_certificate(archived.database, second, continues=first)
    assert found.continuation is not None
    assert (found.good, found.continuation.word) == (False, "broken")


def test_days_that_retention_dropped_leave_the_rest_proven(archived: ArchivedTopics) -> None:
    """Blocks end with days, and retention drops whole days."""
    fill(archived, age_days=9)
    fill(archived)
    create_snapshot(runtime_of(archived.database), "one")
    first = certified(archived, "one")
    drop_snapshot(runtime_of(archived.database), "one")
    assert [day.result for day in retain(runtime_of(archived.database), older_than=timedelta(days=5))] == ["dropped"]
    fill(archived)
    create_snapshot(runtime_of(archived.database), "two")
    second = certified(archived, "two", continues=first)
    assert {chain.first_seq for chain in second.chains} == {9}
    assert continued(second, first)[:4] == ("proved", first.records // 2, 0, 0)


def test_chains_that_are_gone_prove_nothing() -> None:
    earlier = certificate_of(Chain(KEY, 2, (Block(1, 2, "a"),)))
    assert continued(certificate_of(Chain(KEY, 1, (Block(3, 3, "b"),))), earlier)[:3] == ("unproven", 0, 1)
    assert continued(certificate_of(), earlier)[:3] == ("unproven", 0, 1)


@pytest.mark.parametrize(
    ("blocks", "word"),
    [
        ([Block(1, 16, "a"), Block(17, 20, "b")], "proved"),
        ([Block(1, 16, "a"), Block(17, 20, "b"), Block(21, 30, "n")], "proved"),
        ([Block(17, 20, "b"), Block(21, 30, "n")], "proved"),
        ([Block(1, 16, "a"), Block(17, 30, "n")], "unproven"),
        ([Block(1, 16, "a"), Block(17, 18, "n")], "broken"),
        ([Block(1, 16, "x"), Block(17, 20, "b")], "broken"),
        ([Block(1, 8, "a"), Block(9, 16, "a"), Block(17, 20, "b")], "broken"),
    ],
)
def test_continuation_by_blocks(blocks: list[Block], word: str) -> None:
    earlier = certificate_of(Chain(KEY, 20, (Block(1, 16, "a"), Block(17, 20, "b"))))
    later = certificate_of(Chain(KEY, 30, tuple(blocks)))
    assert continued(later, earlier).word == word
    if word == "unproven":
        assert continued(later, earlier, [Seam(*KEY, 17, "b")]).word == "proved"
        assert continued(later, earlier, [Seam(*KEY, 17, "x")]).word == "broken"


def test_a_certificate_with_a_longer_past_continues_nothing() -> None:
    earlier = certificate_of(Chain(KEY, 4, (Block(17, 20, "b"),)))
    assert continued(certificate_of(Chain(KEY, 20, (Block(1, 16, "a"), Block(17, 20, "b")))), earlier).word == "broken"


def test_commands(archived: ArchivedTopics, run: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MQLAYER_DSN", archived.dsn)
    fill(archived)
    create_snapshot(runtime_of(archived.database), "one")
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    assert "certifies 56 records in 7 chains of one; order audit: clean; not signed" in run.text(
        "analytics", "certify", "--snapshot", "one", "--out", one
    )
    fill(archived, batches=1)
    create_snapshot(runtime_of(archived.database), "two")
    run.text("analytics", "certify", "--snapshot", "two", "--out", two)
    assert run("analytics", "certify", "--check", two, "--continues", one, "--hashes-only").exit_code == 3
    assert "continuation: proved; 56 records compared" in run.text(
        "analytics", "certify", "--check", two, "--continues", one
    )
    archived.connection.execute(b"UPDATE mqlayer_archive.record SET body = '!' WHERE seq = 5 AND lp = 7")
    said = run("analytics", "certify", "--check", two)
    assert said.exit_code == 1
    assert "orders, source 1, LP 7, seqs 1 to 9: its records are other ones" in said.stdout
    assert "certificate of two: not accepted" in said.stdout
    archived.connection.execute(b"DELETE FROM mqlayer_archive.record WHERE seq = 5 AND lp = 7")
    assert run("analytics", "certify", "--snapshot", "two", "--out", two).exit_code == 1
    assert load_certificate(Path(two)).audit == AuditCounts(gaps=1)
    assert "say --snapshot NAME --out FILE" in run.failure("analytics", "certify")


def test_spark_gives_the_same_hashes(spark: Any) -> None:
    from mqlayer.archive.columns import COLUMNS
    from mqlayer.spark.schemas import declared
    from mqlayer.spark.transforms import certificate as transforms

    rows = [
        ("orders", 3, 7, 90, 1, LP, 5, BEGAN, BEGAN, "ä", ["t", ""], {"y": "2", "x": "ä"}, b"bo\x00\xff", 12),
        ("orders", 3, 7, 91, 1, LP, 6, BEGAN, BEGAN, None, None, None, b"", 12),
        ("orders", 3, 7, 92, 1, LP, 7, BEGAN, BEGAN, "a", [], {}, b"b", 13),
    ]
    at = int(BEGAN.timestamp() * 1_000_000)
    wanted = [
        record_hash((*row[:7], at, at, *row[9:11], None if row[11] is None else list(row[11].items()), *row[12:]))
        for row in rows
    ]
    hashed = transforms.hashed(spark.createDataFrame(rows, declared(COLUMNS["records"])))
    ends = spark.createDataFrame([("orders", 1, LP, 6)], "topic string, source bigint, lp int, end bigint")
    (found,) = transforms.blocks(hashed, SMALL, ends).collect()
    assert (found.first_seq, found.last_seq, found.records) == (5, 7, 3)
    assert found.hash == sha256("".join(wanted).encode()).hexdigest()
    assert found.seam == sha256("".join(wanted[:2]).encode()).hexdigest()


@pytest.mark.full
def test_spark_computes_the_same_contents(archived: ArchivedTopics, spark: Any) -> None:
    from mqlayer.spark.jobs import certify as job

    for number in range(3):
        archived.put(*KEYS, None, "ä", body=bytes([number, 0, 255]), tags=["t", "ü"], headers='{"x":"ä","b":""}')
        archived.put(*KEYS, at=BEGAN + timedelta(microseconds=number), source=2, tags=[])
    create_snapshot(runtime_of(archived.database), "one")
    first = certify_snapshot(archived.database, "one", block_records=SMALL)
    archived.put(*KEYS, None, "ä")
    create_snapshot(runtime_of(archived.database), "two")
    # Faults, so that both count them alike.
    archived.connection.execute(b"DELETE FROM mqlayer_archive.record WHERE seq = 2 AND lp = 7")
    archived.connection.execute(b"UPDATE mqlayer_archive.record SET seq = 4 - seq WHERE source = 2 AND key = 'key-1'")
    archived.connection.execute(b"UPDATE mqlayer_archive.record SET key = 'key-9' WHERE source = 2 AND key = 'key-2'")
    found = find_snapshot(archived.database, "two")
    plain = snapshot_contents(archived.database, found, SMALL, first)
    facts, by_spark = job.snapshot_contents(spark, "two", dsn=archived.dsn, block_records=SMALL, continues=first)
    assert by_spark == plain
    assert facts == snapshot_facts(found)
    assert plain.audit == AuditCounts(inversions=2, gaps=1, misplaced=3)
    assert len(plain.seams) == len(ends_of(first)) - 6
