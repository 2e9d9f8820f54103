"""The alert rules, the dashboard and their pages fit the metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from mqlayer.metrics import CATALOG, Instrument
from mqlayer.metrics.alerts import ALERTS, STALLS

ROOT: Final = Path(__file__).parents[2]
MONITORING: Final = ROOT / "examples" / "monitoring"
RESPONSES: Final = ROOT / "docs" / "how-to" / "respond-to-alerts.md"
REFERENCE: Final = ROOT / "docs" / "reference" / "metrics.md"
OURS: Final = re.compile(r"\b(?:mqlayer|messaging)_\w+")
SELECTED: Final = re.compile(r"\b((?:mqlayer|messaging)_\w+)\{([^}]*)\}")
LABEL: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPED: Final = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
USED: Final = re.compile(r"\$labels\.(\w+)|\{\{(\w+)\}\}")
OF_TARGETS: Final = {"instance", "job"}


def instruments() -> dict[str, Instrument]:
    """Return each instrument by the names of its series."""
    found: dict[str, Instrument] = {}
    for one in CATALOG.values():
        suffixes = ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",)
        found |= {one.series + suffix: one for suffix in suffixes}
    return found


def labels_of(one: Instrument) -> set[str]:
    return (
        {label.replace(".", "_") for label in one.labels} | OF_TARGETS | ({"le"} if one.kind == "histogram" else set())
    )


def alerts() -> list[dict[str, Any]]:
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text("utf-8"))
    return [rule for group in rules["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    board = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
    return [one for one in board["panels"] if one["type"] != "row"]


def queries() -> Iterator[tuple[str, str, str]]:
    """Yield the name of each alert or panel, an expression of it, and the texts that name its labels."""
    for rule in alerts():
        yield rule["alert"], rule["expr"], rule["annotations"]["summary"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


@pytest.mark.parametrize(("name", "expression", "text"), list(queries()))
def test_a_query_names_series_and_labels_that_are_exported(name: str, expression: str, text: str) -> None:
    known = instruments()
    without_labels = GROUPED.sub("", re.sub(r"\{[^}]*\}", "", expression))
    series = set(OURS.findall(without_labels))
    assert series
    assert series - set(known) == set()
    for one, selectors in SELECTED.findall(expression):
        assert set(LABEL.findall(selectors)) - labels_of(known[one]) == set()
    every = set.intersection(*(labels_of(known[one]) for one in series))
    grouped = [{label.strip() for label in labels.split(",")} for labels in GROUPED.findall(expression)]
    for labels in grouped:
        assert labels - every == set()
    left = grouped[-1] if grouped else every
    assert {a or b for a, b in USED.findall(text)} - left == set()


def test_each_alert_has_its_section_and_each_section_its_alert() -> None:
    sections = re.findall(r"^### (\w+)$", RESPONSES.read_text("utf-8"), re.MULTILINE)
    assert [rule["alert"] for rule in alerts()] == sections
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/{RESPONSES.name}#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_console_has_the_words_and_thresholds_of_rules_and_of_their_page() -> None:
    rules = {rule["alert"]: rule for rule in alerts()}
    assert {name for name, one in ALERTS.items() if one.rule} == set(rules)
    sections = dict(re.findall(r"^### (\w+)$(.*?)(?=^##|\Z)", RESPONSES.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", RESPONSES.read_text("utf-8"), re.MULTILINE))
    assert {name for name in rows if name.startswith("Mqlayer")} == {n for n, one in ALERTS.items() if not one.rule}
    for name, one in ALERTS.items():
        assert plain(one.advice) in plain(sections[name] if one.rule else rows[name])
        if one.rule:
            seconds = {"s": 1, "m": 60}
            wait = rules[name].get("for", "0s")
            assert (one.severity, one.for_s) == (rules[name]["labels"]["severity"], int(wait[:-1]) * seconds[wait[-1]])
            assert re.search(rf"(^absent|== 0( |$)|> {one.above:g}( |$))", rules[name]["expr"])


def test_the_console_has_advice_for_the_reasons_of_stuck_partitions_of_their_page() -> None:
    page = (ROOT / "docs" / "how-to" / "inspect-groups.md").read_text("utf-8")
    reasons = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    others = {"node_away", "hidden", "paused", "no_owner", "replayed", "breaker"}
    assert set(STALLS) == set(reasons) - others, "these others are no problem, or are told as another one"


def plain(text: str) -> str:
    """Return a text in small letters without marks and links in brackets."""
    return " ".join(re.sub(r" \(\[[^]]*\]\([^)]*\)\)|[`]", "", text).split()).lower()


def test_the_dashboard_shows_or_an_alert_watches_each_number_of_the_system() -> None:
    text = " ".join(expression for _, expression, _ in queries())
    of_partitions = {one.series for one in CATALOG.values() if "partition" in one.labels}
    not_shown = {
        "mqlayer_autopilot_changes_total",
        "mqlayer_exporter_failures_total",
        "mqlayer_exporter_sample_duration_seconds",
        "mqlayer_route_changes_total",
    }
    exported = {one.series for one in CATALOG.values() if one.place == "exporter"}
    assert exported - of_partitions - not_shown - set(OURS.findall(text)) == set()


def test_the_reference_has_every_instrument_as_it_is() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (\w+) \| `(\w+)` \| (.*?) \|", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert rows == [
        (one.name, one.kind, one.series, ", ".join(f"`{label}`" for label in one.labels))
        for place in ("process", "exporter")
        for one in CATALOG.values()
        if one.place == place
    ]
