"""`analytics certify`: order certificates of snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from mqlayer.archive import find_snapshot
from mqlayer.cli.addresses import settings_here
from mqlayer.cli.analytics import ConfOption, ExportOption, spark_settings
from mqlayer.cli.option_rules import RuledCommand, excludes, needs
from mqlayer.cli.output import JsonOption, echo, pluralize
from mqlayer.cli.panels import LOOK
from mqlayer.cli.spark_requirements import check_spark
from mqlayer.errors import ArchiveBroken, InvalidInput
from mqlayer.escaping import json_line
from mqlayer.postgres.database import Database

if TYPE_CHECKING:
    from mqlayer.archive.certificates import Certificate, Contents
    from mqlayer.archive.certify import CertificateCheck

MAX_SHOWN: Final = 20
UNPROVEN: Final = 3


class _Source(NamedTuple):
    """Where records come from. `spark`: None where their number decides."""

    parquet: Path | None
    export: str | None
    spark: bool | None
    conf: list[str]

    def of_records(self, count: int) -> _Source:
        """Decide by the number of records."""
        return self if self.spark is not None else self._replace(spark=count > _plain_records())


def add_certify(group: typer.Typer) -> None:
    """Add the command."""
    group.command("certify", cls=RuledCommand, rich_help_panel=LOOK)(certify)


@excludes("--check", "--snapshot", "--out", "--key", "--block", why="--check looks at a certificate that is there")
@needs("--snapshot", "--out", why="the certificate is written there")
@needs("--out", "--snapshot", why="the certificate is of a snapshot")
@needs("--key", "--out", why="it signs what is written")
@needs("--block", "--out", why="a certificate has its blocks already")
@needs("--export", "--check", why="a certificate is made of the archive")
@needs("--public-key", "--check", why="it checks a signature")
@needs("--hashes-only", "--check", why="it reads no record")
@excludes("--hashes-only", "--export", "--from-export", "--spark", "--conf", why="--hashes-only reads no record")
@excludes("--export", "--from-export", why="records come from one of them")
@excludes("--block", "--continues", why="blocks are as large as the earlier certificate's")
def certify(
    snapshot: Annotated[str | None, typer.Option(metavar="NAME", help="Certify this snapshot.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the certificate, as JSON.")] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Sign with this Ed25519 key, in PEM, not the settings' one."),
    ] = None,
    block: Annotated[int | None, typer.Option(min=16, max=65_536, help="Records per hash; else 256.")] = None,
    check: Annotated[Path | None, typer.Option(metavar="FILE", help="Check this certificate.")] = None,
    export: Annotated[Path | None, typer.Option(metavar="PATH", help="Check it on this Parquet export.")] = None,
    public_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The signer's public key, in PEM.")] = None,
    hashes_only: Annotated[bool, typer.Option("--hashes-only", help="Read no record.")] = False,
    continues: Annotated[Path | None, typer.Option(metavar="FILE", help="Prove that it continues this one.")] = None,
    spark: Annotated[
        bool | None, typer.Option("--spark/--no-spark", help="Else Spark from 1,000,000 records on.")
    ] = None,
    from_export: ExportOption = None,
    conf: ConfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Certify a snapshot's order and content, or check a certificate; exit code 1 if something differs, 3 if a
    continuation is neither proved nor broken."""
    from mqlayer.archive.certify import check_hashes, judge, load_certificate

    earlier = None if continues is None else load_certificate(continues)
    if from_export is not None and spark is False:
        raise InvalidInput("--from-export is read by Spark: leave --no-spark out")
    source = _Source(export, from_export, True if from_export else spark, conf or [])
    if check is None:
        if snapshot is None or out is None:
            raise InvalidInput("say --snapshot NAME --out FILE to make a certificate, or --check FILE")
        _make(snapshot, out, key, block, earlier, source, as_json=as_json)
        return
    certificate = load_certificate(check)
    if hashes_only:
        found = check_hashes(certificate, public_key=public_key, continues=earlier)
    else:
        known = source.of_records(certificate.records)
        facts, contents = _contents(certificate.snapshot, certificate.block_records, earlier, known)
        found = judge(certificate, facts, contents, public_key=public_key, continues=earlier)
    _show(found, as_json=as_json, signer_known=public_key is not None, read=not hashes_only)
    if not found.good:
        raise typer.Exit(1)
    if found.continuation is not None and found.continuation.word == "unproven":
        raise typer.Exit(UNPROVEN)


