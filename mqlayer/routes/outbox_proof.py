"""Marks of a partition whose node can't be asked, as its outbox proves them.

What is recorded as relayed is in the partition, durably; what is beyond it the outbox still holds, so a successor with
these marks gets it again. For a node that is lost for good the successor begins where the outbox's rows begin, and gets
all of them. Every LP is named, also with 0: whatever an outbox has beyond its mark is the successor's business.
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
    """What an outbox proves of a range of LPs.

    `marks`: "<source>:<lp>" -> highest seq that successors need not get. `resent`: messages that were in the partition
    and go to the successors once more. `only_on_node`: messages that were relayed and are not in the outbox any more.
    `outbox_uuid`: which outbox, None where there is none.
    """

    marks: dict[str, int]
    resent: int
    only_on_node: int
    outbox_uuid: UUID | None

    def counts(self) -> dict[str, int]:
        """Return what is sent again, and what was only there."""
        return {"resent": self.resent, "only_on_node": self.only_on_node}


def refuse_unproven(database: Database) -> None:
    """Raise Conflict where direct producers may have published: no outbox proves their marks."""
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
    """Return what the one outbox of this system proves.

    Raises Conflict where several outboxes may publish, StoreUnavailable where this process can't read the outbox,
    ConfigurationRefused where it reads another one.
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
    """Record in the outbox that Redis holds no more than what is proven: the rest is not to be rotated away."""
    lps = [int(name.split(":")[1]) for name in proof.marks]
    seqs = list(proof.marks.values())
    facts = {"outbox_uuid": proof.outbox_uuid, "topic_ids": [topic_id] * len(lps), "lps": lps, "seqs": seqs}
    with application.connection() as outbox:
        outbox.execute(query("relayed_lower"), facts)
