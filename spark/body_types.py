"""Spark's types for bodies; types unknown to Spark become their JSON's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from mqlayer.domain.body_schemas import JsonSchema
from mqlayer.errors import InvalidInput

_PLAIN: Final[Mapping[str, DataType]] = {
    "boolean": BooleanType(),
    "integer": LongType(),
    "number": DoubleType(),
}
_FORMATS: Final[Mapping[str, DataType]] = {"date-time": TimestampType(), "date": DateType()}
_DEFINED: Final = "#/$defs/"


@dataclass(frozen=True, slots=True)
class ShapeField:
    """A field; `required`: by each version."""

    name: str
    type: DataType
    required: bool
    default: Any = None


@dataclass(frozen=True, slots=True)
class BodyShape:
    """A body's fields."""

    fields: tuple[ShapeField, ...]

    def schema(self) -> StructType:
        """Return them as a struct."""
        found = StructType()
        for one in self.fields:
            found.add(one.name, one.type)
        return found


def body_shape(topic: str, versions: Sequence[JsonSchema]) -> BodyShape:
    """Return all versions' fields. Raises InvalidInput unless bodies are objects."""
    if not versions:
        raise InvalidInput(
            f"topic {topic!r} has no schema: start a typed consumer, or store one with mqlayer topic schema {topic} "
            "--store MODULE:TOPIC, or give a mqlayer.Topic"
        )
    found: dict[str, ShapeField] = {}
    for number, version in enumerate(versions):
        types = _Types(version)
        plain = list(types.alternatives(version))
        if not plain or not all("properties" in one for one in plain):
            raise InvalidInput(f"bodies of topic {topic!r} are no objects with fields, so they have no columns")
        fields = _fields_of(types, plain)
        for name in found.keys() - fields.keys():
            found[name] = _optional(found[name])
        for name, one in fields.items():
            before = found.get(name)
            found[name] = (_optional(one) if number else one) if before is None else _both(before, one)
    return BodyShape(tuple(found.values()))


def merged(one: DataType, other: DataType) -> DataType:
    """Return both types' common one."""
    if one == other:
        return one
    if isinstance(one, LongType | DoubleType) and isinstance(other, LongType | DoubleType):
        return DoubleType()
    if isinstance(one, ArrayType) and isinstance(other, ArrayType):
        return ArrayType(merged(one.elementType, other.elementType))
    if isinstance(one, MapType) and isinstance(other, MapType):
        return MapType(StringType(), merged(one.valueType, other.valueType))
    if isinstance(one, StructType) and isinstance(other, StructType):
        types = {member.name: member.dataType for member in one}
        for member in other:
            known = types.get(member.name)
            types[member.name] = member.dataType if known is None else merged(known, member.dataType)
        return _struct(types)
    return StringType()


def _struct(types: Mapping[str, DataType]) -> StructType:
    found = StructType()
    for name, kind in types.items():
        found.add(name, kind)
    return found


def _optional(one: ShapeField) -> ShapeField:
    return ShapeField(one.name, one.type, required=False, default=one.default)


def _both(before: ShapeField, later: ShapeField) -> ShapeField:
    # The latest version's default, as its readers have it.
    default = later.default if later.default is not None else before.default
    return ShapeField(before.name, merged(before.type, later.type), before.required and later.required, default)


def _fields_of(types: _Types, plain: Sequence[JsonSchema]) -> dict[str, ShapeField]:
    found: dict[str, ShapeField] = {}
    for one in plain:
        for name, schema in one["properties"].items():
            nullable = types.takes_null(schema)
            required = name in one.get("required", ()) and not nullable and len(plain) == 1
            # Spark reads an absent field as null: a default stands for both where null is no value.
            default = None if nullable or not isinstance(schema, dict) else schema.get("default")
            made = ShapeField(name, types.of(schema), required, default)
            found[name] = _both(found[name], made) if name in found else made
    return found


@dataclass(slots=True)
class _Types:
    """Types of a schema."""

    root: JsonSchema
    within: list[str] = field(default_factory=list)

    def of(self, schema: Any) -> DataType:
        """Return a part's type."""
        name = schema.get("$ref", "") if isinstance(schema, dict) else ""
        if name and name in self.within:
            return StringType()
        self.within.append(name)
        try:
            return self._of(schema)
        finally:
            self.within.pop()

    def _of(self, schema: Any) -> DataType:
        kinds = [self._plain(one) for one in self.alternatives(schema)]
        found: DataType | None = None
        for kind in kinds:
            found = kind if found is None else merged(found, kind)
        return StringType() if found is None else found

    def alternatives(self, schema: Any) -> Iterator[JsonSchema]:
        """Yield alternatives but null."""
        if not isinstance(schema, dict):
            yield {}
            return
        if "$ref" in schema:
            yield from self.alternatives(self._defined(schema["$ref"]))
            return
        branches = [branch for key in ("anyOf", "oneOf") for branch in schema.get(key, ())]
        if len(schema.get("allOf", ())) == 1:
            branches += schema["allOf"]
        for branch in branches:
            yield from self.alternatives(branch)
        kinds = schema.get("type")
        if branches or kinds == "null" or schema.get("enum") == [None]:
            return
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind != "null":
                yield {**schema, "type": kind}

    def takes_null(self, schema: Any) -> bool:
        """Whether null is a value."""
        if not isinstance(schema, dict) or not schema:
            return True
        if "$ref" in schema:
            name = schema["$ref"]
            if name in self.within:
                return True
            self.within.append(name)
            found = self.takes_null(self._defined(name))
            self.within.pop()
            return found
        branches = [branch for key in ("anyOf", "oneOf", "allOf") for branch in schema.get(key, ())]
        kinds = schema.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        if any(map(self.takes_null, branches)) or "null" in listed or None in schema.get("enum", ()):
            return True
        return not branches and kinds is None and "enum" not in schema

    def _defined(self, reference: str) -> Any:
        return self.root.get("$defs", {}).get(reference.removeprefix(_DEFINED), {})

    def _plain(self, schema: JsonSchema) -> DataType:
        kind = schema.get("type")
        if kind is None and "enum" in schema:
            return _of_values(schema["enum"])
        if kind == "string":
            form = BinaryType() if schema.get("contentEncoding") == "base64" else None
            return form or _FORMATS.get(schema.get("format", ""), StringType())
        if kind == "array":
            return ArrayType(self.of(schema["items"])) if isinstance(schema.get("items"), dict) else StringType()
        if kind == "object":
            return self._object(schema)
        return _PLAIN.get(kind or "", StringType())

    def _object(self, schema: JsonSchema) -> DataType:
        if schema.get("properties"):
            return _struct({name: self.of(one) for name, one in schema["properties"].items()})
        others = schema.get("additionalProperties")
        return MapType(StringType(), self.of(others)) if isinstance(others, dict) and others else StringType()


def _of_values(values: Sequence[Any]) -> DataType:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return BooleanType()
    if kinds and kinds <= {int, float}:
        return LongType() if kinds == {int} else DoubleType()
    return StringType()
