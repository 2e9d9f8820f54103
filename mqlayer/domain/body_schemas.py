"""JSON Schemas of topics' bodies, in one form whatever library made them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from mqlayer.domain.body_streams import STREAMS
from mqlayer.domain.codecs import type_name
from mqlayer.errors import InvalidInput

JsonSchema = dict[str, Any]

SCHEMA_BYTES_LIMIT: Final = 262_144
DESCRIPTIVE: Final = frozenset(
    ("title", "description", "examples", "$comment", "$schema", "$id", "deprecated", "readOnly", "writeOnly")
)
"""Keywords that say nothing about a body."""
_OF_NAMES: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_OF_LISTS: Final = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_OF_ONE: Final = frozenset(
    ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else", "unevaluatedItems",
     "unevaluatedProperties")
)  # fmt: skip
_UNORDERED: Final = ("anyOf", "oneOf", "allOf", "required", "enum", "type")
_DEFINED: Final = "#/$defs/"
_TIMES: Final = {msgspec.inspect.DateTimeType: "date-time", msgspec.inspect.TimeType: "time"}


def schema_of(body_type: Any) -> JsonSchema | None:
    """Return the schema of a type's JSON, as its library gives it; None for bytes, str and types that have none."""
    if body_type in (bytes, str, *STREAMS):
        return None
    try:
        of_model = getattr(body_type, "model_json_schema", None)
        found: JsonSchema = _with_json_defaults(_msgspec_schema(body_type) if of_model is None else of_model())
    except Exception:  # noqa: BLE001 - a type may be read without having a schema
        return None
    return found


def normalized(schema: Mapping[str, Any]) -> JsonSchema:
    """Return a schema without descriptions; lists without an order are sorted. Raises InvalidInput."""
    found = _normalized(_without_root_reference(dict(schema)))
    text = schema_text(found)
    if len(text.encode()) > SCHEMA_BYTES_LIMIT:
        raise InvalidInput(f"a schema of {len(text.encode())} bytes, at most {SCHEMA_BYTES_LIMIT}: divide the body")
    loaded: JsonSchema = json.loads(text)
    return loaded


def schema_text(schema: Any) -> str:
    """Return a schema as text, the same for equal schemas. Raises InvalidInput."""
    try:
        return json.dumps(schema, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the schema is no JSON: {error}") from None


def _msgspec_schema(body_type: Any) -> JsonSchema:
    schema = msgspec.json.schema(body_type)
    _TimeFormats(schema).add(msgspec.inspect.type_info(body_type), schema)
    return schema


def _without_root_reference(schema: JsonSchema) -> JsonSchema:
    name = str(schema.get("$ref", "")).removeprefix(_DEFINED)
    others = schema.keys() - {"$ref", "$defs"} - DESCRIPTIVE
    definitions = schema.get("$defs", {})
    if others or name not in definitions:
        return schema
    rest = {key: value for key, value in definitions.items() if key != name}
    if schema_text([rest, definitions[name]]).count(json.dumps(_DEFINED + name)):
        return schema
    return {**definitions[name], **({"$defs": rest} if rest else {})}


def map_schemas(schema: JsonSchema, change: Callable[[Any], Any]) -> JsonSchema:
    """Return a schema with each schema in it changed."""
    found: JsonSchema = {}
    for key, value in schema.items():
        if key in _OF_NAMES and isinstance(value, dict):
            found[key] = {name: change(one) for name, one in value.items()}
        elif key in _OF_LISTS | _OF_ONE and isinstance(value, list):
            found[key] = [change(one) for one in value]
        else:
            found[key] = change(value) if key in _OF_ONE else value
    return found


def _normalized(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = map_schemas({key: value for key, value in schema.items() if key not in DESCRIPTIVE}, _normalized)
    if "const" in found:
        found.setdefault("enum", [found.pop("const")])
    unordered = {key: sorted(found[key], key=schema_text) for key in _UNORDERED if isinstance(found.get(key), list)}
    return found | unordered


def _with_json_defaults(schema: Any) -> Any:
    """Return a schema without defaults that JSON can't hold, such as NaN: only people read them."""
    if not isinstance(schema, dict):
        return schema
    return map_schemas(
        {key: value for key, value in schema.items() if key != "default" or _is_json(value)}, _with_json_defaults
    )


def _is_json(value: Any) -> bool:
    try:
        schema_text(value)
    except InvalidInput:
        return False
    return True


class _TimeFormats:
    """Adds what msgspec leaves out: the format of times without a demand on their zone, and of keys that are no str."""

    def __init__(self, schema: JsonSchema) -> None:
        self._definitions: dict[str, JsonSchema] = schema.get("$defs", {})
        self._seen: set[str] = set()

    def add(self, info: Any, schema: Any) -> None:
        """Add to a schema what its type says."""
        branches = list(_branches(schema))
        types = list(_types(info))
        for one in types:
            for branch in branches:
                if "$ref" in branch and hasattr(one, "fields"):
                    self._add_to_definition(one, branch["$ref"].removeprefix(_DEFINED))
                self._add_to_branch(one, branch)

    def _add_to_definition(self, info: Any, name: str) -> None:
        schema = self._definitions.get(name, {})
        # Of a generic type, the title has its parameters, too.
        if name in self._seen or schema.get("title", "").partition("[")[0] != type_name(info.cls):
            return
        self._seen.add(name)
        places = schema.get("prefixItems", [])[-len(info.fields) :] if info.fields else []
        for index, field in enumerate(info.fields):
            if places:
                self.add(field.type, places[index])
            elif "encode_name" in getattr(field, "__struct_fields__", ()):
                self.add(field.type, schema.get("properties", {}).get(field.encode_name))

    def _add_to_branch(self, info: Any, branch: JsonSchema) -> None:
        kind = branch.get("type")
        if kind == "string" and type(info) in _TIMES:
            branch.setdefault("format", _TIMES[type(info)])
        elif kind == "array" and hasattr(info, "item_type"):
            self.add(info.item_type, branch.get("items"))
        elif kind == "array" and hasattr(info, "item_types"):
            for one, item in zip(info.item_types, branch.get("prefixItems", ()), strict=False):
                self.add(one, item)
        elif kind == "object" and hasattr(info, "key_type"):
            if form := _KEY_FORMS.get(type(info.key_type)):
                branch.setdefault("propertyNames", {"format": form})
            self.add(info.value_type, branch.get("additionalProperties"))


_KEY_FORMS: Final[Mapping[Callable[..., Any], str]] = {
    msgspec.inspect.IntType: "integer",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.UUIDType: "uuid",
    msgspec.inspect.DecimalType: "decimal",
    msgspec.inspect.DateType: "date",
    msgspec.inspect.DateTimeType: "date-time",
    msgspec.inspect.TimeType: "time",
    msgspec.inspect.TimeDeltaType: "duration",
    msgspec.inspect.BytesType: "base64",
}


def _branches(schema: Any) -> Iterator[JsonSchema]:
    if isinstance(schema, dict):
        if "anyOf" not in schema:
            yield schema
        for one in schema.get("anyOf", ()):
            yield from _branches(one)


def _types(info: Any) -> Iterator[Any]:
    if isinstance(info, msgspec.inspect.Metadata):
        yield from _types(info.type)
    elif isinstance(info, msgspec.inspect.UnionType):
        for one in info.types:
            yield from _types(one)
    else:
        yield info
