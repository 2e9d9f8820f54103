"""What a person can do about a problem in the console: advice, the page that shows the cause, acts that may end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mqlayer.console.render import link, segment
from mqlayer.doctor.problem_history import NotedProblem, Problem

KINDS: Final = {"critical": "bad", "warning": "warn", "note": "note"}
MEASURE_S: Final = 5
"""How long the plan of a split measures the load."""

ADVICE: Final[Mapping[str, str]] = {
    "MqlayerNodeAway":
        "Start it, or repair its network: workers and relays arm it within seconds of its return. If it moved, its "
        "page changes its address.",
    "MqlayerCommitsWait":
        "Let an administrator of Postgres start the standby again; the statement below shows which are there. To go "
        "on without one, set synchronous_standby_names to ''.",
    "MqlayerOutboxLate": "The page of the outbox shows which node the messages wait for, and what holds them.",
    "MqlayerTransactionOpen":
        "Let an administrator of Postgres end its session with the statement below; then set "
        "idle_in_transaction_session_timeout for the role of its application.",
    "MqlayerNoRelay":
        "Start a relay. If one runs, it hangs or can't reach Postgres: its log says why it has no lease.",
    "MqlayerNoMembers": "Start the consumers. The group's page shows the last members, and where they ran.",
    "MqlayerParkingFull":
        "Repair the cause, then release or discard what is parked. A higher limit is one of the group's settings.",
    "MqlayerJobsLate":
        "Start a Celery worker with beat, or its broker. The page of nodes shows when each job ran last.",
    "MqlayerRouteChangeStuck":
        "Its page names the node or the step that it waits for. Workers go on with it every two seconds; here it "
        "goes on at once.",
    "MqlayerAutopilotStopped":
        "The topic's page has its last decisions. Repair the cause, then turn automatic routes on again.",
    "MqlayerKeyHot": "Divide the key, or make its handler faster: no split helps. The topic's page names it.",
    "MqlayerPartitionHot": "Split it: the plan measures the load, and shows how it would divide.",
    "MqlayerLagGrows": "Add members or handlers. The group's page shows whether one partition lags, or all.",
    "MqlayerLagUnknown": "The group's page names the partitions: their node is away, or lost them.",
    "MqlayerFailureRate":
        "The list of parked keys has the most frequent errors above it. Did a release or a downstream service "
        "change?",
    "MqlayerKeysWaitForOperator": "Repair the cause, then release them: the plan shows how many there are.",
    "MqlayerParkedKeysOverdue":
        "Members are missing, or the job retry_scan is late: the group's page shows its members.",
    "MqlayerDeadMessages": "The list shows why they died. Once the cause is repaired, redrive them.",
    "MqlayerMessagesDropped":
        "Add members or handlers, so that the group keeps up, or raise the limits of its topic: mqlayer topic set.",
    "MqlayerOutboxQuarantined":
        "The page of the outbox has each row with its reason, and retries it once it is repaired.",
    "MqlayerVersionsOverdue":
        "Look for the missing events among parked and dead messages; the command names the entities.",
    "MqlayerAppendsRefused": "Give the node more memory, or move partitions off it: nothing is lost meanwhile.",
    "MqlayerPaused": "Resume it once the reason is gone.",
}  # fmt: skip
"""Where the alert's own advice names commands. A test compares the names."""

REASONS: Final[Mapping[str, str]] = {
    "parking_full": "Repair the cause, then release or discard what is parked.",
    "failing": "The partition's page shows the message at its head and its last errors.",
}
"""Advice for stuck partitions, by the reason, where the console has a page for it."""


class ProblemAct(NamedTuple):
    """An act that may end a problem."""

    name: str
    label: str
    fields: Mapping[str, Any]


class ProblemHelp(NamedTuple):
    """Advice, the page that shows the cause, and acts."""

    advice: str
    path: str
    label: str
    acts: tuple[ProblemAct, ...] = ()


class ShownProblem(NamedTuple):
    """A problem as a page shows it."""

    problem: Problem
    kind: str
    help: ProblemHelp


def shown_problem(problem: Problem) -> ShownProblem:
    """Return a problem with its help."""
    name = problem.alert.name
    advice = REASONS.get(problem.item, "") or problem.advice or ADVICE.get(name, problem.alert.advice)
    return ShownProblem(problem, KINDS[problem.alert.severity], ProblemHelp(advice, *page_of(problem), _acts(problem)))


