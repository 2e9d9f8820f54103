"""`topic schema`: the JSON Schema of a topic's bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from mqlayer.cli.actor import actor
from mqlayer.cli.option_rules import excludes
from mqlayer.cli.options import TopicArgument
from mqlayer.cli.output import JsonOption, echo, show_rows
from mqlayer.cli.runtime import runtime_here
from mqlayer.domain.body_schemas import JsonSchema
from mqlayer.domain.codecs import TypedBodies
from mqlayer.domain.schema_versions import FieldChange, SchemaVersion, changes, refusals
from mqlayer.errors import IncompatibleSchema, InvalidInput, NotFound
from mqlayer.postgres.database import Database
from mqlayer.runtime.named_objects import load_named
from mqlayer.topics.schemas import TopicSchemas, incompatible, load_schemas, store_schema

_TWO: Final = re.compile(r"(\d+)\.\.(\d+)")
_ALONE: Final = "each says what to do"


@excludes("--store", "--version", "--all", "--diff", "--json", why=_ALONE)
@excludes("--all", "--version", "--diff", why=_ALONE)
def schema(
    topic: TopicArgument,
    version: Annotated[int | None, typer.Option(min=1, help="This version; without it the latest.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="List all versions: who stored which, and when.")] = False,
    diff: Annotated[
        str | None,
        typer.Option(metavar="N..M|MODULE:NAME", help="Show each changed field: of two versions, or of a Topic."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Store the schema of this Topic as the next version.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the JSON Schema of a topic's bodies, compare it, or store it.

    With --diff MODULE:NAME, exit code 1 if the topic's mode refuses it.
    """
    with runtime_here() as runtime:
        if store is not None:
            _store(runtime.control, topic, store)
            return
        found = load_schemas(runtime.control, topic)
    if diff is not None:
        _diff(topic, found, version, diff, as_json=as_json)
    elif all_:
        rows = (_facts(topic, one, as_json=as_json) for one in found.versions)
        show_rows(rows, as_json=as_json, nothing=_nothing(topic))
    elif version is None and not found.versions:
        show_rows([], as_json=as_json, nothing=_nothing(topic))
    else:
        _show(topic, found, _version(topic, found, version), as_json=as_json)


def _store(control: Database, topic: str, path: str) -> None:
    stored = store_schema(control, topic, _schema_at(topic, path), actor=actor(), anew=True)
    echo(f"the schema of {path} is version {stored} of topic {topic}")


def _show(topic: str, found: TopicSchemas, shown: SchemaVersion, *, as_json: bool) -> None:
    if as_json:
        show_rows([_facts(topic, shown, as_json=True) | {"topic_mode": found.mode}], as_json=True, nothing="")
        return
    at = "" if shown.stored_at is None else shown.stored_at.isoformat(timespec="seconds")
    echo(f"version {shown.version} of {len(found.versions)}, stored by {shown.actor} at {at}; mode {found.mode}")
    echo(json.dumps(shown.schema, indent=2), lines=True)


def _facts(topic: str, one: SchemaVersion, *, as_json: bool) -> dict[str, Any]:
    at = None if one.stored_at is None else one.stored_at.isoformat(timespec="seconds")
    facts = {"version": one.version, "mode": one.mode, "stored_at": at, "actor": one.actor, "role": one.role}
    return {"topic": topic} | facts | {"schema": one.schema} if as_json else facts


def _diff(topic: str, found: TopicSchemas, version: int | None, wanted: str, *, as_json: bool) -> None:
    if two := _TWO.fullmatch(wanted):
        if version is not None:
            raise InvalidInput(f"--diff {wanted} says both versions: leave --version out")
        before, after = (_version(topic, found, int(number)) for number in two.groups())
        _show_changes(changes(before.schema, after.schema), as_json=as_json)
        return
    wanted_schema = _schema_at(topic, wanted)
    _show_changes(changes(_version(topic, found, version).schema, wanted_schema), as_json=as_json)
    if against := refusals(wanted_schema, found.versions, found.mode):
        _refuse(incompatible(topic, found.mode, against))


def _refuse(error: IncompatibleSchema) -> None:
    echo(f"mqlayer: {error}", err=True)
    raise typer.Exit(1)


def _show_changes(found: list[FieldChange], *, as_json: bool) -> None:
    rows = (_json_row(one) if as_json else _row(one) for one in found)
    show_rows(rows, as_json=as_json, nothing="no field differs")


def _json_row(one: FieldChange) -> dict[str, Any]:
    return {"breaks_new_readers": bool(one.new_readers), "breaks_old_readers": bool(one.old_readers)} | asdict(one)


def _row(one: FieldChange) -> dict[str, Any]:
    shown = {"added": one.after, "removed": one.before}.get(one.change, f"{one.before} → {one.after}")
    return {"field": one.path, "change": f"{one.change}: {shown}", "breaks": "; ".join(_breaks(one)) or "nobody"}


def _breaks(one: FieldChange) -> Iterator[str]:
    if one.new_readers:
        yield f"new readers of old bodies ({one.new_readers})"
    if one.old_readers:
        yield f"old readers of new bodies ({one.old_readers})"


def _version(topic: str, found: TopicSchemas, version: int | None) -> SchemaVersion:
    wanted = version or len(found.versions)
    for one in found.versions:
        if one.version == wanted:
            return one
    raise NotFound(
        "version", wanted, _nothing(topic) if not found.versions else f"see mqlayer topic schema {topic} --all"
    )


def _schema_at(topic: str, path: str) -> JsonSchema:
    named = load_named(path, "topic")
    if not isinstance(named, TypedBodies):
        raise InvalidInput(f"{path!r} is a {type(named).__name__}: give the name of a mqlayer.Topic")
    if named.name != topic:
        raise InvalidInput(f"{path} is of topic {named.name!r}, not of {topic!r}")
    found = named.schema
    if found is None:
        raise InvalidInput(f"the bodies of {path} have no JSON Schema: a codec gives one by a method json_schema()")
    return found


def _nothing(topic: str) -> str:
    return (
        "no schema is stored: a consumer of a typed topic stores its own at its start, "
        f"or mqlayer topic schema {topic} --store MODULE:NAME"
    )