def _make(
    name: str,
    out: Path,
    key: Path | None,
    block: int | None,
    earlier: Certificate | None,
    source: _Source,
    *,
    as_json: bool,
) -> None:
    from mqlayer.archive.certificates import BLOCK_RECORDS
    from mqlayer.archive.certify import assemble, block_size, write_whole

    size = block_size(earlier, block or BLOCK_RECORDS)
    if source.spark is None:
        with Database(settings_here().control_dsn()) as database:
            source = source.of_records(find_snapshot(database, name).records)
    facts, contents = _contents(name, size, earlier, source)
    if key is None and (usual := settings_here().certificate_key):
        key = Path(usual)
    try:
        made = assemble(facts, contents, size, earlier, key)
    except ArchiveBroken as error:
        if as_json:
            typer.echo(json_line({"job": "certify", "good": False, "snapshot": name, "error": str(error)}))
        raise
    write_whole(out, made.dump())
    if as_json:
        about = {"job": "certify", "good": made.audit.verdict == "clean", **_about(made)}
        typer.echo(json_line({**about, "continues": earlier and earlier.snapshot, "file": str(out)}))
    else:
        echo(
            f"{out} certifies {pluralize(made.records, 'record')} in {pluralize(len(made.chains), 'chain')} "
            f"of {name}; order audit: {made.audit.verdict}; {_signed(made)}"
        )
    if made.audit.verdict != "clean":
        raise typer.Exit(1)


def _contents(name: str, size: int, earlier: Certificate | None, source: _Source) -> tuple[dict[str, Any], Contents]:
    if not source.spark:
        return _plain_contents(name, size, earlier, source.parquet)
    check_spark()
    from mqlayer.spark.jobs import certify as job
    from mqlayer.spark.jobs.runner import borrowed_session

    given = spark_settings(source.conf)
    with borrowed_session("mqlayer certify", **given) as session:
        if source.parquet is not None:
            return job.export_contents(session, name, str(source.parquet), block_records=size, continues=earlier)
        dsn = settings_here().control_dsn()
        return job.snapshot_contents(
            session, name, dsn=dsn, block_records=size, continues=earlier, export=source.export
        )  # fmt: skip


def _plain_contents(
    name: str, size: int, earlier: Certificate | None, export: Path | None
) -> tuple[dict[str, Any], Contents]:
    from mqlayer.archive.certify import export_contents, snapshot_contents, snapshot_facts

    if export is not None:
        return export_contents(export, name, size, earlier)
    with Database(settings_here().control_dsn()) as database:
        found = find_snapshot(database, name)
        return snapshot_facts(found), snapshot_contents(database, found, size, earlier)


def _show(found: CertificateCheck, *, as_json: bool, signer_known: bool, read: bool) -> None:
    from mqlayer.archive.certify import describe

    follows = found.continuation
    if as_json:
        told = {
            **_about(found.certificate),
            "accepted": found.good,
            "signature_fault": found.signature,
            "differences": [one._asdict() for one in found.differences[:MAX_SHOWN]],
            "difference_count": len(found.differences),
            "continuation": follows and follows.word,
            "compared": follows and follows.compared,
        }
        typer.echo(json_line(told))
        return
    for one in found.differences[:MAX_SHOWN]:
        echo(describe(one))
    if len(found.differences) > MAX_SHOWN:
        echo(f"{len(found.differences) - MAX_SHOWN} more differences")
    if found.signature is not None:
        echo(f"signature: {found.signature}")
    if follows is not None:
        for one in follows.broken[:MAX_SHOWN]:
            echo(describe(one))
        echo(
            f"continuation: {follows.word}; {pluralize(follows.compared, 'record')} compared, "
            f"{pluralize(follows.gone, 'chain')} gone, {pluralize(follows.open, 'chain')} open at the end"
        )
    certificate = found.certificate
    word = "accepted" if found.good else "not accepted"
    how = "" if read else "; no record was read"
    signed = _signed(certificate)
    if certificate.signature is not None and not signer_known and found.signature is None:
        signed += ", which --public-key compares with the signer's"
    echo(
        f"certificate of {certificate.snapshot}: {word}; {pluralize(certificate.records, 'record')}, "
        f"order audit: {certificate.audit.verdict}; {signed}{how}"
    )


def _about(certificate: Certificate) -> dict[str, Any]:
    return {
        "snapshot": certificate.snapshot,
        "records": certificate.records,
        "chains": len(certificate.chains),
        "audit": certificate.audit.verdict,
        "digest": certificate.digest,
        "signed": certificate.signature is not None,
    }


def _signed(certificate: Certificate) -> str:
    from mqlayer.archive.signatures import key_name

    return "not signed" if certificate.signature is None else f"signed by {key_name(certificate.signature)}"


def _plain_records() -> int:
    from mqlayer.archive.certify import PLAIN_RECORDS

    return PLAIN_RECORDS
