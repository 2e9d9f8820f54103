"""All instruments: name, kind, unit, labels. The page 'Metrics' shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
Place = Literal["process", "exporter"]

TOPIC: Final = "messaging.destination.name"
GROUP: Final = "messaging.consumer.group.name"
OPERATION: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
SYSTEM: Final = "messaging.system"
ERROR: Final = "error.type"

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Those of the messaging conventions but 0.075, 0.75 and 7.5: an exporter has few series."""
DELAY_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)


class Instrument(NamedTuple):
    """One instrument; `place`: its processes."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    place: Place
    text: str

    @property
    def series(self) -> str:
        """Its name in Prometheus, a histogram's without suffix."""
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        total = "_total" if self.kind == "counter" else ""
        return self.name.replace(".", "_") + unit + total


_OF_GROUP: Final = ("topic", "group")

_ALL: Final = (
    Instrument(
        "messaging.client.sent.messages", "counter", "{message}", (SYSTEM, OPERATION, TOPIC, ERROR), "process",
        "Messages of answered appends; with error.type: not stored by that append",
    ),
    Instrument(
        "messaging.client.consumed.messages", "counter", "{message}", (SYSTEM, OPERATION, TOPIC, GROUP), "process",
        "Deliveries to handlers that were handled, failed or paused their key; messages that receivers got",
    ),
    Instrument(
        "messaging.client.operation.duration", "histogram", "s",
        (SYSTEM, OPERATION, OPERATION_TYPE, TOPIC, GROUP, ERROR), "process",
        "Calls to a node: send (an append), receive (of receivers) and settle",
    ),
    Instrument(
        "messaging.process.duration", "histogram", "s",
        (SYSTEM, OPERATION, OPERATION_TYPE, TOPIC, GROUP, ERROR), "process",
        "Turns of a worker in handlers; quick ones are added up to 5 ms",
    ),
    Instrument(
        "mqlayer.consumer.messages", "counter", "{message}", (*_OF_GROUP, "outcome"), "process",
        "Messages by what became of them in this process",
    ),
    Instrument(
        "mqlayer.consumer.failures", "counter", "{attempt}", (*_OF_GROUP, ERROR), "process",
        "Failed attempts by the class of their error",
    ),
    Instrument("mqlayer.consumer.settled", "counter", "{message}", _OF_GROUP, "process", "Messages settled on nodes"),
    Instrument(
        "mqlayer.consumer.fenced", "counter", "{refusal}", _OF_GROUP, "process",
        "Refusals because a later owner had the partition",
    ),
    Instrument(
        "mqlayer.consumer.leases.lost", "counter", "{lease}", _OF_GROUP, "process", "Leases of members that ran out"
    ),
    Instrument(
        "mqlayer.consumer.parking.full", "counter", "{refusal}", _OF_GROUP, "process", "Keys that found no room to park"
    ),
    Instrument("mqlayer.consumer.partitions", "gauge", "{partition}", _OF_GROUP, "process", "Partitions served"),
    Instrument(
        "mqlayer.producer.messages", "counter", "{message}", ("topic", "outcome", ERROR), "process",
        "Messages of direct producers by what became of them; failed ones by class of error",
    ),
    Instrument("mqlayer.producer.pending", "gauge", "{message}", (), "process", "Messages that await their outcome"),
    Instrument("mqlayer.relay.lp_sets", "gauge", "{lp_set}", (), "process", "LP sets that this relay holds, of 16"),
    Instrument(
        "mqlayer.relay.delay", "histogram", "s", (), "process",
        "Age of the oldest row of each chunk when a relay sends it",
    ),
    Instrument(
        "mqlayer.relay.progress.waits", "counter", "{wait}", ("durability",), "process",
        "Waits for a durability class that ended without it; rows of the outbox stay meanwhile",
    ),
    Instrument(
        "mqlayer.relay.progress.delay", "gauge", "s", ("durability",), "process",
        "How long a node has not confirmed what waits for a durability class; a second or two while all is well",
    ),
    Instrument(
        "mqlayer.large_bodies.moved", "counter", "By", ("operation", "store"), "process",
        "Bytes of large bodies that this process wrote, read or removed, by store",
    ),
    Instrument("mqlayer.process.ready", "gauge", "1", (), "process", "1 if /ready answers 200"),
    Instrument("mqlayer.group.lag", "gauge", "{message}", _OF_GROUP, "exporter", "Unsettled messages"),
    Instrument("mqlayer.group.lag.age", "gauge", "s", _OF_GROUP, "exporter", "Age of the oldest unsettled message"),
    Instrument(
        "mqlayer.group.unknown_partitions", "gauge", "{partition}", _OF_GROUP, "exporter",
        "Partitions whose node does not answer, or lacks them",
    ),
    Instrument("mqlayer.group.members", "gauge", "{member}", _OF_GROUP, "exporter", "Members with a valid lease"),
    Instrument(
        "mqlayer.group.deployment.members", "gauge", "{member}", (*_OF_GROUP, "deployment"), "exporter",
        "Members with a valid lease, by the deployment that their process names",
    ),
    Instrument(
        "mqlayer.group.members_wanted", "gauge", "{member}", _OF_GROUP, "exporter",
        "Members that the group needs for its rate and lag",
    ),
    Instrument(
        "mqlayer.group.partitions", "gauge", "{partition}", _OF_GROUP, "exporter", "Partitions that are not drained"
    ),
    Instrument(
        "mqlayer.group.stuck_partitions", "gauge", "{partition}", (*_OF_GROUP, "reason"), "exporter",
        "Partitions whose head does not move, by reason",
    ),
    Instrument(
        "mqlayer.group.breaker.open", "gauge", "s", _OF_GROUP, "exporter",
        "How long the circuit breaker has not been closed; 0: closed",
    ),
    Instrument("mqlayer.group.parked.keys", "gauge", "{key}", _OF_GROUP, "exporter", "Parked keys"),
    Instrument("mqlayer.group.parked.messages", "gauge", "{message}", _OF_GROUP, "exporter", "Parked messages"),
    Instrument(
        "mqlayer.group.parked.waiting_keys", "gauge", "{key}", _OF_GROUP, "exporter",
        "Parked keys that wait for an operator",
    ),
    Instrument(
        "mqlayer.group.parked.overdue", "gauge", "s", _OF_GROUP, "exporter",
        "How long the first due key has not been tried",
    ),
    Instrument("mqlayer.group.dead", "gauge", "{message}", _OF_GROUP, "exporter", "Dead messages not sent again"),
    Instrument(
        "mqlayer.group.events", "counter", "{message}", (*_OF_GROUP, "outcome"), "exporter",
        "Messages that Postgres counted, over all processes",
    ),
    Instrument("mqlayer.partition.lag", "gauge", "{message}", (*_OF_GROUP, "partition"), "exporter",
               "Unsettled messages of a partition; with --partitions"),
    Instrument("mqlayer.partition.lag.age", "gauge", "s", (*_OF_GROUP, "partition"), "exporter",
               "Age of a partition's oldest unsettled message; with --partitions"),
    Instrument(
        "mqlayer.postgres.commit_wait", "gauge", "s", ("schema",), "exporter",
        "How long the first commit waits for a synchronous standby; needs `pg_read_all_stats`",
    ),
    Instrument("mqlayer.outbox.backlog", "gauge", "{message}", (), "exporter", "Committed rows not yet relayed"),
    Instrument("mqlayer.outbox.age", "gauge", "s", (), "exporter", "Age of the oldest row not yet relayed"),
    Instrument("mqlayer.outbox.quarantined", "gauge", "{lp}", (), "exporter", "LPs behind a quarantined row"),
    Instrument("mqlayer.outbox.voided", "gauge", "{message}", (), "exporter", "Passed-over rows, for an operator"),
    Instrument(
        "mqlayer.large_bodies.stored", "gauge", "By", ("state", "store"), "exporter",
        "Bytes of large bodies: kept, or removing (no message needs them, and the store has them still)",
    ),
    Instrument("mqlayer.relays", "gauge", "{relay}", (), "exporter", "Relays with a valid lease"),
    Instrument("mqlayer.relays.unowned_lp_sets", "gauge", "{lp_set}", (), "exporter", "LP sets of no living relay"),
    Instrument(
        "mqlayer.nodes", "gauge", "{node}", ("state",), "exporter",
        "Nodes: armed, unarmed, lost; of these, draining; of the armed, unreachable",
    ),
    Instrument(
        "mqlayer.route_changes", "counter", "{change}", ("outcome",), "exporter", "Ended route changes: done, dropped"
    ),
    Instrument(
        "mqlayer.route_changes.unfinished", "gauge", "{change}", (), "exporter", "Route changes that have not ended"
    ),
    Instrument("mqlayer.route_changes.age", "gauge", "s", (), "exporter", "Age of the oldest unfinished route change"),
    Instrument(
        "mqlayer.route_changes.longest_pause", "gauge", "s", (), "exporter",
        "Longest time between seal and opening, of the changes of the last hour",
    ),
    Instrument(
        "mqlayer.autopilot.changes", "counter", "{change}", ("topic",), "exporter",
        "Route changes that were made automatically, of topics with automatic routes",
    ),
    Instrument(
        "mqlayer.autopilot.stopped", "gauge", "1", ("topic",), "exporter", "1 if automatic routes stopped themselves"
    ),
    Instrument(
        "mqlayer.autopilot.hot_lps", "gauge", "{lp}", ("topic",), "exporter",
        "LPs hotter than a partition can serve, where no split helps",
    ),
    Instrument("mqlayer.archive.delay", "gauge", "s", ("topic",), "exporter", "Since an archiver reached the end"),
    Instrument(
        "mqlayer.archive.export_delay", "gauge", "s", ("topic", "export"), "exporter",
        "Since an export that lacks batches got the last ones",
    ),
    Instrument("mqlayer.archive.gaps", "gauge", "{gap}", ("topic",), "exporter", "Gaps that wait for an operator"),
    Instrument(
        "mqlayer.schedule.faults", "gauge", "1", ("schedule",), "exporter",
        "1 if the last run of a schedule of analytics found faults",
    ),
    Instrument(
        "mqlayer.schedule.failed", "gauge", "1", ("schedule",), "exporter",
        "1 if the last run of a schedule of analytics failed",
    ),
    Instrument(
        "mqlayer.schedule.overdue", "gauge", "s", ("schedule",), "exporter",
        "How long a schedule of analytics is due without a run",
    ),
    Instrument(
        "mqlayer.processes", "gauge", "{process}", ("kind", "version", "protocol"), "exporter",
        "Living members, relays, workers, producers and receivers, by release and highest protocol version",
    ),
    Instrument(
        "mqlayer.protocol", "gauge", "1", ("state",), "exporter",
        "Protocol versions of the control schema: in_force, and prepared by the last migration",
    ),
    Instrument("mqlayer.jobs.age", "gauge", "s", ("name",), "exporter", "Since a periodic job ran"),
    Instrument("mqlayer.jobs.late", "gauge", "{job}", (), "exporter", "Periodic jobs that are overdue"),
    Instrument("mqlayer.versions.overdue", "gauge", "{entity}", (), "exporter", "Entities that miss a version"),
    Instrument("mqlayer.exporter.sample.age", "gauge", "s", (), "exporter", "Age of the exporter's last full sample"),
    Instrument("mqlayer.exporter.sample.duration", "gauge", "s", (), "exporter", "Time that the last sample took"),
    Instrument("mqlayer.exporter.failures", "counter", "{sample}", (), "exporter", "Samples that failed"),
)  # fmt: skip

CATALOG: Final[Mapping[str, Instrument]] = {one.name: one for one in _ALL}
"""By name."""
