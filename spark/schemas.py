"""Declared columns as Spark types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

TYPES: Final[Mapping[str, DataType]] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "binary": BinaryType(),
    "array<string>": ArrayType(StringType()),
    "array<int>": ArrayType(IntegerType()),
    "map<string,string>": MapType(StringType(), StringType()),
}


def declared(columns: Mapping[str, str]) -> StructType:
    """Return their schema."""
    return StructType([StructField(name, TYPES[word]) for name, word in columns.items()])
