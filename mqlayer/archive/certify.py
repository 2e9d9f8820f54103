"""Make order certificates of snapshots, and check them again on a snapshot or an export."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqlayer.archive.certificates import (
    BLOCK_BOUNDS,
    BLOCK_RECORDS,
    Certificate,
    ChainKey,
    Contents,
    Continuation,
    Continued,
    Difference,
    continued,
    differences,
    parse_certificate,
)
from mqlayer.archive.columns import COLUMNS, SNAPSHOT_QUERIES, WHOLE_QUERY, ArchiveTable
from mqlayer.archive.order_counts import Lineage, Served
from mqlayer.archive.parquet_export import FORMAT, MANIFEST
from mqlayer.archive.signatures import check_signature, sign
from mqlayer.archive.snapshots import SeqRange, Snapshot, find_snapshot, is_whole, snapshot_cut
from mqlayer.domain.protocol import RELEASE
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import ArchiveBroken, InvalidInput
from mqlayer.failpoints import failpoint
from mqlayer.postgres.arrow_reader import arrow_batches, bound, read_address
from mqlayer.postgres.database import Database

if TYPE_CHECKING:
    import pyarrow as pa

PLAIN_RECORDS: Final = 1_000_000
"""Up to so many, Python alone is quicker than Spark's start."""
MOST_PLAIN: Final = 5_000_000
"""Above, its rows without bodies take more than about 2 GB."""
APPLICATION: Final = "mqlayer certify"


@dataclass(frozen=True, slots=True)
class CertificateCheck:
    """A check's result. `signature`: why it does not hold; None: it does, or there is none.

    `continuation`: None where no earlier certificate was given.
    """

    certificate: Certificate
    differences: list[Difference]
    signature: str | None
    continuation: Continued | None

    @property
    def good(self) -> bool:
        """Whether nothing contradicts."""
        broken = self.continuation is not None and self.continuation.word == "broken"
        return not self.differences and self.signature is None and not broken


def certify_snapshot(
    database: Database,
    name: str,
    *,
    continues: Certificate | None = None,
    block_records: int = BLOCK_RECORDS,
    key_file: Path | None = None,
) -> Certificate:
    """Return a snapshot's certificate without Spark.

    Raises NotFound, InvalidInput for too many records, ArchiveBroken for a broken continuation.
    """
    found = find_snapshot(database, name)
    size = block_size(continues, block_records)
    return assemble(
        snapshot_facts(found), snapshot_contents(database, found, size, continues), size, continues, key_file
    )


def check_certificate(
    database: Database | None,
    certificate: Certificate,
    *,
    export: Path | None = None,
    public_key: Path | None = None,
    continues: Certificate | None = None,
) -> CertificateCheck:
    """Compute hashes and audit again without Spark, and compare; `export`: from it, without a database.

    Raises NotFound, InvalidInput.
    """
    if export is not None:
        facts, contents = export_contents(export, certificate.snapshot, certificate.block_records, continues)
    else:
        if database is None:
            raise InvalidInput("a check needs a database or an export")
        found = find_snapshot(database, certificate.snapshot)
        facts = snapshot_facts(found)
        contents = snapshot_contents(database, found, certificate.block_records, continues)
    return judge(certificate, facts, contents, public_key=public_key, continues=continues)


def check_hashes(
    certificate: Certificate, *, public_key: Path | None = None, continues: Certificate | None = None
) -> CertificateCheck:
    """Check the signature, and the continuation by hashes alone. Raises InvalidInput for a wrong key file."""
    follows = None if continues is None else continued(certificate, continues)
    return CertificateCheck(certificate, [], _signature(certificate, public_key), follows)


def judge(
    certificate: Certificate,
    facts: Mapping[str, Any],
    contents: Contents,
    *,
    public_key: Path | None = None,
    continues: Certificate | None = None,
) -> CertificateCheck:
    """Compare a certificate with computed contents. Raises InvalidInput for a wrong key file."""
    follows = None
    if continues is not None:
        # Of the data, not of what the certificate says about itself.
        there = replace(certificate, chains=tuple(contents.chains))
        follows = continued(there, continues, contents.seams)
    found = differences(certificate, contents, facts)
    return CertificateCheck(certificate, found, _signature(certificate, public_key), follows)


def assemble(
    facts: Mapping[str, Any],
    contents: Contents,
    block_records: int,
    continues: Certificate | None,
    key_file: Path | None,
) -> Certificate:
    """Return a certificate of computed contents. Raises ArchiveBroken where it does not continue the earlier one."""
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    chains = tuple(contents.chains)
    made = Certificate(facts, made_at, RELEASE, block_records, contents.audit, chains)
    if continues is not None:
        follows = continued(made, continues, contents.seams)
        if follows.word == "broken":
            raise ArchiveBroken(
                f"the snapshot does not continue that certificate: {describe(follows.broken[0])}",
                "compare that block with a backup or an export",
            )
        seams = tuple(contents.seams)
        made = replace(made, continues=Continuation(continues.snapshot, continues.digest, seams))
    return made if key_file is None else replace(made, signature=sign(made.payload(), key_file))