def page_of(problem: Problem | NotedProblem) -> tuple[str, str]:
    """Return the path and name of the page that shows a problem's cause."""
    name = problem.alert.name if isinstance(problem, Problem) else problem.name
    place = {"topic": problem.topic, "group": problem.group}
    group = f"/groups/{segment(problem.topic)}/{segment(problem.group)}"
    match name:
        case "MqlayerNodeAway" | "MqlayerAppendsRefused" if problem.node:
            return f"/nodes/{segment(problem.node)}", f"Node {problem.node}"
        case "MqlayerRouteChangeStuck":
            change = problem.place.item if isinstance(problem, Problem) else problem.item
            return f"/changes/{segment(change)}", f"Change {change}"
        case "MqlayerKeysWaitForOperator":
            return link("/parked", **place, waiting=1), "Keys that wait"
        case "MqlayerDeadMessages":
            return link("/parked", **place, show="dead"), "Dead messages"
        case "MqlayerParkingFull" | "MqlayerKeysParked" | "MqlayerFailureRate":
            return link("/parked", **place), "Parked keys"
        case "MqlayerPartitionsStuck" if isinstance(problem, Problem) and problem.partition is not None:
            return f"{group}/partitions/{problem.partition}", f"Partition {problem.partition}: what it waits for"
        case _ if name in PAGES:
            return PAGES[name]
        case _ if problem.group:
            return group, f"Group {problem.group}"
        case _ if problem.topic:
            return f"/topics/{segment(problem.topic)}", f"Topic {problem.topic}"
    return "/doctor?run=1", "Run the doctor"


PAGES: Final[Mapping[str, tuple[str, str]]] = {
    "MqlayerOutboxSuspect": ("/outbox", "The outbox"),
    "MqlayerOutboxLate": ("/outbox", "The outbox"),
    "MqlayerNoRelay": ("/outbox#relays", "Relays"),
    "MqlayerTransactionOpen": ("/outbox#transactions", "Open transactions"),
    "MqlayerOutboxQuarantined": ("/outbox#quarantined", "Quarantined rows"),
    "MqlayerVersionsOverdue": ("/outbox#versions", "Missing versions"),
    "MqlayerJobsLate": ("/nodes#jobs", "Jobs"),
    "MqlayerJobFailed": ("/nodes#jobs", "Jobs"),
    "MqlayerScheduleFaults": ("/schedules", "Schedules"),
    "MqlayerScheduleFailed": ("/schedules", "Schedules"),
    "MqlayerScheduleLate": ("/schedules", "Schedules"),
    "MqlayerSamplesMissing": ("/nodes#jobs", "Jobs"),
    "MqlayerProducerReplaced": ("/nodes#sources", "Producers"),
}
"""Pages of problems without a place."""


def _acts(problem: Problem) -> tuple[ProblemAct, ...]:
    name, place = problem.alert.name, {"topic": problem.topic, "group": problem.group}
    if problem.item == "parking_full":
        name = "MqlayerParkingFull"
    if name == "MqlayerNodeAway" and not problem.rearms:
        return ()
    if name == "MqlayerPaused" and problem.item == "topic":
        return (ProblemAct("topic-resume", "Resume the topic", {"topic": problem.topic}),)
    known: Mapping[str, Sequence[tuple[str, str, Mapping[str, Any]]]] = {
        "MqlayerNodeAway": [("node-rearm", "Arm it again", {"node": problem.node})],
        "MqlayerRouteChangeStuck": [("route-repair", "Go on with it", {"topic": problem.topic})],
        "MqlayerPartitionHot": [
            (
                "route-split",
                f"Split partition {problem.partition}",
                {"topic": problem.topic, "partition": problem.partition, "measure": MEASURE_S},
            )
        ],
        "MqlayerPaused": [("group-resume", "Resume the group", place)],
        "MqlayerKeysWaitForOperator": [("bulk-plan", "Release them", {**place, "act": "release", "waiting": 1})],
        "MqlayerParkingFull": [
            ("bulk-plan", "Release parked keys", {**place, "act": "release"}),
            ("bulk-plan", "Discard them", {**place, "act": "discard"}),
        ],
        "MqlayerDeadMessages": [("bulk-plan", "Redrive them", {**place, "act": "redrive"})],
        "MqlayerOutboxQuarantined": [("outbox-retry", "Retry all rows", {})],
    }
    return tuple(ProblemAct(*one) for one in known.get(name, ()))
