"""Whether readers of one JSON Schema read the bodies of another.

Bodies are written by typed code, so an object has the fields that its schema names, unless the schema says what others
may be there (`additionalProperties`), or names none. To take every object as open would refuse each new optional field:
an old body might have had another value under that name. Readers pass over fields that they don't know, unless
`additionalProperties` is false. `oneOf` is read as `anyOf`. What can't be compared counts as a difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Final, NamedTuple

from mqlayer.domain.body_schemas import DESCRIPTIVE, JsonSchema, schema_text
from mqlayer.errors import InvalidInput

ROOT: Final = "$"
STEPS_LIMIT: Final = 200_000
_TYPES: Final = ("array", "boolean", "null", "number", "object", "string")
_COMBINED: Final = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
_KNOWN: Final = (
    DESCRIPTIVE
    | {"type", "enum", "default", "discriminator", "$defs", "definitions", "format", "pattern"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"}
    | {"contentEncoding", "items", "prefixItems", "minItems", "maxItems", "uniqueItems"}
    | {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
)
_VALUE: Final = "value"
"""Of a writer's schema of a single text: the text."""
_LIMITS: Final = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


class Break(NamedTuple):
    """A place where readers fail, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"`{self.path}`: {self.reason}"


def breaks(reader: Mapping[str, Any], writer: Mapping[str, Any]) -> list[Break]:
    """Return where readers of `reader` fail on bodies of `writer`; both normalized. Raises InvalidInput."""
    if reader == writer:
        return []
    return list(dict.fromkeys(_Comparison(dict(reader), dict(writer)).find(dict(reader), dict(writer), ROOT)))


class _Comparison:
    """Compares two schemas. A pair that is met again within itself is taken as fitting."""

    def __init__(self, reader: JsonSchema, writer: JsonSchema) -> None:
        self._reader, self._writer = reader, writer
        self._fitting: dict[tuple[int, int], None] = {}
        # Objects that were made here stay: the pairs above name them by their address.
        self._kept: list[Any] = []
        self._steps = 0

    def find(self, reader: Any, writer: Any, path: str) -> list[Break]:
        """Return where the reader fails."""
        if reader is True or reader == {} or writer is False:
            return []
        if reader is False:
            return [Break(path, "readers take nothing here")]
        self._count_step()
        pair = id(reader), id(writer)
        if pair in self._fitting:
            return []
        mark = len(self._fitting)
        self._fitting[pair] = None
        found = self._of_alternatives(reader, {} if writer is True else writer, path)
        if found:
            # What fitted since, fitted on the assumption that this pair does.
            for late in list(self._fitting)[mark:]:
                del self._fitting[late]
        return found

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > STEPS_LIMIT:
            raise InvalidInput("the schemas are nested too deeply to be compared: simplify the body, or use mode none")

    def _of_alternatives(self, reader: JsonSchema, writer: JsonSchema, path: str) -> list[Break]:
        takes = self._keep(list(_reader_alternatives(self._reader, reader)))
        gives = self._keep(list(_writer_alternatives(self._writer, writer)))
        return [each for given in gives for each in self._best(takes, given, path)]

    def _keep(self, made: list[Any]) -> list[Any]:
        self._kept.append(made)
        return made

    def _best(self, takes: list[list[JsonSchema]], given: JsonSchema, path: str) -> list[Break]:
        found: list[list[Break]] = []
        for conditions in _asked(takes, given):
            failures = [each for one in conditions for each in self._of_plain(one, given, path)]
            if not failures:
                return []
            if all(_takes_type(one, given) for one in conditions):
                found.append(failures)
        if not found:
            return [Break(path, f"readers take {_named_types(takes)}, not {shown_type(given)}")]
        return min(found, key=len)

    def _of_plain(self, reader: JsonSchema, given: JsonSchema, path: str) -> list[Break]:
        if not _takes_type(reader, given):
            return [Break(path, f"readers take {_named_types([[reader]])}, not {shown_type(given)}")]
        if "enum" in reader and not _all_in(given, reader["enum"]):
            return [Break(path, f"readers don't know {_shown_values(given, reader['enum'])}")]
        given = self._keep([_of_value(given)])[0]
        found = [
            Break(path, f"{key} of readers can't be compared")
            for key in sorted(reader.keys() - _KNOWN)
            if key not in given or reader[key] != given[key] or '"$ref"' in schema_text(reader[key])
        ]
        kind = "number" if given["type"] == "integer" else given["type"]
        check = {"number": _numbers, "string": _texts, "array": self._arrays, "object": self._objects}.get(kind)
        return found if check is None else found + list(check(reader, given, path))

    def _arrays(self, reader: JsonSchema, given: JsonSchema, path: str) -> Iterator[Break]:
        yield from _sizes("array", reader, given, path)
        if reader.get("uniqueItems") and not given.get("uniqueItems"):
            yield Break(path, "readers want items that differ")
        takes, gives = reader.get("prefixItems", []), given.get("prefixItems", [])
        most = given.get("maxItems", math.inf)
        for index in range(max(len(takes), len(gives))):
            if index < most:
                taken = takes[index] if index < len(takes) else reader.get("items", True)
                yield from self.find(taken, _item(given, index), f"{path}[{index}]")
        if most > max(len(takes), len(gives)):
            yield from self.find(reader.get("items", True), _item(given, len(gives)), f"{path}[]")

    def _objects(self, reader: JsonSchema, given: JsonSchema, path: str) -> Iterator[Break]:
        yield from _object_sizes(reader, given, path)
        has, required = given.get("properties", {}), given.get("required", ())
        others = _others(given)
        for name in reader.get("required", ()):
            if name not in required:
                lack = "may lack it" if name in has or others is not False else "lack it"
                yield Break(f"{path}.{name}", f"readers need it, and bodies {lack}")
        for name, schema in has.items():
            yield from self._names(reader, {"enum": [name]}, f"{path}.{name}")
            yield from self._field(reader, name, schema, path)
        if others is not False:
            yield from self._names(reader, given.get("propertyNames", {}), f"{path}[]")
            if reader.get("additionalProperties") is False:
                yield Break(path, "readers refuse fields that they don't know, and bodies may have any")
            else:
                yield from self.find(reader.get("additionalProperties", True), others, f"{path}[]")
            for name in reader.get("properties", {}).keys() - has.keys():
                yield from self.find(reader["properties"][name], others, f"{path}.{name}")

    def _field(self, reader: JsonSchema, name: str, schema: Any, path: str) -> Iterator[Break]:
        taken = reader.get("properties", {}).get(name, reader.get("additionalProperties", True))
        if taken is False:
            yield Break(f"{path}.{name}", "readers refuse fields that they don't know")
        else:
            yield from self.find(taken, schema, f"{path}.{name}")

    def _names(self, reader: JsonSchema, names: Any, path: str) -> Iterator[Break]:
        if "propertyNames" in reader:
            wanted, written = self._keep([_text_schema(reader["propertyNames"]), _text_schema(names)])
            for _, reason in self.find(wanted, written, path):
                yield Break(path, f"{reason}, as a name")


def _asked(takes: list[list[JsonSchema]], given: JsonSchema) -> list[list[JsonSchema]]:
    """Return the alternatives that a decoder asks: whole numbers are integers where there are such."""
    whole = [conditions for conditions in takes if any(one.get("type") == "integer" for one in conditions)]
    return whole if whole and given["type"] == "integer" else takes


def _text_schema(schema: Any) -> Any:
    return {"type": "string", **schema} if isinstance(schema, dict) else schema


def _others(given: JsonSchema) -> Any:
    """Return what fields besides the named ones hold; False where none are written."""
    found = given.get("additionalProperties", "properties" not in given)
    return False if given.get("maxProperties") == 0 else found


def _item(given: JsonSchema, index: int) -> Any:
    first = given.get("prefixItems", [])
    return first[index] if index < len(first) else given.get("items", "prefixItems" not in given)


def _numbers(reader: JsonSchema, given: JsonSchema, path: str) -> Iterator[Break]:
    whole = given["type"] == "integer"
    for side in ("inimum", "aximum"):
        wanted, there = _bound(reader, side, whole=whole), _bound(given, side, whole=whole)
        if wanted is not None and (there is None or there < wanted):
            yield Break(path, f"readers want {_shown_bound(reader, side)}, bodies {_shown_bound(given, side)}")
    step, steps = reader.get("multipleOf"), given.get("multipleOf", 1 if whole else None)
    if step is not None and (steps is None or not _divides(step, steps)):
        yield Break(path, f"readers want multiples of {step}, bodies have {steps or 'any number'}")


def _divides(step: float, steps: float) -> bool:
    # Floats divide exactly as the decimals that they are written as.
    from fractions import Fraction

    return Fraction(str(steps)) % Fraction(str(step)) == 0


def _bound(schema: JsonSchema, side: str, *, whole: bool) -> tuple[float, bool] | None:
    """Return the tighter of a side's two bounds, larger for tighter ones."""
    sign = 1 if side == "inimum" else -1
    found = []
    for key, exclusive in ((f"m{side}", False), (f"exclusiveM{side}", True)):
        value = schema.get(key)
        if isinstance(value, int | float):
            found.append(_whole(value * sign, exclusive=exclusive) if whole else (value * sign, exclusive))
    return max(found, default=None)


