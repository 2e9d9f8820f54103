"""Schemas of bodies: one form whatever made them, what breaks readers, and what changed between two."""

from __future__ import annotations

import math
import pickle
import uuid
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
import pydantic
import pytest

import mqlayer
from mqlayer.domain.body_schemas import normalized, schema_of
from mqlayer.domain.schema_comparison import breaks
from mqlayer.domain.schema_versions import SchemaMode, SchemaVersion, changes, refusals
from mqlayer.errors import IncompatibleSchema, InvalidInput


class Line(msgspec.Struct):
    """A line."""

    price: int


class Order(msgspec.Struct):
    kind: Literal["a", "b"]
    lines: list[Line]


class LineModel(pydantic.BaseModel):
    price: int


class OrderModel(pydantic.BaseModel):
    lines: list[LineModel]
    kind: Literal["b", "a"]


class Times(msgspec.Struct):
    at: datetime
    prices: dict[int, list[datetime | None]]
    by_id: dict[uuid.UUID, Times | None]


class Tree(msgspec.Struct):
    leaf: int
    more: list[Tree] = []


class WiderTree(msgspec.Struct):
    leaf: float
    more: list[WiderTree] = []


def schema(body: Any) -> dict[str, Any]:
    found = schema_of(body)
    assert found is not None
    return normalized(found)


def struct(**fields: Any) -> dict[str, Any]:
    """The schema of a Struct: a field's type, or its type and default."""
    made = [(name, *said) if isinstance(said, tuple) else (name, said) for name, said in fields.items()]
    return schema(msgspec.defstruct("Body", made, kw_only=True))


class TestOneForm:
    def test_a_struct_and_a_model_of_the_same_fields_have_one_schema(self) -> None:
        one, other = schema(Order), schema(OrderModel)
        assert one["properties"]["kind"] == {"enum": ["a", "b"]}
        assert one["$defs"] == {
            "Line": {"type": "object", "properties": {"price": {"type": "integer"}}, "required": ["price"]}
        }
        assert "title" not in str(other)
        assert breaks(one, other) == breaks(other, one) == []

    def test_a_field_may_be_called_as_a_keyword_is(self) -> None:
        assert struct(title=str, description=int)["properties"].keys() == {"title", "description"}

    def test_times_and_names_that_are_no_str_are_told_apart_from_str(self) -> None:
        found = schema(Times)["$defs"]["Times"]["properties"]
        assert found["at"]["format"] == "date-time"
        assert found["prices"]["propertyNames"] == {"format": "integer"}
        assert {"format": "date-time", "type": "string"} in found["prices"]["additionalProperties"]["items"]["anyOf"]
        assert found["by_id"]["propertyNames"] == {"format": "uuid"}

    @pytest.mark.parametrize("body", [bytes, str, type("Odd", (), {})])
    def test_some_bodies_have_none(self, body: Any) -> None:
        assert schema_of(body) is None

    def test_a_codec_has_the_one_that_it_gives(self) -> None:
        class Lines:
            def encode(self, body: int) -> bytes:
                return b"%d" % body

            def decode(self, data: bytes) -> int:
                return int(data)

        class Told(Lines):
            def json_schema(self) -> dict[str, Any]:
                return {"type": "integer", "title": "Lines"}

        assert mqlayer.Topic("orders", body=int, codec=Lines()).schema is None
        assert mqlayer.Topic("orders", body=int, codec=Told()).schema == {"type": "integer"}

    def test_what_is_no_json_or_too_large_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="the schema is no JSON"):
            normalized({"enum": [b"x"]})
        assert struct(ratio=(float, math.nan))["properties"]["ratio"] == {"type": "number"}
        with pytest.raises(InvalidInput, match="at most 262144"):
            normalized({"enum": ["x" * 300_000]})


