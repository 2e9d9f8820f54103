"""The order audit: is a snapshot the promised unbroken chain?

docs/how-to/analyze.md explains its findings. Each topic, source and LP is checked by seq (*gap*, *duplicate*), and by
lineage: parents wholly before successors, then batch and offset (*inversion*). Each record is checked against its key
and partition (*misplaced*).

One partition serves an LP at a time, so the order of their first versions is the lineage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F  # noqa: N812

from mqlayer.spark.transforms.lp import lp_of_key

KINDS: Final = ("inversion", "gap", "duplicate", "misplaced")
CHAIN: Final = ("topic", "source", "lp")
# Offsets alone don't order a partition: a node that fell back assigns them again, but in later batches.
PLACE: Final = ("born", "partition", "batch", "offset")
POSITION: Final = "struct<seq:bigint,partition:int,offset:bigint>"
FINDING: Final = (
    "struct<kind:string,key:string,first_seq:bigint,last_seq:bigint,partition:int,offset:bigint,"
    "behind_seq:bigint,behind_partition:int,behind_offset:bigint,reason:string>"
)
"""`first_seq`, `last_seq`: affected, or missing. `partition`, `offset`: the record, or the one behind the gap.
`behind_*`: the record that it contradicts, or before the gap."""

KEY_BROKEN: Final = "order of the key"
LP_BROKEN: Final = "order of the LP, not of a key"


def audited(records: DataFrame, lineage: DataFrame, cut: DataFrame | None = None) -> DataFrame:
    """Return records with `findings`, and a row per end of the cut.

    `cut`: first and last seq per topic, source and LP; without it, missing ends of chains go unnoticed. One shuffle.
    """
    placed = _placed(records, lineage)
    rows = placed if cut is None else placed.unionByName(_ends(cut), allowMissingColumns=True)
    by_seq = Window.partitionBy(*CHAIN).orderBy("seq", *PLACE)
    by_place = Window.partitionBy(*CHAIN).orderBy(*PLACE)
    by_key = Window.partitionBy(*CHAIN, "key").orderBy(*PLACE)
    position = F.struct("seq", "partition", "offset")
    rows = rows.withColumn("last", F.lag(position).over(by_seq)).withColumn("last_is_end", F.lag("is_end").over(by_seq))
    rows = rows.withColumn("again", ~F.col("is_end") & ~F.col("last_is_end") & (F.col("seq") == F.col("last.seq")))
    rows = rows.withColumn("again", F.coalesce("again", F.lit(False)))
    # Duplicates, and records outside the lineage, are findings of other kinds; they have no turn.
    turn = F.when(~F.col("is_end") & ~F.col("again") & F.col("in_place"), position)
    rows = rows.withColumn("turn", turn)
    rows = rows.withColumn("before", _latest(by_place)).withColumn("before_of_key", _latest(by_key))
    return rows.withColumn("key_begins", F.row_number().over(by_key) == 1).withColumn("findings", _findings())


def chains(found: DataFrame) -> DataFrame:
    """Return per topic, source and LP: records, keys, seqs, findings by kind."""
    real = ~F.col("is_end")
    counts = [F.sum(F.size(F.filter("findings", _is_of(kind)))).cast("bigint").alias(_plural(kind)) for kind in KINDS]
    return found.groupBy(*CHAIN).agg(
        F.count(F.when(real, 1)).alias("records"),
        F.count(F.when(real & F.col("key_begins") & F.col("key").isNotNull(), 1)).alias("keys"),
        F.min(F.when(real, F.col("seq"))).alias("first_seq"),
        F.max(F.when(real, F.col("seq"))).alias("last_seq"),
        *counts,
    )


def findings(found: DataFrame) -> DataFrame:
    """Return a row per finding."""
    rows = found.filter(F.size("findings") > 0).select(*CHAIN, F.explode("findings").alias("finding"))
    return rows.select("topic", "finding.kind", "finding.key", "source", "lp", *_FIELDS)


def by_key(found: DataFrame) -> DataFrame:
    """Return findings per topic and key; gaps have no key."""
    counts = [F.count(F.when(F.col("kind") == kind, 1)).alias(_plural(kind)) for kind in KINDS if kind != "gap"]
    return found.filter(F.col("key").isNotNull()).groupBy("topic", "key").agg(*counts)


def totals(per_chain: DataFrame) -> DataFrame:
    """Return sums of `chains` per topic."""
    sums = [F.sum(name).cast("bigint").alias(name) for name in ("records", "keys", *map(_plural, KINDS))]
    return per_chain.groupBy("topic").agg(F.count("*").alias("chains"), *sums)


def clean(total: Mapping[str, int]) -> bool:
    """Whether totals have no finding."""
    return not any(total[_plural(kind)] for kind in KINDS)


_FIELDS: Final = tuple(
    f"finding.{name}"
    for name in (
        "first_seq", "last_seq", "partition", "offset", "behind_seq", "behind_partition", "behind_offset", "reason",
    )
)  # fmt: skip


def _plural(kind: str) -> str:
    return "misplaced" if kind == "misplaced" else f"{kind}s"


def _is_of(kind: str) -> Callable[[Column], Column]:
    return lambda finding: finding["kind"] == kind


def _placed(records: DataFrame, lineage: DataFrame) -> DataFrame:
    ranges = lineage.select("topic", "partition", "lp_from", "lp_to", F.col("first_version").alias("born"))
    rows = records.select("topic", "partition", "batch", "offset", "source", "lp", "seq", "key")
    rows = rows.join(F.broadcast(ranges), ["topic", "partition"], "left")
    served = (F.col("lp") >= F.col("lp_from")) & (F.col("lp") < F.col("lp_to"))
    return rows.select(
        *(name for name in rows.columns if name not in ("lp_from", "lp_to")),
        F.coalesce(served, F.lit(False)).alias("in_place"),
        _misplaced(served).alias("misplaced"),
        F.lit(False).alias("is_end"),
    )


def _misplaced(served: Column) -> Column:
    # Empty for a record in place.
    key_lp = lp_of_key(F.col("key"))
    return F.concat_ws(
        "; ",
        F.when(key_lp != F.col("lp"), F.concat(F.lit("its key's LP is "), key_lp.cast("string"))),
        F.when(F.col("born").isNull(), F.lit("its partition is not in the lineage")),
        F.when(
            ~served,
            F.format_string("its partition serves LPs [%d, %d)", F.col("lp_from"), F.col("lp_to")),
        ),
    )


def _ends(cut: DataFrame) -> DataFrame:
    # Rows beyond the first and last seq of each chain: missing ends become gaps.
    ends = F.explode(F.array(F.col("first_seq") - 1, F.col("last_seq") + 1)).alias("seq")
    return cut.select(
        *CHAIN,
        ends,
        F.lit(False).alias("in_place"),
        F.lit("").alias("misplaced"),
        F.lit(True).alias("is_end"),
    )


def _latest(window: WindowSpec) -> Column:
    # The last earlier record with a turn.
    return F.last("turn", ignorenulls=True).over(window.rowsBetween(Window.unboundedPreceding, -1))


def _findings() -> Column:
    real, seq = ~F.col("is_end"), F.col("seq")
    key_broken = F.col("key").isNotNull() & F.col("turn").isNotNull() & (seq < F.col("before_of_key.seq"))
    lp_broken = F.col("turn").isNotNull() & (seq < F.col("before.seq"))
    each = [
        F.when(key_broken, _finding("inversion", behind="before_of_key", reason=F.lit(KEY_BROKEN))).when(
            lp_broken, _finding("inversion", behind="before", reason=F.lit(LP_BROKEN))
        ),
        F.when(seq - F.col("last.seq") > 1, _gap()),
        F.when(F.col("again"), _finding("duplicate", behind="last", reason=F.lit(None))),
        F.when(real & (F.col("misplaced") != ""), _finding("misplaced", behind=None, reason=F.col("misplaced"))),
    ]
    return F.filter(F.array(*each), lambda finding: finding.isNotNull())


def _finding(kind: str, *, behind: str | None, reason: Column) -> Column:
    front = F.lit(None).cast(POSITION) if behind is None else F.col(behind)
    facts = (F.lit(kind), F.col("key"), F.col("seq"), F.col("seq"), F.col("partition"), F.col("offset"))
    return F.struct(*facts, front["seq"], front["partition"], front["offset"], reason).cast(FINDING)


def _gap() -> Column:
    # The ends of a cut are no records.
    front = F.when(~F.col("last_is_end"), F.col("last"))
    facts = (F.lit("gap"), F.lit(None), F.col("last.seq") + 1, F.col("seq") - 1, F.col("partition"), F.col("offset"))
    return F.struct(*facts, front["seq"], front["partition"], front["offset"], F.lit(None)).cast(FINDING)
