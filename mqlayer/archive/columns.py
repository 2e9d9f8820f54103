"""Columns for the archive's readers, with Spark's SQL types; all nullable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

from mqlayer.errors import InvalidInput

ArchiveTable = Literal["records", "outcomes", "lineage"]

COLUMNS: Final[Mapping[ArchiveTable, Mapping[str, str]]] = {
    "records": {
        "topic": "string",
        "version": "int",
        "partition": "int",
        "offset": "bigint",
        "source": "bigint",
        "lp": "int",
        "seq": "bigint",
        "published_at": "timestamp",
        "archived_at": "timestamp",
        "key": "string",
        "tags": "array<string>",
        "headers": "map<string,string>",
        "body": "binary",
        "batch": "bigint",
    },
    "outcomes": {
        "topic": "string",
        "group": "string",
        "partition": "int",
        "first_offset": "bigint",
        "last_offset": "bigint",
        "outcome": "string",
        "attempts": "int",
        "delivered_at": "timestamp",
        "settled_at": "timestamp",
        "actor": "string",
        "reason": "string",
        "epoch": "bigint",
        "position": "bigint",
    },
    "lineage": {
        "topic": "string",
        "partition": "int",
        "lp_from": "int",
        "lp_to": "int",
        "first_version": "int",
        "last_version": "int",
        "parents": "array<int>",
    },
}

SNAPSHOT_QUERIES: Final[Mapping[ArchiveTable, str]] = {
    "records": "snapshot_records",
    "outcomes": "snapshot_outcomes",
    "lineage": "snapshot_lineage",
}
WHOLE_QUERY: Final = "snapshot_records_whole"
"""For records of a whole snapshot."""
STREAM_QUERIES: Final[Mapping[ArchiveTable, str]] = {"records": "stream_records", "outcomes": "stream_outcomes"}


def check_table(table: str) -> ArchiveTable:
    """Return a valid table name. Raises InvalidInput."""
    for name in get_args(ArchiveTable):
        if name == table:
            return name  # type: ignore[no-any-return]
    raise InvalidInput(f"option table: there is no {table!r}; choose one of {', '.join(COLUMNS)}")


def chosen_columns(table: ArchiveTable, wanted: list[str] | None) -> dict[str, str]:
    """Return the wanted columns with types. Raises InvalidInput."""
    known = COLUMNS[table]
    unknown = [name for name in wanted or [] if name not in known]
    if unknown or (wanted is not None and not wanted):
        found = f"no {', '.join(map(repr, unknown))} in {table}" if unknown else "none is named"
        raise InvalidInput(f"option columns: {found}; choose from {', '.join(known)}")
    if wanted is not None and len(set(wanted)) < len(wanted):
        raise InvalidInput("option columns: a column stands twice in it; name each once")
    return {name: known[name] for name in wanted or known}
