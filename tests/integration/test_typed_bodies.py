"""Bodies as columns in Spark: by a topic's schema and its versions, by a codec, of snapshots, exports and streams."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import mqlayer
from mqlayer.archive import create_snapshot
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.domain.body_schemas import normalized, schema_of
from mqlayer.errors import InvalidInput
from mqlayer.postgres.rights import Right
from mqlayer.topics.schemas import store_schema
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.roles import role_dsn
from tests.proof.runtimes import runtime_of

import_or_leave_out("pyspark")


class First(msgspec.Struct):
    customer: str
    amount: int


class Second(msgspec.Struct):
    """A field more, with a default, and one that may be left out."""

    customer: str
    amount: int
    pieces: int = 1
    coupon: str | None = None


class Third(msgspec.Struct):
    """A wider field, one of a time, and one without `coupon`."""

    customer: str
    amount: float
    pieces: int = 1
    at: dt.datetime | None = None


BODIES = {
    "v1": b'{"customer":"ann","amount":10}',
    "v2": b'{"customer":"ann","amount":20,"pieces":2,"coupon":"C"}',
    "v3": b'{"customer":"ann","amount":2.5,"pieces":3,"at":"2026-11-21T10:00:00Z","new":true}',
    "wrong": b'{"customer":"ann","amount":"secret"}',
    "short": b'{"customer":"ann"}',
    "cut": b'{"customer":"secr',
    "bytes": b"\xff\xfe",
    "list": b'[{"customer":"ann","amount":10}]',
    "empty": b"",
}
TRUTH = {
    "v1": ("ann", 10.0, 1, None, None),
    "v2": ("ann", 20.0, 2, "C", None),
    "v3": ("ann", 2.5, 3, None, dt.datetime(2026, 11, 21, 10, 0)),  # noqa: DTZ001 - as Spark's rows have it
}
ERRORS = {
    "wrong": "no double at `$.amount`",
    "short": "missing, or null, at `$.amount`",
    "cut": "it is not JSON",
    "bytes": "it is not UTF-8",
    "list": "it is no JSON object",
    "empty": "it is empty",
    "large": "a large body of 30000 bytes, which is elsewhere",
}


@pytest.fixture
def typed(archived: ArchivedTopics) -> ArchivedTopics:
    """A topic whose schema has three versions, with a body of each, bad bodies, and the snapshot `s`."""
    for body in (First, Second, Third):
        store_schema(archived.database, "orders", schema(body), actor="test")
    for key, data in BODIES.items():
        archived.put(key, body=data)
    reference = f"3f0b1f38-2a5b-4b0e-9d57-9a6a2a4f3a10:30000:{'0' * 64}"
    archived.put("large", body=b"", headers=json.dumps({"mq-body": reference}))
    create_snapshot(runtime_of(archived.database), "s")
    return archived


def schema(body: Any) -> dict[str, Any]:
    found = schema_of(body)
    assert found is not None
    return normalized(found)


def values(rows: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the decoded bodies, and the errors, by key."""
    good = {row.key: row.decoded for row in rows if row.decode_error is None}
    return good, {row.key: row.decode_error for row in rows if row.decode_error is not None}


def test_bodies_of_all_versions_are_columns_and_bad_ones_have_an_error(spark: Any, typed: ArchivedTopics) -> None:
    """Invariant of the truth above, computed by hand; read as the role that may analyze, and no more."""
    from mqlayer.spark import read_snapshot

    dsn = role_dsn(typed.dsn, Right.ANALYZE)
    frame = read_snapshot(spark, "s", dsn=dsn, method="python", columns=["key"], decode=True, partitions=1)
    assert frame.columns == ["key", "decoded", "decode_error"]
    fields_of: Any = frame.schema["decoded"].dataType
    kinds = {one.name: one.dataType.simpleString() for one in fields_of}
    assert kinds == {
        "customer": "string", "amount": "double", "pieces": "bigint", "coupon": "string", "at": "timestamp",
    }  # fmt: skip
    good, bad = values(frame.collect())
    fields = ("customer", "amount", "pieces", "coupon", "at")
    assert {key: tuple(row[name] for name in fields) for key, row in good.items()} == TRUTH
    assert bad == ERRORS
    assert "secret" not in str(bad)


@pytest.mark.full
def test_an_export_has_its_schemas_with_it(spark: Any, typed: ArchivedTopics, tmp_path: Path) -> None:
    from mqlayer.spark import read_export, read_snapshot

    export_snapshot(runtime_of(typed.database), "s", tmp_path / "out")
    options: Any = {"columns": ["key"], "decode": True}
    found = read_export(spark, "s", str(tmp_path / "out"), **options)
    there = read_snapshot(spark, "s", dsn=typed.dsn, method="python", **options)
    assert found.schema == there.schema
    assert sorted(map(str, found.collect())) == sorted(map(str, there.collect()))


@pytest.mark.full
def test_a_strict_reading_fails_where_a_body_does_not_fit(spark: Any, typed: ArchivedTopics) -> None:
    from pyspark.errors import PySparkException

    from mqlayer.spark import read_snapshot

    options: Any = {"dsn": typed.dsn, "method": "python", "decode": "orders", "strict": True}
    frame = read_snapshot(spark, "s", columns=["key"], **options)
    assert frame.columns == ["key", "decoded"]
    assert [row.decoded.amount for row in frame.where("key = 'v2'").collect()] == [20.0]
    with pytest.raises(PySparkException, match=r"topic orders, partition \d+, offset 4: no double at `\$.amount`"):
        frame.where("key = 'wrong'").collect()


