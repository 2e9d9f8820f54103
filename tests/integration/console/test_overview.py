"""The overview: problems in the order of their urgency, each with its words, its place and what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from starlette.testclient import TestClient

from mqlayer.console import User, console_app
from mqlayer.console import kept as kept_module
from mqlayer.console.kept import KeptValue
from mqlayer.console.views import outbox, overview
from mqlayer.doctor import health
from mqlayer.errors import StoreUnavailable
from mqlayer.metrics.alerts import ALERTS
from mqlayer.stack import RedisServer
from tests.fixtures.console import FixedAccess, console_client
from tests.fixtures.console_pages import OPERATOR, VIEWER, sample, text_of, words
from tests.fixtures.consumers import Stage
from tests.fixtures.failed_messages import Failing
from tests.fixtures.wait import awake_s, wait_for_room_in_minute, wait_until
from tests.proof.world import World


@pytest.fixture
def browser(world: World) -> Iterator[TestClient]:
    with console_client(world, OPERATOR) as client:
        yield client


def names(page: str) -> list[str]:
    """Return the alerts of a page in their order."""
    return re.findall(r"<code>(Mqlayer\w+)</code>", page)


@pytest.mark.world(partitions=1, own_node=True, relayed=3)
def test_a_system_without_a_problem_says_so_and_a_dead_node_comes_first(
    world: World, browser: TestClient, node: RedisServer
) -> None:
    # The database is a copy of one that may be minutes old: jobs that never ran would be late.
    world.rows("UPDATE mqlayer.migration SET at = now()")
    sample(world, topic={"stored": [0, 120]})
    with world.relay():
        page = wait_until(
            lambda: page if "No problem is known" in (page := words(text_of(browser, "/"))) else "", what="all is well"
        )
        assert "Nodes that serve 1 of 1" in page
        assert "Stored per second 2" in page
        assert "Relays 1" in page
    node.kill()
    page = wait_until(
        lambda: page if "MqlayerNodeAway" in names(page := text_of(browser, "/")) else "",
        what="the dead node",
        longest_s=0.4,
    )
    assert names(page)[0] == "MqlayerNodeAway"
    said = words(page)
    assert "Node node-1 does not answer; it holds 1 partition:" in said
    assert '<a class="button" href="/nodes/node-1">Node node-1</a>' in page
    assert "/actions/" not in page, "no act brings it back"
    node.start()
    wait_until(
        lambda: 'href="/actions/node-rearm?node=node-1"' in text_of(browser, "/"), what="the act that may help by now"
    )
    with console_client(world, VIEWER) as viewer:
        page = text_of(viewer, "/")
        assert "this run is not armed" in page
        assert "/actions/" not in page, "a viewer sees no act"


def test_a_transaction_that_keeps_publishers_out_is_told_with_its_program(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = "MqlayerTransactionOpen"
    monkeypatch.setattr("mqlayer.doctor.health.ALERTS", {**ALERTS, held: ALERTS[held]._replace(above=0.0)})
    with psycopg.connect(world.dsn, application_name="price-import") as connection:
        connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'payl0ad')")
        pid = connection.info.backend_pid
        with console_client(world, OPERATOR) as browser:
            page = text_of(browser, "/")
    assert held in names(page)
    assert f"pid {pid} (price-import) has been idle in a transaction for" in words(page)
    assert 'href="/outbox#transactions"' in page
    assert f"SELECT pg_terminate_backend({pid})" in page
    assert "payl0ad" not in page


def test_problems_are_told_with_their_words_place_and_since(stage: Stage) -> None:
    failing = Failing(stage)
    stage.send([("a", b"{}"), ("b", b"{}"), ("c", b"{}"), ("d", b"{}")])
    parked, dead, _, _ = failing.records()
    failing.park(parked, attempts=3)
    failing.dead_letter(dead)
    for statement in (
        "UPDATE mqlayer.migration SET at = now() - interval '1 hour'",
        (
            "INSERT INTO mqlayer.job (name, last_at, ended_at, error) "
            "VALUES ('trim', now(), now() + interval '2 s', 'NotFound: <b>x</b>')"
        ),
        "INSERT INTO mqlayer.source (kind, name) VALUES ('direct', 'till'), ('direct', 'till')",
        (
            "INSERT INTO mqlayer.route_change (topic_id, version, kind, actor, planned_at) "
            "VALUES (1, 2, 'split', 'ann', now() - interval '10 min')"
        ),
        (
            "INSERT INTO mqlayer.member (group_id, member_id, host, pid, lease_until, most) "
            "VALUES (1, 'm1', 'host', 1, now() - interval '2 min', 99)"
        ),
        (
            "INSERT INTO mqlayer.sample (kind, object_id, at, lag, oldest_s) SELECT 'group', 1, "
            "date_trunc('minute', now(), 'UTC') - make_interval(mins => n), 4, 500 - 60 * n "
            "FROM generate_series(4, 7) AS n"
        ),
    ):
        failing.sql(statement)
    with TestClient(console_app(stage.settings(), access=FixedAccess(OPERATOR))) as browser:
        page = text_of(browser, "/")
    said = words(page)
    for text in (
        "The attempts of 1 of 1 parked keys are used up",
        "1 message died within the last hour",
        "Split 1 is planned for 10 min",
        "Direct producer till has 2 open sources",
        "1 member silent without having left, such as m1",
        "The oldest of 4 messages is 4 min old, and gets older",
        "trim: NotFound: &lt;b&gt;x&lt;/b&gt;",
        "No relay lives, and the worker's job that relays meanwhile is late",
        "messages to handle, and no member has a valid lease",
        "The last sample is of",
        "Start a Celery worker with beat, or its broker.",
        "Effect: Not handled: 1 message. Later ones of their keys go on.",
        "Effect: No message waits: the route is as it was.",
        "mqlayer parked list orders g --waiting",
        "Release them",
    ):
        assert text in said
    assert "<b>x</b>" not in page
    shown = names(page)
    severities = [ALERTS[name].severity for name in shown]
    assert severities == sorted(severities, key=["critical", "warning", "note"].index)
    assert {"MqlayerNoRelay", "MqlayerNoMembers", "MqlayerJobsLate"} == {
        name for name in shown if ALERTS[name].severity == "critical"
    }
    for link in (
        "/changes/1",
        "/groups/orders/g",
        "/parked?topic=orders&amp;group=g&amp;waiting=1",
        "/nodes#jobs",
        "/nodes#sources",
    ):
        assert f'href="{link}"' in page


def test_of_too_many_partitions_the_lag_is_of_samples(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "POSITIONS_LIMIT", 1)
    failing = Failing(stage)
    stage.send([("a", b"{}")])
    wait_for_room_in_minute()
    failing.sql(
        "INSERT INTO mqlayer.sample (kind, object_id, at, lag, oldest_s) "
        "VALUES ('group', 1, date_trunc('minute', now(), 'UTC'), 7, 30)"
    )
    with TestClient(console_app(stage.settings(), access=FixedAccess(OPERATOR))) as browser:
        said = words(text_of(browser, "/"))
    assert "Lag of all groups 7 oldest 30 s" in said, "and its link"
    assert "7 messages to handle, and no member has a valid lease" in said
    assert "Lag is of samples" in said


@pytest.mark.world(partitions=0)
def test_another_schema_is_the_one_problem_that_is_told(world: World, browser: TestClient) -> None:
    world.rows("UPDATE mqlayer.protocol SET serves_to = 9, in_force = 9, serves_from = 9")
    page = text_of(browser, "/")
    assert names(page) == ["MqlayerSchemaMismatch"]
    assert "upgrade mqlayer on this machine" in words(page)


def test_a_value_is_made_beside_its_readers_and_its_error_is_told() -> None:
    kept = KeptValue[int]()
    made = iter([1, 2])
    assert kept.get(lambda: next(made)) == 1
    assert kept.get(lambda: next(made)) == 1, "not due yet"
    wait_until(lambda: kept.get(lambda: next(made)) == 2, what="the next value")

    def broken() -> int:
        raise StoreUnavailable("here", "it is away")

    def told() -> bool:
        try:
            return kept.get(broken) == 0
        except StoreUnavailable:
            return True

    wait_until(told, what="the error")
    slow = KeptValue[int]()
    began = awake_s()
    assert slow.get(lambda: 7) == 7
    assert awake_s() - began < 2
    # Long after: the reader waits for the next one.
    slow._made_at = slow._due_at = time.monotonic() - kept_module.OLD_S - 1

    def later() -> int:
        time.sleep(0.3)
        return 8

    assert slow.get(later) == 8


def test_an_old_look_says_its_age_and_is_never_green(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(
        health.system_health(world.runtime()), problems=(), at=datetime.now(UTC) - timedelta(seconds=48), took_s=0.2
    )
    for view in (overview, outbox):
        monkeypatch.setattr(view.health, "get", lambda _: found)
    with console_client(world, OPERATOR) as browser:
        page = text_of(browser, "/")
        assert f'<time id="as-of">{found.at:%H:%M:%S} UTC</time>' in page, "not the page's own time"
        said = words(page)
        assert re.search(r"This look is (4[89]|5\d) s old: the new one takes long\.", said)
        assert "all is well" not in said
        page = text_of(browser, "/outbox")
        assert re.search(r"This look is (4[89]|5\d) s old", page)
        assert '"notice good"' not in page


@pytest.mark.world(partitions=0)
def test_an_empty_system_says_that_nothing_runs_yet(world: World) -> None:
    with console_client(world, User("vic")) as viewer:
        said = words(text_of(viewer, "/"))
    assert "Topics 0" in said
    assert "No relay lives" in said
