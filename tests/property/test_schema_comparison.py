"""Pairs of schemas and bodies: what the comparison calls compatible, msgspec really decodes.

A type is drawn as a tree of tuples, and changed a little for the other side, so that many pairs are nearly the same.
"""

from __future__ import annotations

import string
import uuid
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Union

import msgspec
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from mqlayer.domain.body_schemas import normalized, schema_of
from mqlayer.domain.schema_comparison import breaks
from mqlayer.domain.schema_versions import changes

Draw = Callable[[st.SearchStrategy[Any]], Any]
Tree = tuple[Any, ...]

NAMES = st.sampled_from("abc")
BOUND = st.none() | st.integers(-2, 2)
LENGTH = st.none() | st.integers(0, 2)
SCALARS = st.one_of(
    st.tuples(st.just("int"), BOUND, BOUND),
    st.tuples(st.just("float"), BOUND, BOUND),
    st.tuples(st.just("str"), LENGTH, LENGTH),
    st.tuples(st.just("enum"), st.sets(st.sampled_from(["x", "yy", "zzz"]), min_size=1).map(sorted)),
    st.tuples(st.just("enum"), st.sets(st.integers(-1, 3), min_size=1).map(sorted)),
    st.sampled_from([("bool",), ("none",), ("datetime",), ("uuid",), ("any",)]),
)


def structs(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    """Structs: fields with their type and whether they are required; whether unknown names are refused; a tag."""
    fields = st.dictionaries(NAMES, st.tuples(children, st.booleans()), max_size=3)
    return st.tuples(st.just("struct"), fields, st.booleans(), st.none() | st.sampled_from("ST"))


TREES: st.SearchStrategy[Tree] = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        structs(children),
        structs(children),
        st.tuples(st.just("list"), children, LENGTH),
        st.tuples(st.just("tuple"), st.lists(children, min_size=1, max_size=2)),
        st.tuples(st.just("dict"), st.sampled_from(["str", "int"]), children),
        st.tuples(st.just("union"), st.lists(children, min_size=2, max_size=3)),
        children.map(lambda child: ("union", [child, ("none",)])),
    ),
    max_leaves=6,
)


def changed(draw: Draw, tree: Tree) -> Tree:
    """Return nearly the same tree."""
    kind, *rest = tree
    dice = draw(st.integers(0, 9))
    if dice == 0:
        return draw(TREES)  # type: ignore[no-any-return]
    if dice == 1:
        return "union", [tree, ("none",)]
    if kind == "int" and dice < 5:
        return "float", *rest
    if kind in ("int", "float", "str") and dice < 7:
        return kind, draw(BOUND if kind != "str" else LENGTH), rest[1]
    if kind == "struct":
        fields = {name: (changed(draw, of), draw(st.booleans()) if dice < 4 else need)
                  for name, (of, need) in rest[0].items()}  # fmt: skip
        if dice in (4, 5, 6):
            fields |= {draw(NAMES): (draw(SCALARS), dice == 4)}
        if dice == 7 and fields:
            fields.pop(draw(st.sampled_from(sorted(fields))))
        return kind, fields, rest[1] if dice < 9 else not rest[1], rest[2]
    if kind in ("list", "dict"):
        place = 0 if kind == "list" else 1
        return kind, *rest[:place], changed(draw, rest[place]), *rest[place + 1 :]
    if kind in ("tuple", "union"):
        return kind, [changed(draw, one) for one in rest[0]]
    return tree


STRUCTS: dict[str, type[msgspec.Struct]] = {}


def is_odd(tree: Tree) -> bool:
    """Say whether msgspec can't be asked of a type.

    It frees memory twice when it refuses a union beside a tuple, reads `int | Literal[0]` as `Literal[0]`, and takes
    two bounds of a type in a union for one.
    """
    text = repr(tree)
    return "('union'" in text and ("('tuple'" in text or "('enum'" in text or has_twice(tree))


def has_twice(tree: Any) -> bool:
    """Say whether a union has two members of one kind."""
    kinds = kinds_in(tree) if isinstance(tree, tuple) and tree[0] == "union" else []
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return len({*kinds}) < len(kinds) or any(map(has_twice, parts))


def kinds_in(tree: Tree) -> list[str]:
    """Return the kinds of a union's members but null, which may be said twice."""
    if tree[0] == "none" or tree[0] != "union":
        return [] if tree[0] == "none" else [tree[0]]
    return [kind for one in tree[1] for kind in kinds_in(one)]


