"""Marks of a partition on an unavailable node, proven by its outbox.

Relayed messages are durable in the partition; the outbox holds all later ones. For a lost node, successors start at the
outbox's first row. Every LP has a mark, also 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from mqlayer.domain.route_changes import ChangeMode
from mqlayer.errors import ConfigurationRefused, Conflict, StoreUnavailable
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.topics.outbox_access import borrow_outbox


@dataclass(frozen=True, slots=True)
class OutboxProof:
    """Proof for a range of LPs. `marks`: "<source>:<lp>" -> highest seq not to resend.

    `resent`: relayed messages that successors get again. `only_on_node`: relayed messages no longer in the outbox.
    """

    marks: dict[str, int]
    resent: int
    only_on_node: int
    outbox_uuid: UUID | None

    def counts(self) -> dict[str, int]:
        """Return `resent` and `only_on_node`."""
        return {"resent": self.resent, "only_on_node": self.only_on_node}


def refuse_unproven(database: Database) -> None:
    """Raise Conflict if direct producers may have published: no outbox proves their marks."""
    with database.connection() as connection:
        row = connection.execute(query("direct_sources_live")).fetchone()
    if row and row[0]:
        raise Conflict(
            "direct producers may have published there, and nothing proves how far",
            "wait for the node, or go on with --accept-loss: they are told of a loss and go on anew",
        )


def prove(
    connection: Connection, application: Database | None, topic_id: int, lp_from: int, lp_to: int, mode: ChangeMode
) -> OutboxProof:
    """Return the only outbox's proof.

    Raises Conflict for several outboxes, StoreUnavailable without a connection, ConfigurationRefused if it leads to
    another outbox.
    """
    outboxes = connection.execute(query("outbox_sources")).fetchall()
    if len(outboxes) > 1:
        raise Conflict(
            f"{len(outboxes)} outboxes may publish to the topic: one of them can't prove the marks of all",
            "wait for the node to come back",
        )
    if not outboxes:
        return OutboxProof({}, 0, 0, None)
    source_id, outbox_uuid = outboxes[0]
    if application is None:
        raise StoreUnavailable("the outbox", "this process has no connection to the application's database")
    with borrow_outbox(application, outbox_uuid) as outbox:
        if outbox is None:
            raise ConfigurationRefused(
                application.address, "the outbox", "another one", f"{outbox_uuid}: set MQLAYER_APP_DSN"
            )
        facts = {"topic_id": topic_id, "lp_from": lp_from, "lp_to": lp_to}
        rows = outbox.execute(query("outbox_proof"), facts).fetchall()
    marks, resent, only_on_node = {}, 0, 0
    for lp, relayed, floor in rows:
        marks[f"{source_id}:{lp}"] = min(relayed, floor) if mode == "lost" else relayed
        resent += max(0, relayed - floor)
        only_on_node += min(relayed, floor)
    return OutboxProof(marks, resent, only_on_node, outbox_uuid)


def retain_unproven(application: Database, topic_id: int, proof: OutboxProof) -> None:
    """Lower the outbox's relayed seqs to the marks, so it keeps later rows."""
    lps = [int(name.split(":")[1]) for name in proof.marks]
    seqs = list(proof.marks.values())
    facts = {"outbox_uuid": proof.outbox_uuid, "topic_ids": [topic_id] * len(lps), "lps": lps, "seqs": seqs}
    with application.connection() as outbox:
        outbox.execute(query("relayed_lower"), facts)
