"""The system's problems, since when, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mqlayer.console.kept import KeptValues
from mqlayer.console.page import Action, Page, Visit, part
from mqlayer.console.render import link, segment
from mqlayer.doctor.health import Problem, SystemHealth, system_health

SHOWN: Final = 100
"""Problems of a page."""
KINDS: Final = {"critical": "bad", "warning": "warn", "note": "note"}
LINKS: Final[Mapping[str, tuple[str, str]]] = {
    "MqlayerSchemaMismatch": ("/doctor?run=1", "Run the doctor"),
    "MqlayerOutboxSuspect": ("/doctor?run=1", "Run the doctor"),
    "MqlayerOutboxLate": ("/nodes", "See relays and nodes"),
    "MqlayerTransactionOpen": ("/doctor?run=1", "Run the doctor"),
    "MqlayerOutboxQuarantined": ("/doctor?run=1", "Run the doctor"),
    "MqlayerVersionsOverdue": ("/doctor?run=1", "Run the doctor"),
    "MqlayerNoRelay": ("/nodes", "See relays and nodes"),
    "MqlayerJobsLate": ("/nodes#jobs", "See the jobs"),
    "MqlayerJobFailed": ("/nodes#jobs", "See the jobs"),
    "MqlayerSamplesMissing": ("/nodes#jobs", "See the jobs"),
    "MqlayerProducerReplaced": ("/nodes#sources", "See the producers"),
}
PARKED: Final = frozenset(
    {
        "MqlayerParkingFull", "MqlayerKeysWaitForOperator", "MqlayerParkedKeysOverdue", "MqlayerDeadMessages",
        "MqlayerKeysParked",
    }
)  # fmt: skip


class ShownProblem(NamedTuple):
    """A problem with the page that helps, and an act that may end it."""

    problem: Problem
    kind: str
    path: str
    label: str
    action: str
    fields: Mapping[str, Any]


health: Final = KeptValues(system_health)


def _load(visit: Visit) -> Mapping[str, Any]:
    found = part(lambda: health.get(visit.runtime))
    problems = [] if found.value is None else [_shown(one) for one in found.value.problems[:SHOWN]]
    return {"health": found, "problems": problems, "counts": _counts(found.value), "shown": SHOWN}


def _counts(found: SystemHealth | None) -> dict[str, int]:
    problems = () if found is None else found.problems
    return {severity: sum(one.alert.severity == severity for one in problems) for severity in KINDS}


def _shown(problem: Problem) -> ShownProblem:
    action, fields = _act(problem)
    return ShownProblem(problem, KINDS[problem.alert.severity], *_link(problem), action, fields)


def _link(problem: Problem) -> tuple[str, str]:
    name, place = problem.alert.name, {"topic": problem.topic, "group": problem.group}
    if problem.node:
        return f"/nodes/{segment(problem.node)}", f"Node {problem.node}"
    if problem.change is not None:
        return f"/changes/{problem.change}", f"Change {problem.change}"
    if name in PARKED:
        return link("/parked", **place), "Parked and dead"
    if problem.group:
        return f"/groups/{segment(problem.topic)}/{segment(problem.group)}", "See the group"
    if problem.topic:
        return f"/topics/{segment(problem.topic)}", "See the topic"
    return LINKS.get(name, ("/doctor?run=1", "Run the doctor"))


def _act(problem: Problem) -> tuple[str, dict[str, Any]]:
    if problem.rearms:
        return "node-rearm", {"node": problem.node}
    if problem.change is not None:
        return "route-repair", {"topic": problem.topic}
    return "", {}


PAGES: Final = (Page("/", "Overview", "overview.html", _load, menu="Overview"),)
ACTIONS: Final[tuple[Action, ...]] = ()