def type_of(tree: Tree) -> Any:
    """Return the msgspec type of a tree."""
    kind, *rest = tree
    plain = {"bool": bool, "none": None, "datetime": datetime, "uuid": uuid.UUID, "any": Any}
    if kind in plain:
        return plain[kind]
    if kind in ("int", "float"):
        low, high = rest
        return Annotated[int if kind == "int" else float, msgspec.Meta(ge=low, le=high)]
    if kind == "str":
        return Annotated[str, msgspec.Meta(min_length=rest[0], max_length=rest[1])]
    if kind == "enum":
        return Literal[tuple(rest[0])]
    if kind == "list":
        return Annotated[list[type_of(rest[0])], msgspec.Meta(max_length=rest[1])]  # type: ignore[misc]
    if kind == "tuple":
        return tuple[tuple(map(type_of, rest[0]))]  # type: ignore[misc]
    if kind == "dict":
        return dict[str if rest[0] == "str" else int, type_of(rest[1])]  # type: ignore[misc]
    if kind == "union":
        return Union[tuple(map(type_of, rest[0]))]  # noqa: UP007
    fields, strict, tag = rest
    struct = f"S{zlib.crc32(repr(tree).encode())}"
    if struct in STRUCTS:
        # Two types of one name have no schema.
        return STRUCTS[struct]
    made = [
        (name, type_of(of)) if need else (name, Union[type_of(of), msgspec.UnsetType], msgspec.UNSET)  # noqa: UP007
        for name, (of, need) in fields.items()
    ]
    STRUCTS[struct] = msgspec.defstruct(struct, made, kw_only=True, forbid_unknown_fields=strict, tag=tag)
    return STRUCTS[struct]


TEXTS = st.text(string.ascii_lowercase + "é\n", max_size=3)
VALUES = {
    "bool": st.booleans(), "none": st.none(), "uuid": st.just("12345678-1234-5678-1234-567812345678"),
    "datetime": st.just(datetime(2026, 1, 1, tzinfo=UTC).isoformat()),
    "any": st.none() | st.integers(-3, 3) | TEXTS | st.just({"a": [1.5]}),
}  # fmt: skip


def body_of(draw: Draw, tree: Tree) -> Any:
    """Return a body as its JSON would be loaded; one that breaks the tree's bounds is sorted out later."""
    kind, *rest = tree
    if kind in VALUES:
        return draw(VALUES[kind])
    if kind == "int":
        return draw(st.integers(-4, 4))
    if kind == "float":
        return draw(st.sampled_from([-1.5, 0.0, 0.5, 2.0]) | st.integers(-3, 3))
    if kind == "str":
        return draw(TEXTS)
    if kind == "enum":
        return draw(st.sampled_from(rest[0]))
    if kind == "list":
        return [body_of(draw, rest[0]) for _ in range(draw(st.integers(0, 2)))]
    if kind == "tuple":
        return [body_of(draw, one) for one in rest[0]]
    if kind == "dict":
        names = draw(st.sets(NAMES if rest[0] == "str" else st.sampled_from(["1", "-7"]), max_size=2))
        return {name: body_of(draw, rest[1]) for name in sorted(names)}
    if kind == "union":
        return body_of(draw, draw(st.sampled_from(rest[0])))
    fields, _, tag = rest
    body = {name: body_of(draw, of) for name, (of, need) in fields.items() if need or draw(st.booleans())}
    return body | ({"type": tag} if tag else {})


def decoder(tree: Tree) -> tuple[msgspec.json.Decoder[Any], dict[str, Any]]:
    """Return a tree's decoder and schema; give the example up where msgspec has no such type."""
    if is_odd(tree):
        reject()
    try:
        made = type_of(tree)
        found = msgspec.json.Decoder(made)
    except (TypeError, ValueError):
        reject()
    schema = schema_of(made)
    assert schema is not None
    return found, normalized(schema)


@settings(max_examples=150)
@given(st.data())
def test_what_is_called_compatible_is_decoded(data: st.DataObject) -> None:
    written = data.draw(TREES)
    read = changed(data.draw, written)
    (writes, writer), (reads, reader) = decoder(written), decoder(read)
    if breaks(reader, writer):
        return
    for _ in range(3):
        body = msgspec.json.encode(body_of(data.draw, written))
        try:
            writes.decode(body)
        except msgspec.ValidationError:
            continue
        reads.decode(body)


@settings(max_examples=60)
@given(st.data())
def test_a_schema_goes_with_itself_and_a_break_is_a_change(data: st.DataObject) -> None:
    written = data.draw(TREES)
    (_, one), (_, other) = decoder(written), decoder(changed(data.draw, written))
    # Not the same object: equal schemas are not compared at all.
    assert breaks(one | {"$comment": "other"}, one) == []
    found = changes(one, other)
    assert bool(found) >= bool(breaks(one, other) or breaks(other, one))
    assert changes(one, one) == []


@pytest.mark.parametrize(
    ("read", "written", "fits"),
    [
        (("struct", {"a": (("float", None, None), False)}, False, None), ("struct", {}, True, None), True),
        (("struct", {}, True, None), ("struct", {"a": (("bool",), True)}, False, None), False),
        (("union", [("int", 0, None), ("none",)]), ("int", 1, 2), True),
        (("list", ("str", 1, None), None), ("list", ("enum", ["x"]), 2), True),
    ],
)
def test_the_trees_of_these_tests_reach_both_verdicts(read: Tree, written: Tree, fits: bool) -> None:
    (_, writer), (_, reader) = decoder(written), decoder(read)
    assert (breaks(reader, writer) == []) == fits
