"""The order audit; docs/how-to/analyze.md explains findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql import DataFrame

from mqlayer.spark.html_report import Note, Part, Section, Table, Tile, Tiles
from mqlayer.spark.jobs.job import JobParams, JobResult, SnapshotTables, rows_of
from mqlayer.spark.transforms import order

MAX_SHOWN: Final = 200
COUNTS: Final = ("inversions", "gaps", "duplicates", "misplaced")


def run(tables: SnapshotTables, _params: JobParams) -> JobResult:
    """Audit all topics; faults need a second pass."""
    looked = order.audited(tables.records, tables.lineage, tables.cut)
    chains = order.chains(looked).persist()
    topics = rows_of(order.totals(chains), "topic")
    frames: dict[str, DataFrame] = {"chains": chains}
    good = all(order.clean(topic) for topic in topics)
    found: list[dict[str, Any]] = []
    if not good:
        frames["findings"] = order.findings(looked).persist()
        frames["keys"] = order.by_key(frames["findings"]).persist()
        found = rows_of(frames["findings"], "topic", "source", "lp", "first_seq", "kind", most=MAX_SHOWN)
    names = ("records", "chains", "keys", *COUNTS)
    sums = {name: sum(topic[name] for topic in topics) for name in names}
    word = "clean" if good else "not clean"
    facts = {"verdict": word, **sums, "topics": topics, "findings": found}
    told = [_describe(one) for one in found]
    shown = {"audit": topics, "findings": told}
    section = Section("audit", "Order audit", _parts(sums, topics, told, good=good, whole=tables.cut is not None))
    return JobResult("audit", facts, shown, section, frames, good)


def _describe(found: Mapping[str, Any]) -> dict[str, Any]:
    seqs = {found["first_seq"], found["last_seq"]}
    behind = None if found["behind_seq"] is None else f"{found['behind_seq']} at {_place(found, 'behind_')}"
    return {
        "topic": found["topic"],
        "finding": found["kind"],
        "key": found["key"],
        "source": found["source"],
        "lp": found["lp"],
        "seq": " to ".join(map(str, sorted(seqs))),
        "at": _place(found, ""),
        "behind": behind,
        "why": found["reason"],
    }


def _place(found: Mapping[str, Any], which: str) -> str | None:
    partition, offset = found[f"{which}partition"], found[f"{which}offset"]
    return None if partition is None else f"{partition}:{offset}"


def _parts(
    sums: Mapping[str, int],
    topics: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
    *,
    good: bool,
    whole: bool,
) -> list[Part]:
    word = "Clean: every record is in order, once, and in its place." if good else "Not clean: see the findings below."
    tiles = [Tile(name, f"{sums[name]:,}") for name in ("records", "chains")]
    tiles += [Tile(name, f"{sums[name]:,}", "bad" if sums[name] else "good") for name in COUNTS]
    bound = "" if whole else " The cut is not known: what is missing at either end of a chain was not noticed."
    explained = (
        "Each record's LP was computed anew from its key, by Spark's SHA-256. A chain is what a source published in "
        "an LP, read in the order of the lineage: parents wholly before successors, then by batch and offset." + bound
    )
    return [
        Note(f"✓ {word}" if good else f"✗ {word}", "good" if good else "bad"),
        Note(explained),
        Tiles(tiles),
        Table("Topics", topics, "the snapshot holds no record"),
        Table("Findings; places are partition:offset", found, "none"),
    ]


if __name__ == "__main__":
    import sys

    from mqlayer.spark.jobs.runner import submit

    sys.exit(submit("audit"))
