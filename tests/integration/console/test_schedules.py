"""The page of schedules: what their runs found, and pausing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from mqlayer.archive.schedules import create_schedule, find_schedule
from tests.fixtures.console import console_client
from tests.fixtures.console_pages import OPERATOR, act, audited, text_of, words
from tests.proof.world import World

RESULTS = (
    '{"audit": {"state": "faults", "seconds": 3.5, "facts": {"records": 1200}}, '
    '"latency": {"state": "failed", "seconds": 1, "error": "no <i>Java</i>"}, "skew": {"state": "good", "seconds": 2}, '
    '"certify": {"state": "faults", "seconds": 2, "error": "LP 7: its records are other ones"}}'
)


@pytest.fixture
def browser(world: World) -> Iterator[TestClient]:
    with console_client(world, OPERATOR) as client:
        yield client


@pytest.mark.world(partitions=2)
def test_schedules_show_what_their_runs_found_and_are_paused(world: World, browser: TestClient) -> None:
    assert "No schedule:" in words(text_of(browser, "/schedules"))
    create_schedule(world.runtime(), "nightly", every_s=86_400, jobs=["audit", "export"], export_to="s3://bucket/<b>")
    said = words(text_of(browser, "/schedules"))
    assert "It never ran." in said
    assert "Jobs: audit, export, to s3://bucket/&lt;b&gt; ." in said
    world.rows(
        "INSERT INTO mqlayer.analytics_run (schedule, state, snapshot, results, error, worker, lease_until, ended_at) "
        "VALUES ('nightly', 'failed', 'nightly-20261127-1', %s, NULL, 'w 1', now(), now()), "
        "('nightly', 'failed', NULL, '{}', 'no snapshot: why', 'w 1', now(), now()) RETURNING 1",
        RESULTS,
    )
    page = text_of(browser, "/schedules?schedule=nightly")
    said = words(page)
    assert "nightly all archived 1 d" in said
    assert re.search(r"audit faults \S+ s, 1,200 records", said), said[said.index("Runs of") :]
    assert "no &lt;i&gt;Java&lt;/i&gt;" in page
    assert "no snapshot: why" in said
    assert "certify faults 2 s: LP 7: its records are other ones" in said
    world.rows(
        "INSERT INTO mqlayer.analytics_run (schedule, job, worker, lease_until) "
        "VALUES ('nightly', 'audit', 'w 2', now()) RETURNING 1"
    )
    assert "running audit" in words(text_of(browser, "/schedules"))
    act(browser, "schedule-pause", schedule="nightly")
    assert find_schedule(world.database, "nightly").paused_at is not None
    act(browser, "schedule-resume", schedule="nightly")
    assert find_schedule(world.database, "nightly").paused_at is None
    assert audited(world, "schedule pause") != []
