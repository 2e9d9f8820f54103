"""Which outbox this process reads: its numbers mean something only to the source that it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query


@contextmanager
def lent_outbox(application: Database | None, outbox_uuid: UUID) -> Iterator[Connection | None]:
    """Lend a connection to a source's outbox; None where this process reads another one, or none at all."""
    if application is None:
        yield None
        return
    with application.connection() as outbox:
        identity = outbox.execute(query("outbox_identity")).fetchone()
        yield outbox if identity is not None and identity[0] == outbox_uuid else None