class Lines:
    """Orders as `customer,amount`."""

    def encode(self, order: First) -> bytes:
        return f"{order.customer},{order.amount}".encode()

    def decode(self, data: bytes) -> First:
        customer, amount = data.decode().rsplit(",", 1)
        return First(customer, int(amount))

    def json_schema(self) -> dict[str, Any]:
        return schema(First)


@pytest.mark.full
def test_a_codec_reads_the_bodies_of_its_topic(spark: Any, archived: ArchivedTopics) -> None:
    from mqlayer.spark import read_snapshot

    archived.topic("invoices")
    archived.put("good", body=b"ann,10")
    archived.put("bad", body=b"ann,secret")
    archived.put("other", topic="invoices")
    create_snapshot(runtime_of(archived.database), "s")
    orders = mqlayer.Topic("orders", body=First, codec=Lines())
    good, bad = values(read_snapshot(spark, "s", dsn=archived.dsn, method="python", decode=orders).collect())
    assert {key: (row.customer, row.amount) for key, row in good.items()} == {"good": ("ann", 10)}
    assert bad == {"bad": "Lines raised ValueError"}


@pytest.mark.full
def test_a_stream_has_the_same_columns(spark: Any, typed: ArchivedTopics, tmp_path: Path) -> None:
    from mqlayer.spark import decode_bodies, register

    register(spark, dsn=typed.dsn)
    grown = spark.readStream.format("mqlayer").option("topics", "orders").load()
    decoded = decode_bodies(grown, "orders", dsn=typed.dsn).select("key", "decoded", "decode_error")
    query = (
        decoded.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        .option("path", str(tmp_path / "sink")).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    found = spark.read.parquet(str(tmp_path / "sink")).collect()
    good, bad = values(found)
    assert {key: row.amount for key, row in good.items()} == {key: row[1] for key, row in TRUTH.items()}
    assert bad == ERRORS


@pytest.mark.full
def test_what_has_no_columns_is_refused(spark: Any, archived: ArchivedTopics) -> None:
    from mqlayer.spark import decode_bodies, read_snapshot

    archived.topic("invoices")
    archived.put("a")
    archived.put("a", topic="invoices")
    create_snapshot(runtime_of(archived.database), "s")
    store_schema(archived.database, "invoices", schema(list[int]), actor="test")
    for options, text in (
        ({"decode": True}, "has topics invoices, orders; name one"),
        ({"decode": "orders"}, "topic 'orders' has no schema"),
        ({"decode": "invoices"}, "bodies of topic 'invoices' are no objects"),
        ({"decode": "payments"}, "has no topic 'payments'"),
        ({"decode": mqlayer.Topic("payments", body=First)}, "has no topic 'payments'"),
        ({"decode": mqlayer.Topic("orders", body=bytes)}, "topic 'orders' has no schema"),
        ({"decode": True, "table": "outcomes"}, "outcomes have no bodies"),
        ({"strict": True}, "strict goes with decode"),
    ):
        with pytest.raises(InvalidInput, match=text):
            read_snapshot(spark, "s", dsn=archived.dsn, method="python", **options)
    frame = read_snapshot(spark, "s", dsn=archived.dsn, method="python", columns=["topic", "body"])
    with pytest.raises(InvalidInput, match="read headers too"):
        decode_bodies(frame, mqlayer.Topic("orders", body=First))


def test_types_are_those_of_the_schema() -> None:
    """A union, an object that holds itself and a tuple have no type in Spark: their JSON comes as text."""
    from mqlayer.spark.body_types import body_shape

    integer, text, null = {"type": "integer"}, {"type": "string"}, {"type": "null"}
    inner = {"type": "object", "properties": {"x": integer, "y": {"anyOf": [integer, null]}}, "required": ["x", "y"]}
    tree = {"type": "object", "properties": {"of": {"$ref": "#/$defs/tree"}, "v": integer}}
    root = {
        "type": "object",
        "$defs": {"tree": tree, "inner": inner},
        "required": ["i", "n"],
        "properties": {
            "i": integer,
            "n": {"anyOf": [integer, null]},
            "d": {"type": "string", "format": "date", "default": "2026-11-21"},
            "raw": {"type": "string", "contentEncoding": "base64"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/inner"}},
            "map": {"type": "object", "additionalProperties": {"type": "number"}},
            "enum": {"enum": [1, 2]},
            "union": {"anyOf": [integer, text]},
            "wide": {"anyOf": [integer, {"type": "number"}]},
            "tree": {"$ref": "#/$defs/tree"},
            "tuple": {"type": "array", "prefixItems": [integer, text]},
            "any": {},
        },
    }
    fields = {one.name: one for one in body_shape("orders", [root]).fields}
    assert {name: one.type.simpleString() for name, one in fields.items()} == {
        "i": "bigint", "n": "bigint", "d": "date", "raw": "binary", "list": "array<struct<x:bigint,y:bigint>>",
        "map": "map<string,double>", "enum": "bigint", "union": "string", "wide": "double",
        "tree": "struct<of:string,v:bigint>", "tuple": "string", "any": "string",
    }  # fmt: skip
    assert [name for name, one in fields.items() if one.required] == ["i"]
    assert [name for name, one in fields.items() if one.default is not None] == ["d"]
