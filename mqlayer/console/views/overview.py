"""The system's problems, since when, what to do; and those that ended."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from mqlayer.console.kept import OLD_S, KeptValues
from mqlayer.console.page import ROWS, Action, Page, Visit, part
from mqlayer.console.problem_help import ADVICE, KINDS, page_of, shown_problem
from mqlayer.console.render import clock, link
from mqlayer.doctor.health import SystemHealth, system_health
from mqlayer.doctor.problem_history import (
    KEPT_S,
    NotedProblem,
    OpenProblem,
    ProblemPlace,
    ended_problems,
    noted_problem,
)
from mqlayer.metrics.alerts import ALERTS, Severity

SHOWN: Final = 100
"""Problems of a page."""
ENDED: Final = 10
SLACK_S: Final = 1.0
"""Until a page is made of a look that just was not old."""
SEVERITIES: Final[tuple[Severity, ...]] = ("critical", "warning", "note")

health: Final = KeptValues(system_health)


def _load(visit: Visit) -> Mapping[str, Any]:
    found = part(lambda: health.get(visit.runtime))
    problems = [] if found.value is None else [shown_problem(one) for one in found.value.problems[:SHOWN]]
    return look_age(found.value) | {
        "health": found,
        "problems": problems,
        "counts": _counts(found.value),
        "shown": SHOWN,
        "ended": part(lambda: ended_problems(visit.runtime.control, limit=ENDED + 1)),
        "ended_shown": ENDED,
        "gone": [] if found.value is None else [_gone(*one) for one in found.value.gone[:ENDED]],
        "totals": None if found.value is None else found.value.totals,
        "kinds": KINDS,
    }


def look_age(found: SystemHealth | None) -> dict[str, Any]:
    """Return the time of a look for "As of", and its seconds where the next one takes long."""
    if found is None:
        return {"old_s": None}
    age_s = (datetime.now(UTC) - found.at).total_seconds()
    is_old = age_s > found.took_s + OLD_S + SLACK_S
    return {"as_of": clock(found.at), "old_s": age_s if is_old else None}


def _counts(found: SystemHealth | None) -> dict[str, int]:
    problems = () if found is None else found.problems
    return {severity: sum(one.alert.severity == severity for one in problems) for severity in KINDS}


def _gone(place: ProblemPlace, noted: OpenProblem) -> dict[str, Any]:
    alert = ALERTS.get(place.alert)
    severity: Severity = "note" if alert is None else alert.severity
    return {
        "number": noted.number,
        "title": place.alert if alert is None else alert.title,
        "severity": severity,
        "kind": KINDS[severity],
        "place": " ".join(filter(None, (place.node, place.topic, place.group, place.item))),
        "last_seen_at": noted.last_seen_at,
    }


def _load_list(visit: Visit) -> Mapping[str, Any]:
    before = visit.number("before", 0) or None
    found = part(lambda: _ended(visit, before))
    rows = found.value or []
    return {
        "found": found,
        "rows": ROWS,
        "kinds": KINDS,
        "notes": visit.text("notes"),
        "older": link("/problems", before=rows[ROWS - 1].number, notes=visit.text("notes")) if len(rows) > ROWS else "",
        "newer": link("/problems", notes=visit.text("notes")) if before else "",
    }


def _ended(visit: Visit, before: int | None) -> list[NotedProblem]:
    severities = SEVERITIES if visit.text("notes") else SEVERITIES[:-1]
    return ended_problems(visit.runtime.control, last_s=KEPT_S, severities=severities, before=before, limit=ROWS + 1)


def _load_one(visit: Visit) -> Mapping[str, Any]:
    one = noted_problem(visit.runtime.control, visit.number("problem"))
    path, label = page_of(one)
    advice = ADVICE.get(one.name) or (ALERTS[one.name].advice if one.name in ALERTS else "")
    return {"one": one, "kind": KINDS[one.severity], "path": path, "label": label, "advice": advice}


PAGES: Final = (
    Page("/", "Overview", "overview.html", _load, menu="Overview"),
    Page("/problems", "Problems that ended", "problems.html", _load_list, live=False),
    Page("/problems/{problem}", "Problem {problem}", "problem.html", _load_one),
)
ACTIONS: Final[tuple[Action, ...]] = ()
