"""Versions of the JSON Schema of a topic's bodies.

Each process compares its own schema with the stored ones, and stores it as the next version. Two that start at once
compare with the same versions, so that only one of them stores; the other looks again, and compares with that one too.
A change of the mode between makes it look again likewise. A process that ends in between has stored all or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mqlayer.domain.body_schemas import JsonSchema, schema_text
from mqlayer.domain.names import check_name
from mqlayer.domain.schema_versions import (
    SCHEMA_MODES,
    Refusal,
    SchemaMode,
    SchemaVersion,
    refusals,
    versions_that_hold,
)
from mqlayer.errors import Conflict, IncompatibleSchema, InvalidInput, NotFound
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

TRIES: Final = 50


class TopicSchemas(NamedTuple):
    """A topic's mode, and the versions of its schema, the oldest first."""

    mode: SchemaMode
    versions: list[SchemaVersion]


def load_schemas(database: Database, topic: str) -> TopicSchemas:
    """Return a topic's stored schema. Raises NotFound."""
    with database.connection() as connection:
        rows = connection.execute(query("topic_schemas"), {"name": check_name("topic", topic)}).fetchall()
    if not rows:
        raise _unknown(topic)
    versions = [
        SchemaVersion(version, mode, json.loads(text), *rest)
        for _, version, mode, text, *rest in rows
        if version is not None
    ]
    return TopicSchemas(rows[0][0], versions)


def store_schema(database: Database, topic: str, schema: JsonSchema, *, actor: str, anew: bool = False) -> int:
    """Store a normalized schema as the next version, unless it is one of the stored; return its version.

    `anew`: also where an incompatible version came after it, if the mode allows. Raises IncompatibleSchema, NotFound,
    PermissionDenied.
    """
    for _ in range(TRIES):
        mode, known = load_schemas(database, topic)
        stored = _version_of(schema, versions_that_hold(known))
        if stored is not None:
            return stored
        if found := refusals(schema, known, mode):
            raise incompatible(topic, mode, found)
        stored = _version_of(schema, known)
        if stored is not None and not anew:
            return stored
        version = 1 + max((one.version for one in known), default=0)
        if _put(database, topic, SchemaVersion(version, mode, schema, actor)):
            log.info("schema_stored", extra={"topic": topic, "version": version, "mode": mode})
            return version
    raise Conflict(f"the schema of topic {topic!r} changes all the time", "try again")


def incompatible(topic: str, mode: SchemaMode, found: Sequence[Refusal]) -> IncompatibleSchema:
    """Return the error that says what stands against a schema."""
    return IncompatibleSchema(topic, mode, [(one.version, one.readers, *each) for one in found for each in one.breaks])


def set_schema_mode(runtime: Runtime, topic: str, mode: SchemaMode) -> bool:
    """Change which readers the next schema may not break; return whether that changed anything. Audited.

    Stored versions stay. Raises InvalidInput, NotFound.
    """
    if mode not in SCHEMA_MODES:
        raise InvalidInput(f"{mode!r} is no mode of schemas: say one of {', '.join(SCHEMA_MODES)}")

    def work(connection: Connection) -> bool:
        row = connection.execute(query("topic_schema_mode"), {"name": topic}).fetchone()
        if row is None:
            raise _unknown(topic)
        if row[1] == mode:
            return False
        connection.execute(query("topic_schema_mode_set"), {"topic_id": row[0], "mode": mode})
        write_audit(
            connection, runtime.actor, "topic set", topic, {"schema_mode": mode, "before": {"schema_mode": row[1]}}
        )
        return True

    return runtime.control.transaction(work)


def _put(database: Database, topic: str, made: SchemaVersion) -> bool:
    facts: dict[str, Any] = {"topic": topic, "version": made.version, "mode": made.mode, "actor": made.actor}
    with database.connection() as connection:
        ((stored,),) = connection.execute(
            query("topic_schema_put"), facts | {"schema": schema_text(made.schema)}
        ).fetchall()
    return bool(stored)


def _version_of(schema: JsonSchema, known: list[SchemaVersion]) -> int | None:
    return next((one.version for one in reversed(known) if one.schema == schema), None)


def _unknown(topic: str) -> NotFound:
    return NotFound("topic", topic, f"create it: mqlayer topic create {topic}")
