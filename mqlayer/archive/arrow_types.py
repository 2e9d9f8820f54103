"""Convert Arrow batches into declared columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

try:
    import pyarrow as pa
except ModuleNotFoundError as error:
    raise ImportError("exports need more packages: pip install 'mqlayer[parquet]'", name=error.name) from error

TYPES: Final[Mapping[str, pa.DataType]] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
    "array<string>": pa.list_(pa.field("element", pa.string())),
    "array<int>": pa.list_(pa.field("element", pa.int32())),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}


def arrow_schema(columns: Mapping[str, str]) -> pa.Schema:
    """Return the columns' Arrow schema."""
    return pa.schema([pa.field(name, TYPES[word]) for name, word in columns.items()])


def formed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with this schema."""
    return pa.RecordBatch.from_arrays([_column(batch.column(field.name), field) for field in schema], schema=schema)


def _column(column: pa.Array, field: pa.Field) -> pa.Array:
    if pa.types.is_map(field.type):
        return _maps(column, field.type)
    return column if column.type == field.type else column.cast(field.type)


def _maps(texts: pa.Array, wanted: pa.DataType) -> pa.Array:
    coded = texts.dictionary_encode()
    parsed: list[list[tuple[str, Any]]] = [list(json.loads(text).items()) for text in coded.dictionary.to_pylist()]
    return pa.array(parsed, type=wanted).take(coded.indices)
