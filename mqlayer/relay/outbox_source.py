"""An outbox's identity and its source."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from mqlayer.errors import ConfigurationRefused, MqlayerError, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class OutboxSource:
    """An outbox's source, and its former ones. `term`: the life of its Postgres, see `docs/design/relay-term.md`."""

    source_id: int
    outbox_uuid: UUID
    name: str
    former: tuple[int, ...]
    term: str


def open_source(application: Connection, control: Database, address: str) -> OutboxSource:
    """Return an outbox's source; the first call creates it.

    Raises ConfigurationRefused for a copied database, or an outbox that continued under another identity. Raises
    StoreUnavailable if another relay renumbers it meanwhile.
    """
    application.execute(query("outbox_identity_put"))
    failpoint("relay.after_identity")
    row = application.execute(query("outbox_identity")).fetchone()
    if row is None:
        raise MqlayerError("the outbox has no identity: somebody removed it while the relay started")
    failpoint("relay.before_source")
    outbox_uuid, name, cluster = row
    former = end_former_sources(application, control)
    facts = {"outbox_uuid": outbox_uuid, "name": name, "cluster": cluster, "goes_on": bool(former)}
    with control.connection() as connection:
        connection.execute(query("source_open_outbox"), facts)
        failpoint("relay.after_source")
        known = connection.execute(query("source_of_outbox"), facts).fetchone()
    if known is None:
        if application.execute(query("outbox_identity_now"), facts).fetchone() is None:
            raise StoreUnavailable(address, "its outbox was numbered anew while the relay started")
        refuse_former(control, outbox_uuid, address)
        raise StoreUnavailable(address, "the source of its outbox was closed while the relay started")
    source_id, home = known
    refuse_copy(address, home, cluster, source_id)
    return OutboxSource(source_id, outbox_uuid, name, former, term_of(application))


def term_of(application: Connection) -> str:
    """Return the term: each start or crash recovery of Postgres changes it."""
    row = application.execute(query("outbox_term")).fetchone()
    return str(row[0]) if row is not None else ""


def refuse_other_term(application: Connection, source: OutboxSource, address: str) -> None:
    """Raise StoreUnavailable unless the session's source and term still hold.

    Call it after a read, to prove the rows: another relay may renumber, and a pooler may hide a fail-over.
    """
    # `topics/outbox_resend.py` checks the identity only: a recovery notes the timeline at its end, after arming nodes.
    # A relay's rows are not needed meanwhile, so a relay can wait.
    row = application.execute(query("outbox_term_now"), {"outbox_uuid": source.outbox_uuid}).fetchone()
    if row is None:
        raise StoreUnavailable(address, "its outbox goes on under other numbers since, or it is another server")
    if row[0] != source.term:
        raise StoreUnavailable(address, "it was started again, or recovered from a crash")


def end_former_sources(application: Connection, control: Database) -> tuple[int, ...]:
    """Close and return the sources an outbox had before adoption or recovery.

    Only former primaries and backups have their rows; relays there are refused.
    """
    row = application.execute(query("outbox_server")).fetchone()
    if row is None or not row[3]:
        return ()
    with control.connection() as connection:
        connection.execute(query("sources_close_former"), {"outboxes": row[3]})
        found = connection.execute(query("sources_of_outboxes"), {"outboxes": row[3]}).fetchall()
    return tuple(source_id for (source_id,) in found)


def refuse_former(control: Database, outbox_uuid: UUID, address: str) -> None:
    """Raise ConfigurationRefused if the outbox continued under another identity."""
    with control.connection() as connection:
        found = connection.execute(query("sources_of_outboxes"), {"outboxes": [outbox_uuid]}).fetchall()
    if found:
        raise ConfigurationRefused(
            address,
            "the outbox's identity",
            str(outbox_uuid),
            "one in force: the outbox went on under another, so this database is a former primary or an older backup. "
            "Stop it; if it took the original's place, run `mqlayer outbox adopt`",
        )


def refuse_copy(address: str, home: str, cluster: str, source_id: int) -> None:
    """Raise ConfigurationRefused outside the source's cluster and database."""
    if home != cluster:
        raise ConfigurationRefused(
            address,
            "the outbox's home (cluster/database)",
            cluster,
            f"{home!r}, where source {source_id} belongs: this database is a copy. "
            "If it took the original's place, run `mqlayer outbox adopt`; if the original lives on, "
            "run `mqlayer outbox renew`, which gives the copy an identity of its own and empties its outbox",
        )
