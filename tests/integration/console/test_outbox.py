"""The page of the outbox, and problems that ended."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import psycopg
import pytest
from starlette.testclient import TestClient

from mqlayer.doctor.health import note_problems
from mqlayer.outbox import list_quarantined
from tests.fixtures.console import console_client
from tests.fixtures.console_pages import OPERATOR, VIEWER, act, audited, text_of, words
from tests.fixtures.wait import wait_until
from tests.proof.world import World


@pytest.fixture
def browser(world: World) -> Iterator[TestClient]:
    with console_client(world, OPERATOR) as client:
        yield client


def says(browser: TestClient, text: str, path: str = "/outbox") -> str:
    """Wait until a page says this; what it says then."""
    return wait_until(lambda: said if text in (said := words(text_of(browser, path))) else "", what=text)


@pytest.mark.world(nodes=2)
def test_what_waits_is_told_by_node_and_topic_with_what_holds_it(world: World, browser: TestClient) -> None:
    # A job that never ran would be late in a copy of an older database.
    world.rows("UPDATE mqlayer.migration SET at = now()")
    said = words(text_of(browser, "/outbox"))
    assert "No relay lives; the worker's job relays every 10 s meanwhile, so messages are up to 10 s late." in said
    assert "Nothing waits." in said
    assert "No relay ran within the last hour" in said
    world.publish(40)
    beat = "INSERT INTO mqlayer_app.relay (relay_id, lease_until, sent_at, most) VALUES"
    world.rows(f"{beat} ('r<1>', now() - interval '9 s', now() - interval '2 min', 99)")
    world.rows(f"{beat} ('vm-2-23082-0a1b2c', now() - interval '99 s', NULL, 99)")
    world.rows("UPDATE mqlayer_app.outbox SET created_at = now() - interval '3 min'")
    said = says(browser, "40 messages wait, the oldest for 3 min")
    by_node = {name: int(count) for name, count in re.findall(r"(node-\d) (\d+) \d+ 0 3 min ago", said)}
    assert set(by_node) == {"node-1", "node-2"}
    assert sum(by_node.values()) == 40
    assert re.search(r"orders 40 \d+ 0 3 min ago", said)
    assert re.search(
        r"r&lt;1&gt; silent last renewed [-\d: ]+ UTC \(\d+ s ago\) , over at [\d:]+ UTC 2 min ago 0", said
    )
    assert "hung or dead: look at process 23082 on host vm-2; end it before starting another" in said
    assert "None is open for more than 5 seconds" in said
    assert "unknown" in said, "no rate without samples"
    with psycopg.connect(world.dsn, application_name="price-import") as connection:
        connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'payl0ad')")
        pid = connection.info.backend_pid
        page = text_of(browser, "/outbox")
    assert "payl0ad" not in page
    assert f"price-import pid {pid}" not in words(page), "it is young"
    with world.relay():
        world.wait_until_whole()
        says(browser, "Nothing waits: all that was committed is relayed.")
        sent = re.compile(r"alive until [-\d: ]+ UTC \((in \d+ s|just now)\) (just now|\d+ s ago) \d+")
        wait_until(lambda: sent.search(words(text_of(browser, "/outbox"))), what="when the relay sent last")


@pytest.mark.world(partitions=1)
def test_an_open_transaction_is_told_with_the_statement_that_ends_it(
    world: World, browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqlayer.console.views.outbox.OPEN_S", 0.0)
    with psycopg.connect(world.dsn, application_name="price-import") as connection:
        connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'payl0ad')")
        pid = connection.info.backend_pid
        said = words(text_of(browser, "/outbox"))
        assert re.search(rf"price-import pid {pid} postgres from [\w.' ]+ \d+ m?s idle in transaction yes 0", said)
        with psycopg.connect(world.dsn, application_name="victim") as other:
            other.execute("SET lock_timeout = '20 s'")
            waits = threading.Thread(
                target=other.execute, args=("SELECT mqlayer_app.publish_v1('orders', 'k', 'x')",), daemon=True
            )
            waits.start()
            said = says(browser, f"waits for pid {pid}")
            connection.rollback()
            waits.join(20)
            victim = other.info.backend_pid
    assert f"SELECT pg_terminate_backend({pid})" in said
    assert f"SELECT pg_terminate_backend({victim})" not in said, "it goes on"
    assert f"it goes on once pid {pid} ends" in said
    assert "its LPs get stuck, its outbox slots are kept; sessions that wait for it: 1." in said
    assert "Nothing waits: all" not in said, "trouble is no time for green"
    assert "Nothing was committed since" not in said, "no sample says so"


@pytest.mark.world(partitions=1, relayed=2)
def test_rows_that_cannot_be_sent_are_retried_and_discarded_with_a_reason(world: World, browser: TestClient) -> None:
    world.rows("INSERT INTO mqlayer_app.quarantined (topic_id, lp, seq, reason) VALUES (1, 7, 1, 'a <b>body</b>')")
    world.rows(
        "INSERT INTO mqlayer_app.voided (id, topic_id, lp, seq, reason, created_at, body) "
        "VALUES (9000, 1, 8, 1, 'too large', now(), 'x')"
    )
    page = text_of(browser, "/outbox")
    said = words(page)
    assert "<b>body</b>" not in page
    assert "orders 7 holds its LP" in said
    assert "passed over row 9000 too large" in said
    says(browser, "All later messages of 1 LP wait in the outbox.", "/")
    assert "is lost: too large" in words(act(browser, "outbox-discard", row=9000))
    assert browser.get("/actions/outbox-discard", params={"row": 9000}).status_code == 404
    assert "1 row tried again" in words(act(browser, "outbox-retry", topic="orders", lp=7))
    assert list_quarantined(world.database) == []
    assert audited(world, "outbox retry") == audited(world, "outbox discard") == [("ann@console", "orders", "drill")]
    with console_client(world, VIEWER) as viewer:
        assert "/actions/" not in text_of(viewer, "/outbox")
        for name in ("outbox-retry", "outbox-discard"):
            fields = {"row": "1", "token": "token", "reason": "drill"}
            assert viewer.get(f"/actions/{name}", params=fields).status_code == 403
            assert viewer.post(f"/actions/{name}", data=fields).status_code == 403


@pytest.mark.full
@pytest.mark.world(partitions=1)
def test_a_problem_that_ended_is_on_the_overview_and_has_its_page(world: World, browser: TestClient) -> None:
    found = note_problems(world.runtime())
    assert found.gone == ()
    ((number,),) = world.rows("SELECT problem_id FROM mqlayer.problem WHERE alert = 'MqlayerNoRelay'")
    assert "holds now" in words(text_of(browser, f"/problems/{number}"))
    assert "No problem ended within this time" in words(text_of(browser, "/"))
    world.rows(
        "UPDATE mqlayer.problem SET first_seen_at = now() - interval '7 min', last_seen_at = now() - interval '1 min'"
    )
    # The relay must live until the look at problems.
    with world.relay(lease_s=10.0):
        wait_until(lambda: world.rows("SELECT 1 FROM mqlayer_app.relay"), what="a relay")
        gone = r"No relay lives : no longer found by the look of [\d:]+ UTC, and last noted at"
        wait_until(lambda: re.search(gone, words(text_of(browser, "/"))), what="its end by the console's own look")
        note_problems(world.runtime())
    said = words(text_of(browser, "/"))
    assert re.search(
        r"critical No relay lives the system [-\d: ]+ UTC after [\d:]+ UTC, by [-\d: ]+ UTC at most 7 min \d", said
    )
    said = words(text_of(browser, f"/problems/{number}"))
    assert re.search(r"Ended between [-\d: ]+ UTC and [-\d: ]+ UTC, after at most 7 min", said)
    assert "Effect 0 messages wait in the outbox" in said
    assert 'href="/outbox#relays"' in text_of(browser, f"/problems/{number}")
    assert "No relay lives" in words(text_of(browser, "/problems"))
    assert "No relay lives" not in words(text_of(browser, "/problems", before=number))
    assert browser.get("/problems/999").status_code == 404
