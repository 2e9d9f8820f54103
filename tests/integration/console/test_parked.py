"""The console's pages of parked keys, dead messages and bulk actions: filters, masks, acts, and a million of each."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from mqlayer.console import User, live
from tests.fixtures.console import OPERATOR, VIEWER, console_client, do_action
from tests.fixtures.consumers import Stage
from tests.fixtures.failed_messages import Failing, identity_of
from tests.proof.world import World

MARKUP = "<script>alert(1)</script>"
SECRET = b"4711-secret"
TRACEBACK = 'Traceback (most recent call last):\n  File "shop.py", line 7\nKeyError: <b>price</b>'


def world_of(stage: Stage) -> World:
    return World(stage.dsn, stage.prefix, ())


@pytest.fixture
def failing(stage: Stage) -> Failing:
    return Failing(stage)


@pytest.fixture
def ann(stage: Stage) -> Iterator[TestClient]:
    with console_client(world_of(stage), OPERATOR) as browser:
        yield browser


def shown(browser: TestClient, path: str = "/parked", **query: str) -> str:
    page = browser.get(path, params=query or None)
    assert page.status_code == 200, page.text
    return page.text


def link_of(page: str, begins: str) -> str:
    (found,) = set(re.findall(rf'href="({re.escape(begins)}[^"]*)"', page))
    return html.unescape(found)


def audit(failing: Failing, act: str) -> tuple[str, str]:
    ((actor, reason),) = failing.sql("SELECT actor, facts->>'reason' FROM mqlayer.audit WHERE act = %s", act)
    return actor, reason


def test_lists_are_filtered_and_each_key_and_dead_message_has_its_page(
    stage: Stage, failing: Failing, ann: TestClient
) -> None:
    first, second, third, alone = failing.publish((MARKUP, SECRET), (MARKUP, b"2"), ("late", b"3"), (None, b"4"))
    failing.park(first, second, attempts=17)
    failing.park(third, cause="retry", due_in_s=600)
    failing.park(alone, alone=True)
    failing.attempt(first, 1, "TimeoutError: slow")
    failing.attempt(first, 2, TRACEBACK)
    (dead_id, other_id) = failing.dead_letter(*failing.publish(("gone", SECRET), ("gone", b"6")), reason=TRACEBACK)
    failing.sql("UPDATE mqlayer.dead_message SET cause = 'skipped', reason = 'by hand' WHERE dead_id = %s", other_id)

    page = shown(ann)
    assert "Matching: 3 parked keys." in page
    assert "KeyError: &lt;b&gt;price" in page, "its last error"
    assert "TimeoutError" in page, "a frequent error"
    for text in (MARKUP, "<b>price"):
        assert text not in page
    for query, count in (
        ({"key": MARKUP}, 1),
        ({"cause": "retry"}, 1),
        ({"waiting": "1"}, 2),
        ({"error": "keyerror"}, 1),
        ({"older": "3600"}, 0),
        ({"younger": "3600"}, 3),
        ({"topic": "orders", "group": "g"}, 3),
    ):
        page = shown(ann, **query)
        assert f"Matching: {count} parked key" in page if count else "Nothing matches this filter" in page, query
    key = shown(ann, link_of(shown(ann, key=MARKUP), "/parked/orders/g"))
    for text in (
        "waits for an operator",
        "KeyError: &lt;b&gt;price",
        SECRET.decode(),
        str(identity_of(second)),
        "no member",
    ):
        assert text in key, text
    assert MARKUP not in key
    keyless = shown(ann, link_of(shown(ann, waiting="1"), "/parked/orders/g?message"))
    assert f"Message {identity_of(alone)}, without a key" in keyless

    page = shown(ann, show="dead")
    assert "Matching: 2 dead messages." in page
    assert "Matching: 1 dead message." in shown(ann, show="dead", cause="skipped")
    assert "Matching: 1 dead message." in shown(ann, show="dead", error="KEYERROR")
    dead = shown(ann, f"/dead/{dead_id}")
    for text in ("KeyError: &lt;b&gt;price", SECRET.decode(), "dead-redrive", "exhausted"):
        assert text in dead, text
    assert ann.get("/dead/999999").status_code == 404
    assert ann.get("/parked/orders/g", params={"key": "never"}).status_code == 404
    assert "is no number" in ann.get("/dead/x").text

    # Without the right to see bodies.
    with console_client(world_of(stage), User("bea", OPERATOR.level)) as bea:
        for path in (link_of(shown(bea, key=MARKUP), "/parked/orders/g"), f"/dead/{dead_id}"):
            page = shown(bea, path)
            assert SECRET.decode() not in page, path
            assert "Hidden: bea may not see" in page


def test_an_error_leads_to_its_keys_and_to_a_bulk_release_of_exactly_these(
    stage: Stage, failing: Failing, ann: TestClient
) -> None:
    first, second, third = failing.publish(("a", b"1"), ("b", b"2"), ("c", b"3"))
    failing.park(first, second, third)
    failing.attempt(first, 1, "KeyError: price of 7", age_s=10_800)
    failing.attempt(second, 1, "KeyError: price of 8\nmore")
    failing.attempt(third, 1, "TimeoutError: slow")
    page = shown(ann)
    row = next(one for one in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "price of 8" in one)
    for text in (">2<", "3 h ago", "just now", "orders/g"):
        assert text in row, text
    assert "more" not in row
    for table in ("parked_message", "parked_key"):
        failing.sql(f"DELETE FROM mqlayer.{table} WHERE name = 'c'")
    rows = re.findall(r"<tr>.*?</tr>", shown(ann), re.DOTALL)
    over = next(one for one in rows if "TimeoutError" in one)
    assert "none of these keys is parked now" in over
    assert "bulk-plan" not in over
    keys = shown(ann, link_of(row, "/parked?"))
    assert "Matching: 2 parked keys." in keys
    assert "Matching now: 2 parked keys (error KeyError)" in ann.get(link_of(row, "/actions/bulk-plan")).text
    with console_client(world_of(stage), VIEWER) as vic:
        assert "/actions/" not in shown(vic)
    assert "price of" not in re.split("Parked keys, ", shown(ann, topic="mails"))[0], "of another topic"


def test_the_order_of_parked_keys_is_said_and_chosen(failing: Failing, ann: TestClient) -> None:
    records = failing.publish(*((f"k{number:02}", b"1") for number in range(60)))
    failing.park(*records)
    failing.park(*failing.publish(*(("k07", b"2") for _ in range(3))))
    failing.sql("UPDATE mqlayer.parked_key SET parked_at = parked_at - interval '1 d' WHERE name = 'k33'")
    failing.sql("UPDATE mqlayer.parked_key SET due_at = now() + interval '1 h' WHERE name = 'k44'")

    def first(page: str) -> str:
        return str(re.findall(r'data-label="Key" class="key"><a [^>]*>(k\d\d)<', page)[0])

    assert "Parked keys, by group, then by LP and key" in shown(ann)
    for order, key in (("oldest", "k33"), ("largest", "k07"), ("due", "k44")):
        page = shown(ann, order=order, topic="orders")
        assert first(page) == key, order
        behind = shown(ann, html.unescape(re.findall(r'rel="next" href="([^"]*)"', page)[0]))
        assert behind.count('data-label="Key"') == 10
    assert "the longest parked first" in shown(ann, order="oldest")
    assert ann.get("/parked", params={"order": "best"}).text.count("no order of parked keys") == 1
    assert "no place in the list" in shown(ann, order="oldest", after="1:2:aa")


def test_empty_lists_say_why(stage: Stage, ann: TestClient) -> None:
    assert "No key is parked" in shown(ann)
    assert "No message is dead" in shown(ann, show="dead")
    assert "There is none" in shown(ann, "/bulk")
    assert ann.get("/bulk/7").status_code == 404


def test_acts_on_one_have_their_effect_and_an_audit_row(failing: Failing, ann: TestClient) -> None:
    first, second, third = failing.publish(("a", b"1"), ("b", b"2"), (None, b"3"))
    failing.park(first)
    failing.park(second)
    failing.park(third, alone=True)
    named = {"topic": "orders", "group": "g"}
    do_action(ann, "parked-release", "mended", **named, key="a")
    assert failing.key_row("a") == ("exhausted", True, 0)
    assert audit(failing, "parked release") == ("ann@console", "mended")
    assert "Dead now: 1 message of key b." in do_action(ann, "parked-discard", "old", **named, key="b")
    assert "Dead now: 1 message" in do_action(ann, "parked-discard", "old", **named, message=str(identity_of(third)))
    assert failing.dead() == [b"2", b"3"]
    ids = [row[0] for row in failing.sql("SELECT dead_id FROM mqlayer.dead_message ORDER BY dead_id")]
    assert "stays dead" in do_action(ann, "dead-keep", "no use", dead_id=str(ids[0]))
    assert "no use" in shown(ann, f"/dead/{ids[0]}")
    assert "is given back" in do_action(ann, "dead-redrive", "once more", dead_id=str(ids[0]))
    assert failing.parked("b") == [b"2"]
    assert audit(failing, "bulk start") == ("ann@console", "once more")


def test_a_bulk_action_has_a_fixed_set_and_is_watched_and_cancelled(
    failing: Failing, ann: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        failing.park(*failing.publish((f"k{number}", b"1")), attempts=number)
    failing.park(*failing.publish(("late", b"1")), cause="retry")
    named = {"topic": "orders", "group": "g", "cause": "exhausted"}
    assert "bulk-plan" not in shown(ann), "without a group"
    plan = link_of(
        shown(ann, **named), "/actions/bulk-plan?topic=orders&amp;group=g&amp;cause=exhausted&amp;act=release"
    )
    assert "Matching now: 60 parked keys (cause exhausted)" in ann.get(plan).text
    done = do_action(ann, "bulk-plan", "mended", **named, act="release")
    assert "The list is made" in done
    bulk_action_id = re.findall(r'data-here="/bulk/(\d+)', done)
    path = f"/bulk/{bulk_action_id[0]}?reason=mended"
    failing.park(*failing.publish(("later", b"1")))
    page = shown(ann, path)
    assert page.count('<span class="quiet">not yet</span>') == 50, "its first items"
    assert 'rel="next"' in page
    assert 'value="mended"' in page, "the reason goes on"
    bulk_id = path.split("?", maxsplit=1)[0].rsplit("/", 1)[1]
    started = do_action(ann, "bulk-start", "mended", bulk_id=bulk_id, per_s="0")
    assert "is done: 60 of 60 done" in started
    assert failing.key_row("k7") == ("exhausted", True, 0)
    assert failing.key_row("late") == ("retry", False, 0)
    assert failing.key_row("later") == ("exhausted", False, 0)
    assert audit(failing, "bulk start") == ("ann@console", "mended")
    assert "60 of 60" in shown(ann, path)
    # It is sent again as it changes.
    monkeypatch.setattr(live, "LONGEST_S", 0.01)
    stream = ann.get("/live", params={"path": path}).text
    assert stream.startswith("event: page")
    assert f"Bulk action {bulk_id}" in stream
    # Another one, cancelled.
    (bulk_id,) = re.findall(r'data-here="/bulk/(\d+)', do_action(ann, "bulk-plan", **named, act="discard"))
    path = f"/bulk/{bulk_id}"
    do_action(ann, "bulk-cancel", "not these", bulk_id=bulk_id)
    assert "It was cancelled" in shown(ann, path)
    assert audit(failing, "bulk cancel") == ("ann@console", "not these")
    assert ann.get("/actions/bulk-plan", params={"act": "release"}).status_code == 400
    assert len(failing.parked()) == 62
    page = shown(ann, "/bulk")
    for text in ("cancelled", "done", "mended"):
        assert text in page, text


def test_a_viewer_is_refused_each_act(stage: Stage, failing: Failing) -> None:
    failing.park(*failing.publish(("a", b"1")))
    (dead_id,) = failing.dead_letter(*failing.publish(("b", b"2")))
    named = {"topic": "orders", "group": "g", "key": "a", "dead_id": str(dead_id), "act": "discard", "bulk_id": "1"}
    with console_client(world_of(stage), VIEWER) as vic:
        for path in ("/parked?topic=orders&group=g", "/parked?show=dead&topic=orders&group=g", f"/dead/{dead_id}",
                     "/parked/orders/g?key=a"):  # fmt: skip
            assert "/actions/" not in shown(vic, path)
        for name in ("parked-release", "parked-discard", "dead-redrive", "dead-keep", "bulk-plan", "bulk-start",
                     "bulk-cancel"):  # fmt: skip
            assert vic.get(f"/actions/{name}", params=named).status_code == 403
            assert vic.post(f"/actions/{name}", data=named | {"reason": "r", "token": "token"}).status_code == 403
    assert (failing.parked(), failing.dead(), failing.audit()) == ([b"1"], [b"2"], [])
