"""The fields of a body beside a schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from mqlayer.domain.body_schemas import JsonSchema
from mqlayer.domain.schema_comparison import ROOT, alternatives, shown_type
from mqlayer.errors import InvalidInput

FIELDS_LIMIT: Final = 200
_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "integer": (int,),
    "number": (int, float), "null": (type(None),),
}  # fmt: skip


class BodyField(NamedTuple):
    """A field of a body: its path, value as JSON, type by the schema, and a remark where it does not fit."""

    path: str
    value: str
    declared: str
    remark: str


def body_fields(body: bytes, schema: JsonSchema) -> list[BodyField] | None:
    """Return the fields of a JSON body beside its schema, FIELDS_LIMIT at most; None: no JSON."""
    try:
        value = json.loads(body)
        return [one for one, _ in zip(_fields(schema, schema, value, ROOT), range(FIELDS_LIMIT), strict=False)]
    except (ValueError, RecursionError):
        return None
    except InvalidInput:
        # A schema that can't be read says nothing of a body.
        return []


def _fields(root: JsonSchema, schema: Any, value: Any, path: str) -> Iterator[BodyField]:
    ways = list(alternatives(root, schema)) if isinstance(schema, dict | bool) else []
    fitting = next((one for one in ways if _is_of_type(one, value)), None)
    declared = " or ".join(dict.fromkeys(shown_type(one) for one in ways)) or "not in the schema"
    if fitting is None:
        remark = "the schema does not name it" if not ways else f"the schema says {declared}"
        yield BodyField(path, _shown(value), declared, remark)
    elif isinstance(value, dict) and value:
        yield from _of_object(root, fitting, value, path)
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from _fields(root, _item(fitting, number), one, f"{path}[{number}]")
    else:
        yield BodyField(path, _shown(value), declared, "")


def _of_object(root: JsonSchema, schema: JsonSchema, value: Mapping[str, Any], path: str) -> Iterator[BodyField]:
    known = schema.get("properties", {})
    # A schema without fields takes any.
    others = schema.get("additionalProperties", not known)
    for name, one in value.items():
        yield from _fields(root, known.get(name, others if others is not False else None), one, f"{path}.{name}")
    for name in schema.get("required", ()):
        if name not in value:
            declared = " or ".join(dict.fromkeys(shown_type(one) for one in alternatives(root, known.get(name, True))))
            yield BodyField(f"{path}.{name}", "", declared, "missing, and the schema requires it")


def _item(schema: JsonSchema, number: int) -> Any:
    first = schema.get("prefixItems", [])
    return first[number] if number < len(first) else schema.get("items", True)


def _is_of_type(schema: JsonSchema, value: Any) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    types = schema.get("type")
    wanted = _KINDS if types is None else [types] if isinstance(types, str) else types
    return any(_is_kind(value, one) for one in wanted)


def _is_kind(value: Any, kind: str) -> bool:
    # In Python, a bool is an int.
    if isinstance(value, bool):
        return kind == "boolean"
    whole = kind == "integer" and isinstance(value, float) and value.is_integer()
    return whole or isinstance(value, _KINDS.get(kind, ()))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
