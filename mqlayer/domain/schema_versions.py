"""Versions of a topic's schema: which may follow, and what changed between two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, get_args

from mqlayer.domain.body_schemas import JsonSchema, schema_text
from mqlayer.domain.schema_comparison import ROOT, Break, alternatives, breaks, shown_type

SchemaMode = Literal["backward", "forward", "full", "none"]
"""backward: new readers read old bodies. forward: old readers read new bodies. full: both. none: neither is asked."""
SCHEMA_MODES: Final[tuple[SchemaMode, ...]] = get_args(SchemaMode)
DEFAULT_MODE: Final[SchemaMode] = "backward"
_LEFT_OUT: Final = frozenset(("type", "enum", "properties", "required", "items", "prefixItems", "default", "$defs"))


class SchemaVersion(NamedTuple):
    """A stored version: the mode that accepted it, and who brought it, by its own word and as a role of Postgres."""

    version: int
    mode: SchemaMode
    schema: JsonSchema
    actor: str = ""
    role: str = ""
    stored_at: datetime | None = None


class Refusal(NamedTuple):
    """A version that a schema does not go with: whose readers fail, and where."""

    version: int
    readers: Literal["new", "old"]
    breaks: tuple[Break, ...]


def refusals(schema: JsonSchema, known: Sequence[SchemaVersion], mode: SchemaMode) -> list[Refusal]:
    """Return what stands against a schema in a mode; nothing for one of the versions that hold.

    Those are the versions from the last on that mode `none` accepted: with it, an incompatible change began anew.
    """
    holding = versions_that_hold(known)
    if mode == "none" or any(one.schema == schema for one in holding):
        return []
    return [refusal for one in holding for refusal in _against(schema, one, mode) if refusal.breaks]


def versions_that_hold(known: Sequence[SchemaVersion]) -> list[SchemaVersion]:
    """Return the versions that a new one is compared with, the oldest first."""
    first = max((one.version for one in known if one.mode == "none"), default=0)
    return [one for one in known if one.version >= first]


def _against(schema: JsonSchema, known: SchemaVersion, mode: SchemaMode) -> Iterator[Refusal]:
    if mode in ("backward", "full"):
        yield Refusal(known.version, "new", tuple(breaks(schema, known.schema)))
    if mode in ("forward", "full"):
        yield Refusal(known.version, "old", tuple(breaks(known.schema, schema)))


@dataclass(frozen=True, slots=True)
class FieldChange:
    """A field that differs between two schemas. A reason is empty where those readers go on."""

    path: str
    change: Literal["added", "removed", "changed"]
    before: str
    after: str
    new_readers: str = ""
    old_readers: str = ""


def changes(before: JsonSchema, after: JsonSchema) -> list[FieldChange]:
    """Return the fields that differ, by path, and why new readers fail on old bodies, or old ones on new. Raises
    InvalidInput."""
    was, now = _outline(before), _outline(after)
    new, old = _by_path(breaks(after, before)), _by_path(breaks(before, after))
    paths = {path for path in was.keys() | now.keys() if was.get(path) != now.get(path)} | new.keys() | old.keys()
    found = []
    for path in sorted(paths):
        change: Literal["added", "removed", "changed"] = "changed"
        if path not in was or path not in now:
            change = "removed" if path in was else "added"
        # Of what came or went as a whole, the whole is named.
        if not (change != "changed" and _parent(path) in paths and path not in new and path not in old):
            facts = was.get(path, ""), now.get(path, ""), new.get(path, ""), old.get(path, "")
            found.append(FieldChange(path, change, *facts))
    return found


def _by_path(found: Iterable[Break]) -> dict[str, str]:
    reasons: dict[str, list[str]] = {}
    for path, reason in found:
        reasons.setdefault(path, []).append(reason)
    return {path: "; ".join(texts) for path, texts in reasons.items()}


def _parent(path: str) -> str:
    return path[: max(path.rfind("."), path.rfind("["))]


@dataclass(slots=True)
class _Outliner:
    """Collects what a schema says of each field."""

    root: JsonSchema
    texts: dict[str, list[str]] = field(default_factory=dict)
    within: list[str] = field(default_factory=list)

    def add(self, schema: Any, path: str, notes: str = "") -> None:
        """Add a field and those in it; one that holds itself is not followed again."""
        text = schema_text(schema)
        if text in self.within:
            return
        self.within.append(text)
        for plain in alternatives(self.root, schema):
            self.texts.setdefault(path, []).append(_shown(plain))
            self._add_parts(plain, path)
        if notes:
            self.texts.setdefault(path, []).append(notes)
        self.within.pop()

    def _add_parts(self, plain: JsonSchema, path: str) -> None:
        for name, schema in plain.get("properties", {}).items():
            self.add(schema, f"{path}.{name}", "" if name in plain.get("required", ()) else _OPTIONAL)
        for index, schema in enumerate(plain.get("prefixItems", ())):
            self.add(schema, f"{path}[{index}]")
        for key in ("items", "additionalProperties"):
            if isinstance(plain.get(key), dict):
                self.add(plain[key], f"{path}[]")


_OPTIONAL: Final = "optional"


def _outline(schema: JsonSchema) -> dict[str, str]:
    outliner = _Outliner(schema)
    outliner.add(schema, ROOT)
    return {path: _joined(texts) for path, texts in outliner.texts.items()}


def _joined(texts: list[str]) -> str:
    kinds = " or ".join(dict.fromkeys(text for text in texts if text != _OPTIONAL))
    return f"{kinds}, optional" if _OPTIONAL in texts else kinds


def _shown(plain: Mapping[str, Any]) -> str:
    rules = [f"{key} {schema_text(value)}" for key, value in sorted(plain.items()) if key not in _LEFT_OUT]
    rules = [rule for rule in rules if not rule.startswith("additionalProperties {")]
    return ", ".join([shown_type(dict(plain)), *rules])