BREAKS: list[tuple[str, Any, Any, str]] = [
    ("a required field", struct(a=int, b=int), struct(a=int), "$.b: readers need it, and bodies lack it"),
    ("a field that was optional", struct(a=int), struct(a=(int, 1)), "$.a: readers need it, and bodies may lack it"),
    ("an optional field", struct(a=int, b=(int, 0)), struct(a=int), ""),
    ("a field that went", struct(a=int), struct(a=int, b=int), ""),
    ("a wider number", struct(a=float), struct(a=int), ""),
    ("a narrower number", struct(a=int), struct(a=float), "$.a: readers take integer, not number"),
    ("null", struct(a=int), struct(a=int | None), "$.a: readers take integer, not null"),
    ("no null", struct(a=int | None), struct(a=int), ""),
    ("another type", struct(a=str), struct(a=int), "$.a: readers take string, not integer"),
    ("fewer values", struct(a=Literal["x"]), struct(a=Literal["x", "y"]), '$.a: readers don\'t know "y"'),
    ("more values", struct(a=Literal["x", "y"]), struct(a=Literal["x"]), ""),
    ("any text for some", struct(a=str), struct(a=Literal["x", "y"]), ""),
    ("some for any text", struct(a=Literal["x"]), struct(a=str), '$.a: readers don\'t know other values than "x"'),
    ("a lower bound", struct(a=Annotated[int, msgspec.Meta(ge=1)]), struct(a=int),
     "$.a: readers want minimum 1, bodies have no minimum"),
    ("a wider bound", struct(a=Annotated[int, msgspec.Meta(ge=0)]), struct(a=Annotated[int, msgspec.Meta(gt=-1)]), ""),
    ("a shorter text", struct(a=Annotated[str, msgspec.Meta(max_length=3)]), struct(a=str),
     "$.a: readers want maxLength 3, bodies have no limit"),
    ("a pattern", struct(a=Annotated[str, msgspec.Meta(pattern="^x")]), struct(a=str),
     "$.a: readers want pattern '^x', bodies have 'any text'"),
    ("values of a pattern", struct(a=Annotated[str, msgspec.Meta(pattern="^x")]), struct(a=Literal["xy"]), ""),
    ("a time for a text", struct(a=datetime), struct(a=str),
     "$.a: readers want format date-time, bodies have any text"),
    ("another item", struct(a=list[int]), struct(a=list[str]), "$.a[]: readers take integer, not string"),
    ("a longer tuple", struct(a=tuple[int, int]), struct(a=tuple[int]),
     "$.a: readers want minItems 2, bodies have 1"),
    ("another value", struct(a=dict[str, int]), struct(a=dict[str, str]), "$.a[]: readers take integer, not string"),
    ("other names", struct(a=dict[int, int]), struct(a=dict[str, int]),
     "$.a[]: readers want format integer, bodies have any text, as a name"),
    ("whole numbers for both", struct(a=float | Annotated[int, msgspec.Meta(le=0)]), struct(a=int),
     "$.a: readers want maximum 0, bodies have no maximum"),
    ("any for one", struct(a=int), struct(a=Any), "$.a: readers take integer, not array"),
    ("one for any", struct(a=Any), struct(a=int), ""),
    ("a map for fields", struct(a=int), schema(dict[str, int]), "$.a: readers need it, and bodies may lack it"),
    ("fields for a map", schema(dict[str, int]), struct(a=int), ""),
    ("refused names", schema(msgspec.defstruct("Strict", [("a", int)], forbid_unknown_fields=True)),
     struct(a=int, b=int), "$.b: readers refuse fields that they don't know"),
    ("an unknown keyword", {"type": "object", "dependentRequired": {"a": ["b"]}}, {"type": "object"},
     "$: dependentRequired of readers can't be compared"),
    ("all of several", {"allOf": [{"type": "integer"}, {"minimum": 3}]}, {"enum": [3, 4]}, ""),
    ("nothing", {"not": {}}, {"not": {}}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "writer", "told"), [case[1:] for case in BREAKS], ids=[case[0] for case in BREAKS])
def test_what_breaks_readers_is_named_with_its_place(reader: Any, writer: Any, told: str) -> None:
    found = breaks(reader, writer)
    assert (f"{found[0].path}: {found[0].reason}" if found else "") == told


def test_a_body_that_holds_itself_is_compared_as_far_as_it_differs() -> None:
    assert breaks(schema(WiderTree), schema(Tree)) == []
    assert breaks(schema(Tree), schema(WiderTree))[0].path == "$.leaf"


V1 = struct(a=int)
V2 = struct(a=int, b=(int, 0))
V3 = struct(a=str)


@pytest.mark.parametrize(
    ("mode", "new", "readers"),
    [
        ("backward", struct(a=int, b=int), ["new"]),
        ("forward", struct(a=int, b=int), []),
        ("backward", struct(b=(int, 0)), []),
        ("forward", struct(b=(int, 0)), ["old"]),
        ("full", V2, []),
        ("full", V3, ["new", "old"]),
        ("none", V3, []),
    ],
)
def test_a_mode_says_which_readers_must_not_break(mode: SchemaMode, new: Any, readers: list[str]) -> None:
    assert [one.readers for one in refusals(new, [SchemaVersion(1, "backward", V1)], mode)] == readers


def test_a_schema_is_compared_with_all_versions_since_the_last_break() -> None:
    wide = struct(a=int | None)
    known = [SchemaVersion(1, "backward", wide), SchemaVersion(2, "backward", V1), SchemaVersion(3, "backward", V2)]
    assert [one.version for one in refusals(struct(a=int, c=(int, 1)), known, "backward")] == [1]
    since = [SchemaVersion(1, "backward", V3), SchemaVersion(2, "none", V1)]
    assert refusals(V2, since, "backward") == []
    assert refusals(V1, since, "backward") == []
    assert [one.version for one in refusals(V3, since, "backward")] == [2]


def test_changes_name_each_field_once_and_who_breaks() -> None:
    before = struct(a=int, old=str, k=Literal["x"])
    after = struct(a=(float, 0.5), k=Literal["x", "y"], to=(Line | None, None))
    found = [(one.path, one.change, bool(one.new_readers), bool(one.old_readers)) for one in changes(before, after)]
    assert found == [
        ("$.a", "changed", False, True),
        ("$.k", "changed", False, True),
        ("$.old", "removed", False, True),
        ("$.to", "added", False, False),
    ]
    assert changes(before, after)[0].before == "integer"
    assert changes(before, after)[0].after == "number, optional"
    assert changes(before, before) == []


def test_the_refusal_names_topic_version_field_and_the_way_on() -> None:
    error = pickle.loads(pickle.dumps(IncompatibleSchema("orders", "full", [(1, "new", "$.a", "readers need it")] * 7)))
    assert str(error).startswith(
        "the new schema of topic 'orders' is not compatible (mode full): its readers fail on bodies of version 1 "
        "at `$.a`: readers need it; "
    )
    assert str(error).endswith("; and 2 more: change it so that they go on, or allow the break: "
                               "mqlayer topic set orders --schema-mode none")  # fmt: skip