def _whole(value: float, *, exclusive: bool) -> tuple[float, bool]:
    return (math.floor(value) + 1 if exclusive else math.ceil(value)), False


def _shown_bound(schema: JsonSchema, side: str) -> str:
    found = [f"{key} {schema[key]}" for key in (f"m{side}", f"exclusiveM{side}") if key in schema]
    return " and ".join(found) or f"have no m{side}"


def _texts(reader: JsonSchema, given: JsonSchema, path: str) -> Iterator[Break]:
    yield from _sizes("string", reader, given, path)
    for key in ("format", "contentEncoding"):
        if key in reader and reader[key] != given.get(key):
            yield Break(path, f"readers want {key} {reader[key]}, bodies have {given.get(key, 'any text')}")
    pattern = reader.get("pattern")
    if pattern is not None and pattern != given.get("pattern") and not _matches(pattern, given.get(_VALUE)):
        yield Break(path, f"readers want pattern {pattern!r}, bodies have {given.get('pattern', 'any text')!r}")


def _matches(pattern: str, text: str | None) -> bool:
    try:
        return text is not None and re.search(pattern, text) is not None
    except re.error:
        return False


def _sizes(kind: str, reader: JsonSchema, given: JsonSchema, path: str) -> Iterator[Break]:
    least, most = _LIMITS[kind]
    if reader.get(least, 0) > given.get(least, 0):
        yield Break(path, f"readers want {least} {reader[least]}, bodies have {given.get(least, 0)}")
    if reader.get(most, math.inf) < given.get(most, math.inf):
        yield Break(path, f"readers want {most} {reader[most]}, bodies have {given.get(most, 'no limit')}")


