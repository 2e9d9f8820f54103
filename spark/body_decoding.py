"""Columns from bodies."""

# Spark reads JSON itself; a codec runs in Python workers, and its result is read as JSON by the same rules.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructType

from mqlayer.domain.body_schemas import JsonSchema
from mqlayer.domain.codecs import Codec, encode_body
from mqlayer.domain.large_bodies import BODY_HEADER
from mqlayer.domain.schema_versions import versions_that_hold
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.spark.body_types import BodyShape, ShapeField, body_shape
from mqlayer.topics.schemas import load_schemas

if TYPE_CHECKING:
    from mqlayer.typed_topic import Topic

NEEDED: Final = ("topic", "headers", "body")
DECODED: Final = "decoded"
ERROR: Final = "decode_error"
_CORRUPT: Final = "mq:corrupt"
_WORK: Final = ("mq:text", "mq:refused", "mq:parsed", "mq:error")
_OPTIONS: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _CORRUPT,
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}


@dataclass(frozen=True)
class BodyDecoding:
    """How to read a topic's bodies."""

    topic: str
    shape: BodyShape
    codec: Codec[Any] | None = None
    strict: bool = False


def decode_bodies(
    frame: DataFrame, topic: str | Topic[Any], *, dsn: str | None = None, strict: bool = False
) -> DataFrame:
    """Return a topic's records with the columns `decoded` and `decode_error`.

    `frame` needs topic, headers and body. `topic`: a name, for all stored versions' fields (`dsn`: default
    MQLAYER_DSN), or a `mqlayer.Topic`, for its own fields and codec. `strict`: misfits fail the reading job.

    Raises InvalidInput without a schema of objects, NotFound.
    """
    if isinstance(topic, str):
        with Database(dsn or Settings().control_dsn()) as database:
            decoding = BodyDecoding(topic, body_shape(topic, stored_versions(database, topic)), strict=strict)
    else:
        decoding = typed_decoding(topic, strict=strict)
    return decoded_frame(frame, decoding)


def stored_versions(database: Database, topic: str) -> list[JsonSchema]:
    """Return a topic's schemas that hold. Raises NotFound."""
    return [one.schema for one in versions_that_hold(load_schemas(database, topic).versions)]


def typed_decoding(topic: Topic[Any], *, strict: bool = False) -> BodyDecoding:
    """Return a typed topic's decoding. Raises InvalidInput without a schema."""
    if topic.schema is None:
        raise InvalidInput(
            f"topic {topic.name!r} has no schema, so its bodies have no columns: give its codec json_schema()"
        )
    return BodyDecoding(topic.name, body_shape(topic.name, [topic.schema]), topic.codec, strict)


def decoded_frame(frame: DataFrame, decoding: BodyDecoding) -> DataFrame:
    """Return the topic's decoded rows. Raises InvalidInput for missing columns."""
    if missing := [name for name in NEEDED if name not in frame.columns]:
        raise InvalidInput(f"decoding needs the columns {', '.join(NEEDED)}: read {', '.join(missing)} too")
    rows = frame.filter(F.col("topic") == decoding.topic)
    if decoding.codec is None:
        rows = rows.withColumns({"mq:text": F.col("body").cast("string"), "mq:refused": F.lit(None).cast("string")})
    else:
        read = F.udf(
            _CodecCall(decoding.codec), "struct<text:string,refused:string>", useArrow=False
        ).asNondeterministic()
        rows = rows.withColumn("mq:parsed", F.when(_reference().isNull(), read("body")))
        rows = rows.withColumns({name: F.col(f"`mq:parsed`.{name[3:]}") for name in ("mq:text", "mq:refused")})
    schema = decoding.shape.schema().add(_CORRUPT, StringType())
    rows = rows.withColumn("mq:parsed", F.from_json("`mq:text`", schema, _OPTIONS))
    rows = rows.withColumn("mq:error", _error(decoding.shape))
    fields = F.struct(*map(_filled, decoding.shape.fields))
    fitting = F.when(F.col("`mq:error`").isNull(), fields)
    if decoding.strict:
        return rows.withColumn(DECODED, fitting.otherwise(F.raise_error(_told(frame)))).drop(*_WORK)
    return rows.withColumns({DECODED: fitting, ERROR: F.col("`mq:error`")}).drop(*_WORK)


class _CodecCall:
    """A codec for workers."""

    def __init__(self, codec: Codec[Any]) -> None:
        self._codec = codec

    def __call__(self, body: bytes) -> tuple[str | None, str | None]:
        # An error's text may show the body.
        try:
            return encode_body(self._codec.decode(bytes(body))).decode(), None
        except Exception as error:  # noqa: BLE001 - a codec may raise any
            return None, f"{type(self._codec).__name__} raised {type(error).__name__}"


def _reference() -> Column:
    return F.try_element_at("headers", F.lit(BODY_HEADER))


def _error(shape: BodyShape) -> Column:
    text, parsed = F.col("`mq:text`"), F.col("`mq:parsed`")
    size = F.split_part(_reference(), F.lit(":"), F.lit(2))
    found = (
        F.when(_reference().isNotNull(), F.concat(F.lit("a large body of "), size, F.lit(" bytes, which is elsewhere")))
        .when(F.col("`mq:refused`").isNotNull(), F.col("`mq:refused`"))
        .when(F.length("body") == 0, F.lit("it is empty"))
        .when(~F.is_valid_utf8(text), F.lit("it is not UTF-8"))
        .when(parsed.isNull() | ~F.rlike(text, F.lit(r"^\s*\{")), F.lit("it is no JSON object"))
        .when(parsed[_CORRUPT].isNotNull() & F.try_parse_json(text).isNull(), F.lit("it is not JSON"))
        .when(parsed[_CORRUPT].isNotNull(), F.coalesce(*_misfits(shape), F.lit("a value does not fit")))
    )
    for one in shape.fields:
        if one.required:
            found = found.when(parsed[one.name].isNull(), F.lit(f"missing, or null, at `$.{one.name}`"))
    return found


def _misfits(shape: BodyShape) -> list[Column]:
    """The first misfit."""
    text, parsed = F.col("`mq:text`"), F.col("`mq:parsed`")
    return [
        F.when(
            parsed[one.name].isNull() & F.get_json_object(text, f"$['{one.name}']").isNotNull(),
            F.lit(f"no {one.type.simpleString()} at `$.{one.name}`"),
        )
        for one in shape.fields
        if "'" not in one.name
    ]


def _filled(one: ShapeField) -> Column:
    value = F.col("`mq:parsed`")[one.name]
    return (value if one.default is None else F.coalesce(value, _literal(one))).alias(one.name)


def _literal(one: ShapeField) -> Column:
    if isinstance(one.type, StructType | ArrayType | MapType):
        return F.from_json(F.lit(json.dumps(one.default)), one.type)
    if isinstance(one.type, StringType) and not isinstance(one.default, str):
        return F.lit(json.dumps(one.default))
    found = F.lit(one.default)
    return F.unbase64(found) if isinstance(one.type, BinaryType) else found.cast(one.type)


def _told(frame: DataFrame) -> Column:
    places: Sequence[str] = [name for name in ("partition", "offset") if name in frame.columns]
    parts = [F.lit("a body does not fit: topic "), F.col("topic")]
    for name in places:
        parts += [F.lit(f", {name} "), F.col(f"`{name}`").cast("string")]
    return F.concat(*parts, F.lit(": "), F.col("`mq:error`"))