def write_whole(path: Path, text: str) -> None:
    """Write a file, with its directories, whole or not at all. Raises InvalidInput."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, "utf-8")
        failpoint("certify.before_rename")
        unfinished.replace(path)
    except OSError as error:
        raise InvalidInput(f"can't write the certificate to {path}: {error.strerror}") from error


def block_size(continues: Certificate | None, wanted: int) -> int:
    """Return the records of a block: those of the earlier certificate. Raises InvalidInput."""
    size = wanted if continues is None else continues.block_records
    low, high = BLOCK_BOUNDS
    if not low <= size <= high:
        raise InvalidInput(f"a block has {low} to {high:,} records, not {size}")
    return size


def load_certificate(path: Path) -> Certificate:
    """Read a file. Raises InvalidInput, also for one whose digest is of another content."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"can't read {path}: {getattr(error, 'strerror', None) or 'no text'}") from None
    found, digest = parse_certificate(text)
    if found.digest != digest:
        raise InvalidInput(f"{path} was altered: its digest is of another content")
    return found


def ends_of(continues: Certificate | None) -> dict[ChainKey, int]:
    """Return the last seqs of an earlier certificate."""
    return {} if continues is None else {chain.key: chain.last_seq for chain in continues.chains}


def snapshot_facts(found: Snapshot) -> dict[str, Any]:
    """Return a snapshot's facts for a certificate."""
    return {
        "name": found.name,
        "created_at": _utc(found.created_at),
        "upto_at": found.upto_at and _utc(found.upto_at),
        "records": found.records,
        "topics": [asdict(topic) for topic in found.topics],
    }


def snapshot_contents(database: Database, found: Snapshot, size: int, continues: Certificate | None) -> Contents:
    """Compute a snapshot's contents without Spark. Raises InvalidInput for too many records."""
    if found.records > MOST_PLAIN:
        raise InvalidInput(
            f"{found.records:,} records are too many without Spark, which {MOST_PLAIN:,} are not: leave --no-spark out"
        )
    query_name = WHOLE_QUERY if is_whole(database, found.snapshot_id) else SNAPSHOT_QUERIES["records"]
    facts = {"snapshot_id": found.snapshot_id, "lp_from": 0, "lp_to": LP_COUNT}
    address = read_address(database.dsn)

    def read(table: ArchiveTable, statement: str) -> Iterator[pa.RecordBatch]:
        from mqlayer.archive.arrow_types import arrow_schema, formed

        there = bound("snapshot_there", {"snapshot_id": found.snapshot_id})
        with arrow_batches(address, [there, statement], application=APPLICATION) as batches:
            for batch in batches:
                yield formed(batch, arrow_schema(COLUMNS[table]))

    lineage = _lineage(read("lineage", bound(SNAPSHOT_QUERIES["lineage"], facts)))
    cut = snapshot_cut(database, found.snapshot_id)
    return _computed([read("records", bound(query_name, facts))], lineage, cut, size, continues)


def export_contents(path: Path, name: str, size: int, continues: Certificate | None) -> tuple[dict[str, Any], Contents]:
    """Compute an export's facts and contents without Spark, a file at a time. Raises InvalidInput."""
    import pyarrow.parquet as pq

    manifest = load_manifest(path, name)

    def batches(file: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(path / file["path"]) as opened:
            yield from opened.iter_batches(batch_size=16_384)

    tables = manifest["tables"]
    lineage = _lineage(batch for file in tables["lineage"]["files"] for batch in batches(file))
    groups = (batches(file) for file in tables["records"]["files"])
    cut = [SeqRange(*one) for one in manifest["cut"]]
    return export_facts(manifest), _computed(groups, lineage, cut, size, continues)


def load_manifest(path: Path, name: str) -> dict[str, Any]:
    """Return an export's manifest. Raises InvalidInput."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        raise InvalidInput(f"no export is at {path}: it has no readable {MANIFEST}") from None
    if manifest.get("format") != FORMAT:
        raise InvalidInput(f"{path} was exported in another format: upgrade mqlayer, or export anew")
    if manifest["snapshot"] != name:
        raise InvalidInput(f"{path} holds snapshot {manifest['snapshot']!r}, the certificate is of {name!r}")
    return manifest


def export_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's facts for a certificate."""
    upto = manifest["upto_at"]
    return {
        "name": manifest["snapshot"],
        "created_at": _utc(datetime.fromisoformat(manifest["created_at"])),
        "upto_at": upto and _utc(datetime.fromisoformat(upto)),
        "records": sum(topic["records"] for topic in manifest["topics"]),
        "topics": manifest["topics"],
    }


def describe(found: Difference) -> str:
    """Return a difference as a line."""
    if found.topic is None:
        return found.said
    where = f"{found.topic}, source {found.source}, LP {found.lp}, seqs {found.first_seq} to {found.last_seq}"
    return f"{where}: {found.said}"


def _computed(
    groups: Iterable[Iterable[pa.RecordBatch]],
    lineage: Lineage,
    cut: list[SeqRange],
    size: int,
    continues: Certificate | None,
) -> Contents:
    from mqlayer.archive.record_hashes import contents_of

    return contents_of(groups, lineage, cut, block_records=size, last_seqs=ends_of(continues))


def _lineage(batches: Iterable[pa.RecordBatch]) -> Lineage:
    rows = (row for batch in batches for row in batch.to_pylist())
    return {
        (row["topic"], row["partition"]): Served(row["lp_from"], row["lp_to"], row["first_version"]) for row in rows
    }


def _signature(certificate: Certificate, public_key: Path | None) -> str | None:
    if certificate.signature is None:
        return None if public_key is None else "it is not signed"
    return check_signature(certificate.payload(), certificate.signature, public_key)


def _utc(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()
