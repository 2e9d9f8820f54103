"""The protocol versions that a schema serves, and this process's part in them (docs/design/upgrades.md)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from mqlayer.domain.protocol import PROTOCOL, RELEASE, Feature, ProtocolRange, ServedProtocols
from mqlayer.errors import SchemaMismatch, VersionRefused
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query

FinalizeAnswer = Literal["finalized", "draining", "blocked"]
_READ: Final = {"control": "protocol_control", "application": "protocol_application"}
SERVED: Final = 3
"""Columns of a row that make ServedProtocols."""


@dataclass(frozen=True, slots=True)
class SchemaProtocols:
    """A schema's versions; `age_s`: seconds since the newest was prepared."""

    served: ServedProtocols
    expanded_at: datetime
    finalized_at: datetime | None
    age_s: float


def read_protocols(connection: Connection, schema: str) -> SchemaProtocols:
    """Return the versions that a schema serves. Raises SchemaMismatch without a row."""
    row = connection.execute(query(_READ[schema])).fetchone()
    if row is None or row[1] == 0:
        raise SchemaMismatch("postgres", f"an unfinished {schema} schema", "a whole one", "run `mqlayer migrate`")
    return SchemaProtocols(ServedProtocols(*row[:SERVED]), *row[SERVED:])


def refuse_unserved(served: ServedProtocols, schema: str, address: str) -> None:
    """Raise VersionRefused if a schema does not serve this code."""
    fix = served.refuses(PROTOCOL)
    if fix:
        shown = f"{schema} protocol {ProtocolRange(served.serves_from, served.serves_to)}"
        raise VersionRefused(address, shown, f"protocol {PROTOCOL}", fix)


def code_facts() -> dict[str, Any]:
    """Return what a row of this process says of its code."""
    return {"version": RELEASE, "least": PROTOCOL.least, "most": PROTOCOL.most}


class InForce:
    """The version that this process acts on: the highest that it read as in force. Thread-safe."""

    def __init__(self, version: int = 1) -> None:
        self.version = version

    def note(self, version: int) -> None:
        """Act on a version from now on; it never falls."""
        self.version = max(self.version, min(version, PROTOCOL.most))

    def has(self, feature: Feature) -> bool:
        """Whether to write a feature's form."""
        return self.version >= feature.since
