"""The fields of a body beside a schema: what fits, what does not, and what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from mqlayer.domain.body_fields import FIELDS_LIMIT, BodyField, body_fields

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
    },
    "required": ["count", "total"],
    "$defs": {"Item": {"type": "object", "properties": {"size": {"enum": ["s", "l"]}}}},
}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"count": 1, "total": 2}', [("$.count", "1", ""), ("$.total", "2", "the schema does not name it")]),
        (
            b'{"count": true, "note": null}',
            [
                ("$.count", "true", "the schema says integer"),
                ("$.note", "null", ""),
                ("$.total", "", "missing, and the schema requires it"),
            ],
        ),
        (
            b'{"count": 1.0, "total": 1, "items": [{"size": "s"}, {"size": "m"}]}',
            [
                ("$.count", "1.0", ""),
                ("$.total", "1", "the schema does not name it"),
                ("$.items[0].size", '"s"', ""),
                ("$.items[1].size", '"m"', 'the schema says "s" or "l"'),
            ],
        ),
        (b"[]", [("$", "[]", "the schema says object")]),
    ],
)
def test_fields_are_told_beside_the_schema(body: bytes, found: list[tuple[str, str, str]]) -> None:
    fields = body_fields(body, SCHEMA)
    assert fields is not None
    assert [(one.path, one.value, one.remark) for one in fields] == found


def test_other_bodies_and_schemas_have_no_fields_and_long_ones_are_cut() -> None:
    assert body_fields(b"\xff", SCHEMA) is None
    assert body_fields(b"{", SCHEMA) is None
    assert body_fields(b"1", {"$ref": "#/nowhere"}) == []
    assert body_fields(b"[1]", {}) == [BodyField("$[0]", "1", "anything", "")]
    assert len(body_fields(b"[%b1]" % (b"1," * 1_000), {}) or ()) == FIELDS_LIMIT
