"""All alerts: the rules of `examples/monitoring/alerts.yml`, and what the console shows besides.

Names, thresholds and advice stand here once; a test compares the rules and the page 'Respond to alerts'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Severity = Literal["critical", "warning", "note"]
"""Only the console has notes."""


class Alert(NamedTuple):
    """An alert. `above`: its threshold, `for_s`: how long it must last; `rule`: whether Prometheus has it."""

    name: str
    severity: Severity
    title: str
    advice: str
    above: float = 0.0
    for_s: float = 0.0
    rule: bool = True


_ALL: Final = (
    Alert(
        "MqlayerNodeAway", "critical", "A node is away",
        "Bring it back; workers and relays arm it within seconds, else mqlayer node rearm NAME says why not.",
        for_s=120,
    ),
    Alert(
        "MqlayerSchemaMismatch", "critical", "The schema and this code differ",
        "Run mqlayer migrate with the newer code, or restart the processes that run the older one.", rule=False,
    ),
    Alert(
        "MqlayerOutboxSuspect", "critical", "The outbox waits to be recovered",
        "Start a relay, which recovers the outbox, and arm the nodes that its log names.", rule=False,
    ),
    Alert(
        "MqlayerCommitsWait", "critical", "Commits wait for a synchronous standby",
        "Start the standby again; to go on without one, set synchronous_standby_names to '', and run SELECT "
        "pg_reload_conf().", above=5, for_s=60,
    ),
    Alert(
        "MqlayerOutboxLate", "critical", "Committed messages wait in the outbox",
        "Is a node away, or a partition full?", above=60, for_s=120,
    ),
    Alert(
        "MqlayerTransactionOpen", "critical", "An open transaction holds publishers up",
        "End it, and set idle_in_transaction_session_timeout for the role of its application; the doctor has the "
        "statement that ends it.", above=30, rule=False,
    ),
    Alert(
        "MqlayerNoRelay", "critical", "No relay lives", "Start mqlayer relay, or see in its log why it ends.", for_s=120
    ),
    Alert(
        "MqlayerNoMembers", "critical", "Messages wait, and the group has no member",
        "Start the consumers, or see why they end: mqlayer group members TOPIC GROUP shows the last ones.", for_s=300,
    ),
    Alert(
        "MqlayerBreakerOpen", "critical", "A circuit breaker is open",
        "Most keys of the group fail: repair the downstream service, or roll the release back; probes close it then. "
        "mqlayer group close-breaker TOPIC GROUP does so at once.", for_s=60,
    ),
    Alert(
        "MqlayerParkingFull", "critical", "No room to park",
        "Release or discard parked messages, or raise the limit with mqlayer group set.",
    ),
    Alert(
        "MqlayerJobsLate", "critical", "Periodic jobs are late",
        "Periodic jobs are late: a Celery worker, beat or its broker is missing.", for_s=120,
    ),
    Alert(
        "MqlayerExporterDown", "critical", "No exporter is scraped",
        "Start it, or look at its target in Prometheus: a wrong port, or a network rule.", for_s=120,
    ),
    Alert(
        "MqlayerRouteChangeStuck", "warning", "A route change has not ended",
        "The worker's job repair_routes goes on with it, and mqlayer route repair TOPIC does so at once.", above=300,
    ),
    Alert(
        "MqlayerPartitionsStuck", "warning", "Partitions are stuck",
        "For failing, the log of the owner says why (handler_failed); mqlayer key explain TOPIC KEY --group GROUP "
        "gives the next command.", for_s=300,
    ),
    Alert(
        "MqlayerAutopilotStopped", "warning", "Automatic routes stopped themselves",
        "mqlayer route why TOPIC says why; repair the cause, then mqlayer route auto TOPIC --on begins again.",
    ),
    Alert(
        "MqlayerKeyHot", "warning", "A key or LP is hotter than a partition can serve",
        "Divide the key, or make its handler faster: no split helps; mqlayer route why TOPIC names it.", for_s=600,
    ),
    Alert(
        "MqlayerPartitionHot", "warning", "A partition takes most of the load",
        "Split it: mqlayer route split TOPIC PARTITION --plan shows how the load would divide.", above=60, rule=False,
    ),
    Alert(
        "MqlayerLagGrows", "warning", "The lag grows",
        "Add members or handlers, or split a hot partition.",
        above=60, for_s=300,
    ),
    Alert(
        "MqlayerLagUnknown", "warning", "The lag of partitions is unknown",
        "The exporter gets no position of some partitions: their node is away, or it lost them.", for_s=300,
    ),
    Alert(
        "MqlayerFailureRate", "warning", "Attempts fail", "Did a release or a downstream service change?",
        above=0.05, for_s=600,
    ),
    Alert(
        "MqlayerKeysWaitForOperator", "warning", "Parked keys wait for an operator",
        "Repair the cause, then mqlayer parked release.", for_s=600,
    ),
    Alert(
        "MqlayerParkedKeysOverdue", "warning", "Parked keys are due, and no member tries them",
        "Members are missing, or Celery's worker does not run the job retry_scan.", above=300, for_s=300,
    ),
    Alert(
        "MqlayerDeadMessages", "warning", "Messages died",
        "mqlayer dead list TOPIC GROUP shows why; mqlayer dead redrive sends them again.",
    ),
    Alert(
        "MqlayerMessagesDropped", "warning", "Unsettled messages were dropped",
        "Add members, or raise the limits with mqlayer topic set.",
    ),
    Alert(
        "MqlayerOutboxQuarantined", "warning", "Outbox rows can't be sent",
        "mqlayer outbox quarantine list has the reason.",
    ),
    Alert(
        "MqlayerVersionsOverdue", "warning", "Entities miss a version",
        "mqlayer versions gaps names them.", for_s=600,
    ),
    Alert(
        "MqlayerAppendsRefused", "warning", "Nodes refuse appends",
        "Nodes refuse appends to a topic; error_type says why", above=1, for_s=600,
    ),
    Alert(
        "MqlayerArchiveGap", "warning", "The archive waits at a gap",
        "The archive misses records that a node lost, and waits for a decision: mqlayer archive gaps, then "
        "mqlayer archive accept-gap.",
    ),
    Alert(
        "MqlayerArchiveLate", "warning", "The archive is late",
        "Does Celery's worker run, and has the archive's disk room?", above=300, for_s=300,
    ),
    Alert(
        "MqlayerExportLate", "warning", "An export of the archive is late",
        "Does its schedule run, or has an export by hand an error: mqlayer archive export --to PATH. One that ended is "
        "forgotten by mqlayer archive forget-export PATH.", above=2 * 86_400,
    ),
    Alert(
        "MqlayerScheduleFaults", "critical", "A scheduled job found faults",
        "mqlayer analytics schedule runs NAME names the job and the snapshot; the job by hand on that snapshot names "
        "the records.",
    ),
    Alert(
        "MqlayerScheduleFailed", "warning", "A run of a schedule failed",
        "mqlayer analytics schedule runs NAME has the error; mqlayer analytics schedule run NAME tries it again.",
    ),
    Alert(
        "MqlayerScheduleLate", "warning", "A schedule is late",
        "Does Celery's worker run, and does a long run of another schedule go on?", above=3600,
    ),
    Alert(
        "MqlayerJobFailed", "warning", "A periodic job failed",
        "The job runs again at its next time; the worker's log has the whole error.", rule=False,
    ),
    Alert(
        "MqlayerSamplesMissing", "warning", "Samples are missing, so curves have a hole",
        "See that Celery's worker runs the job sample, each minute.", above=180, rule=False,
    ),
    Alert(
        "MqlayerLeasesLost", "warning", "Members lose their leases",
        "Look at the process's GET /live, its processor time and its connection to Postgres; a longer "
        "MQLAYER_LEASE_S hides short stops.", above=2,
    ),
    Alert(
        "MqlayerExporterBlind", "warning", "The exporter can't read the system",
        "The exporter runs and can't read Postgres.", above=120,
    ),
    Alert(
        "MqlayerProcessNotReady", "warning", "A process is not ready",
        "GET /ready on its port lists the reasons.", for_s=300,
    ),
    Alert(
        "MqlayerKeysParked", "note", "Keys are parked", "Members try them again at their times, in order.", rule=False
    ),
    Alert(
        "MqlayerProducerReplaced", "note", "A producer left sources open",
        "See that one process uses the name; each start after a kill leaves one source, which costs memory on nodes.",
        rule=False,
    ),
    Alert(
        "MqlayerPaused", "note", "Consumption is paused", "Resume it when the reason is gone: nothing is trimmed "
        "meanwhile.", rule=False,
    ),
)  # fmt: skip

ALERTS: Final[Mapping[str, Alert]] = {one.name: one for one in _ALL}
"""By name, the most urgent first."""

STALLS: Final[Mapping[str, str]] = {
    "partition_missing": "Arm the node again: it lost data.",
    "lease_over": "A living member takes it over with its next heartbeat; start one if none lives.",
    "not_taken": "Nothing, its owner is about to take it; if it stays, see that member's log.",
    "parking_full": "Release or discard parked messages, or raise the limit.",
    "failing": "That member's log (handler_failed) says why.",
}
"""Advice by the reason for which partitions are stuck, as under 'Lag and stuck partitions'."""
