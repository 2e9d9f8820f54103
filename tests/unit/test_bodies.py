"""Bodies become what a handler asked for; one that does not fit is told by its place, never by its content."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqlayer.domain.codecs import decoder_for
from mqlayer.errors import BodyMismatch

SECRET = "s3cr3t"


class Colour(Enum):
    RED = "red"


class Order(msgspec.Struct, forbid_unknown_fields=True):
    number: int
    colour: Colour = Colour.RED
    kind: Literal["a", "b"] = "a"
    parts: dict[str, int] = {}
    lines: list[int] = []


@dataclasses.dataclass
class Line:
    number: int


class Customer(pydantic.BaseModel, extra="forbid"):
    number: int = pydantic.Field(alias="no")
    name: str = pydantic.Field("", max_length=3)
    parts: dict[str, int] = {}
    line: Line | None = None


@pytest.mark.parametrize(
    ("body_type", "body", "expected"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, "ä".encode(), "ä"),
        (dict, b'{"a":1}', {"a": 1}),
        (list[int], b"[1,2]", [1, 2]),
        (Any, b"null", None),
        (Order, b'{"number":1}', Order(1)),
        (Line, b'{"number":1}', Line(1)),
        (Customer, b'{"no":1}', Customer(no=1, name="")),
    ],
    ids=str,
)
def test_a_body_becomes_what_was_asked_for(body_type: Any, body: bytes, expected: object) -> None:
    assert decoder_for(body_type)(body) == expected


@pytest.mark.parametrize(
    ("body_type", "body", "told"),
    [
        (str, b"\xff", "body does not fit str: it is not UTF-8"),
        (Order, b"{", "body does not fit Order: it is not JSON"),
        (Order, b"\xff", "body does not fit Order: it is not JSON"),
        (Order, b"[1]", "body does not fit Order: Expected `object` at `$`"),
        (Order, b"{}", "body does not fit Order: missing required field at `$`"),
        (Order, b'{"number":"s3cr3t"}', "body does not fit Order: Expected `int` at `$.number`"),
        (Order, b'{"number":1,"s3cr3t":1}', "body does not fit Order: unknown field at `$`"),
        (Order, b'{"number":1,"colour":"s3cr3t"}', "body does not fit Order: invalid value at `$.colour`"),
        (Order, b'{"number":1,"kind":"Expected `s3cr3t"}', "body does not fit Order: invalid value at `$.kind`"),
        (Order, b'{"number":1,"parts":{"s3cr3t":"x"}}', "body does not fit Order: Expected `int` at `$.parts[...]`"),
        (Order, b'{"number":1,"lines":[1,"x"]}', "body does not fit Order: Expected `int` at `$.lines[1]`"),
        (Line, b'{"number":null}', "body does not fit Line: Expected `int` at `$.number`"),
        (Customer, b"{", "body does not fit Customer: json_invalid at `$`"),
        (Customer, b"{}", "body does not fit Customer: missing at `no`"),
        (Customer, b'{"no":1,"s3cr3t":1}', "body does not fit Customer: extra_forbidden at `*`"),
        (Customer, b'{"no":1,"name":"s3cr3t"}', "body does not fit Customer: string_too_long at `name`"),
        (Customer, b'{"no":1,"parts":{"s3cr3t":"x"}}', "body does not fit Customer: int_parsing at `parts.*`"),
        (Customer, b'{"no":1,"line":{"number":"x"}}', "body does not fit Customer: int_parsing at `line.number`"),
    ],
)
def test_a_body_that_does_not_fit_is_told_by_its_place(body_type: Any, body: bytes, told: str) -> None:
    with pytest.raises(BodyMismatch) as caught:
        decoder_for(body_type)(body)
    assert str(caught.value) == told
    assert caught.value.__cause__ is None


JSON = st.recursive(
    st.none() | st.integers() | st.just(SECRET) | st.just(f"Expected `{SECRET} - at `$.{SECRET}`"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([SECRET, "number", "no", "kind", "colour", "parts", "lines", "line", "name"]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=8,
)


@given(JSON, st.sampled_from([Order, Line, Customer, dict[str, int], Literal["x"]]))
def test_nothing_of_a_body_is_ever_told(value: object, body_type: Any) -> None:
    told = ""
    try:
        decoder_for(body_type)(msgspec.json.encode(value))
    except BodyMismatch as mismatch:
        told = str(mismatch)
    assert SECRET not in told


def test_a_model_without_a_schema_is_taken_too() -> None:
    class Odd(pydantic.BaseModel, arbitrary_types_allowed=True):
        number: int
        check: Callable[[], None] | None = None

    with pytest.raises(BodyMismatch, match="int_parsing at `number`"):
        decoder_for(Odd)(b'{"number":"x"}')