def _object_sizes(reader: JsonSchema, given: JsonSchema, path: str) -> Iterator[Break]:
    sizes: JsonSchema = {"minProperties": max(given.get("minProperties", 0), len(given.get("required", ())))}
    most = given.get("maxProperties", math.inf)
    if _others(given) is False:
        most = min(most, len(given.get("properties", {})))
    yield from _sizes("object", reader, sizes if most == math.inf else {**sizes, "maxProperties": most}, path)


# -- alternatives ------------------------------------------------------------------------------------------------------


def alternatives(root: JsonSchema, schema: Any) -> Iterator[JsonSchema]:
    """Yield a schema's plain parts, one for each way to fit it."""
    for conditions in _reader_alternatives(root, schema):
        yield _all_merged(conditions)


def _target(root: JsonSchema, reference: str) -> Any:
    found: Any = root
    try:
        for part in reference.removeprefix("#").split("/")[1:]:
            found = found[part.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        raise InvalidInput(f"the schema has no {reference!r}: let its references name its own $defs") from None
    return found


def _reader_alternatives(root: JsonSchema, schema: Any, depth: int = 0) -> Iterator[list[JsonSchema]]:
    """Yield lists of plain schemas: a body fits if all of one list take it."""
    parts = _parts(root, schema, depth)
    for combination in product(*parts):
        yield [one for conditions in combination for one in conditions]


def _parts(root: JsonSchema, schema: Any, depth: int) -> list[list[list[JsonSchema]]]:
    if depth > 50:
        raise InvalidInput("the schema refers to itself without end: correct its $ref")
    if not isinstance(schema, dict):
        return [[[]]] if schema is True else [[[{"enum": []}]]]
    parts = [[[{key: value for key, value in schema.items() if key not in _COMBINED}]]]
    if "$ref" in schema:
        parts.append(list(_reader_alternatives(root, _target(root, schema["$ref"]), depth + 1)))
    parts += [list(_reader_alternatives(root, one, depth + 1)) for one in schema.get("allOf", ())]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts.append([each for one in schema[key] for each in _reader_alternatives(root, one, depth + 1)])
    return parts


def _writer_alternatives(root: JsonSchema, schema: Any) -> Iterator[JsonSchema]:
    """Yield plain schemas of one type or value, which together have all bodies."""
    for conditions in _reader_alternatives(root, schema):
        yield from _of_one_type(_all_merged(conditions))


def _all_merged(conditions: Iterable[JsonSchema]) -> JsonSchema:
    merged: JsonSchema = {}
    for one in conditions:
        merged = _merged(merged, one)
    return merged


def _merged(one: JsonSchema, other: JsonSchema) -> JsonSchema:
    found = one | other
    for key in ("properties", "patternProperties"):
        if key in one and key in other:
            found[key] = one[key] | other[key]
    if "required" in one and "required" in other:
        found["required"] = sorted({*one["required"], *other["required"]})
    return found


def _of_one_type(schema: JsonSchema) -> Iterator[JsonSchema]:
    if "enum" in schema:
        for value in schema["enum"]:
            yield {"enum": [value], "type": _type_of(value)}
        return
    types = schema.get("type", _TYPES)
    for kind in [types] if isinstance(types, str) else types:
        if kind == "boolean":
            yield from ({"enum": [value], "type": kind} for value in (False, True))
        else:
            yield {**schema, "type": kind} if kind != "null" else {"enum": [None], "type": kind}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _of_value(given: JsonSchema) -> JsonSchema:
    """Return a single value's schema in the keywords that readers are compared by."""
    if "enum" not in given:
        return given
    (value,) = given["enum"]
    kind = _type_of(value)
    if kind in ("integer", "number"):
        return {"type": kind, "minimum": value, "maximum": value, "multipleOf": abs(value)}
    if kind == "string":
        return {"type": kind, "minLength": len(value), "maxLength": len(value), _VALUE: value}
    if kind == "array":
        items = {"prefixItems": [{"enum": [one]} for one in value], "minItems": len(value), "maxItems": len(value)}
        return {"type": kind, **items, "uniqueItems": len({schema_text(one) for one in value}) == len(value)}
    if kind == "object":
        return {"type": kind, "properties": {name: {"enum": [one]} for name, one in value.items()},
                "required": sorted(value), "additionalProperties": False}  # fmt: skip
    return {"type": kind}


def _takes_type(reader: JsonSchema, given: JsonSchema) -> bool:
    types = reader.get("type")
    if types is None:
        return True
    wanted = {types} if isinstance(types, str) else {*types}
    return given["type"] in wanted or (given["type"] == "integer" and "number" in wanted)


def _all_in(given: JsonSchema, values: Iterable[Any]) -> bool:
    known = {schema_text(value) for value in values}
    return "enum" in given and all(schema_text(value) in known for value in given["enum"])


def _named_types(takes: Iterable[list[JsonSchema]]) -> str:
    names = dict.fromkeys(shown_type(one) for conditions in takes for one in conditions if one.keys() - DESCRIPTIVE)
    return " or ".join(names) or "nothing"


def shown_type(schema: JsonSchema) -> str:
    """Return a plain schema's type, or its values."""
    if "enum" in schema:
        return " or ".join(schema_text(value) for value in schema["enum"][:8]) or "nothing"
    types = schema.get("type", "anything")
    return types if isinstance(types, str) else " or ".join(types)


def _shown_values(given: JsonSchema, known: Iterable[Any]) -> str:
    return shown_type(given) if "enum" in given else f"other values than {shown_type({'enum': list(known)})}"
