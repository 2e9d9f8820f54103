"""Hashes of records and blocks: `docs/design/certificates.md`. Spark's own functions, one pass over bodies."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

DAY_US: Final = 86_400_000_000
PLACE_COLUMNS: Final = ("topic", "partition", "batch", "offset", "source", "lp", "seq", "key")
NUMBERS: Final = ("source", "lp", "seq", "version", "partition", "offset", "batch")


def hashed(records: DataFrame) -> DataFrame:
    """Return places, days and hashes of whole records."""
    day = F.floor(F.unix_micros("archived_at") / F.lit(DAY_US)).cast("int")
    return records.select(*PLACE_COLUMNS, day.alias("day"), F.unhex(record_hash()).alias("hash"))


def record_hash() -> Column:
    """Return a record's hash."""
    numbers = [F.col(name).cast("string") for name in NUMBERS]
    times = [F.unix_micros(name).cast("string") for name in ("published_at", "archived_at")]
    told = F.concat(
        F.concat_ws(",", *numbers, *times),
        F.lit(","),
        _field(F.col("key")),
        _tags(F.col("tags")),
        _headers(F.col("headers")),
        F.octet_length("body").cast("string"),
        F.lit(":"),
    )
    return F.sha2(F.concat(F.encode(told, "UTF-8"), F.col("body")), 256)


def blocks(rows: DataFrame, size: int, ends: DataFrame | None = None) -> DataFrame:
    """Return per topic, source, LP, day and `size` seqs: first and last seq, records, hash; and `seam`.

    `ends`: topic, source, lp, end; a block that goes on behind its chain's end has the hash up to there as seam. A
    group's rows are at most `size`, unless seqs stand twice.
    """
    number = F.floor((F.col("seq") - 1) / F.lit(size))
    grouped = rows.groupBy("topic", "source", "lp", "day", number.alias("number")).agg(
        F.array_sort(F.collect_list(F.struct("seq", "hash"))).alias("members")
    )
    if ends is None:
        grouped = grouped.withColumn("end", F.lit(0).cast("bigint"))
    else:
        grouped = grouped.join(F.broadcast(ends), ["topic", "source", "lp"], "left")
    first, last = F.element_at("members", 1)["seq"], F.element_at("members", -1)["seq"]
    before = F.filter("members", lambda member: member["seq"] <= F.col("end"))
    return grouped.select(
        "topic",
        "source",
        "lp",
        first.alias("first_seq"),
        last.alias("last_seq"),
        F.size("members").alias("records"),
        _joined(F.col("members")).alias("hash"),
        F.when((first <= F.col("end")) & (F.col("end") < last), _joined(before)).alias("seam"),
    )


def _joined(members: Column) -> Column:
    digits = F.transform(members["hash"], lambda one: F.lower(F.hex(one)))
    return F.sha2(F.array_join(digits, "").cast("binary"), 256)


def _field(value: Column) -> Column:
    return F.coalesce(F.concat(F.octet_length(value).cast("string"), F.lit(":"), value), F.lit("-"))


def _tags(value: Column) -> Column:
    told = F.concat(F.size(value).cast("string"), F.lit("["), F.array_join(F.transform(value, _field), ""))
    return F.when(value.isNull(), F.lit("-")).otherwise(told)


def _headers(value: Column) -> Column:
    pairs = F.array_sort(F.map_entries(value))
    each = F.transform(pairs, lambda pair: F.concat(_field(pair["key"]), _field(pair["value"])))
    told = F.concat(F.size(value).cast("string"), F.lit("{"), F.array_join(each, ""))
    return F.when(value.isNull(), F.lit("-")).otherwise(told)
