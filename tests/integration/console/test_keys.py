"""The console's page of a key: what each group waits for, its history, and acts on it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from contextlib import closing

import pytest
from starlette.testclient import TestClient

from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.console import OPERATOR, VIEWER, console_client, do_action
from tests.fixtures.consumers import Stage, StartStage
from tests.fixtures.failed_messages import Failing, identity_of
from tests.fixtures.servers import StartRedis
from tests.proof.world import World

MARKUP = "<script>alert(1)</script>"


def world_of(stage: Stage) -> World:
    return World(stage.dsn, stage.prefix, ())


@pytest.fixture
def ann(stage: Stage) -> Iterator[TestClient]:
    with console_client(world_of(stage), OPERATOR) as browser:
        yield browser


def explained(browser: TestClient, stage: Stage, key: str, **more: str) -> str:
    page = browser.get("/keys", params={"topic": stage.topic, "key": key} | more)
    assert page.status_code == 200, page.text
    return page.text


def audit(failing: Failing, act: str) -> tuple[str, str]:
    ((actor, reason),) = failing.sql("SELECT actor, facts->>'reason' FROM mqlayer.audit WHERE act = %s", act)
    return actor, reason


def test_a_key_is_explained_for_each_group_with_its_history_and_markup_stays_text(
    stage: Stage, ann: TestClient
) -> None:
    failing = Failing(stage)
    first, second = failing.publish((MARKUP, b"1"), (MARKUP, b"2"))
    failing.park(first, attempts=3)
    (dead_id,) = failing.dead_letter(second, reason="by hand")
    failing.attempt(first, 1, "RuntimeError: <b>no</b>")
    with closing(RouteCache(stage.database)) as routes:
        ensure_group(stage.runtime, routes, topic=stage.topic, name="other", settings=GroupSettings())
    page = explained(ann, stage, MARKUP)
    assert "waits for an operator" in page
    assert "For group g " in page
    assert "For group other " in page
    assert MARKUP not in page
    assert html.escape(MARKUP) in page
    for one in (first, second):
        assert f">{identity_of(one)}</a>" in page, "its history"
    assert "g <span" in page
    assert ">parked</span>" in page
    assert ">waiting</span>" in page
    assert f"/dead/{dead_id}" in page
    assert "/actions/key-release?" in page
    assert "/actions/key-skip-head?" in page
    # One group alone.
    page = explained(ann, stage, MARKUP, group="other")
    assert "For group other " in page
    assert "For group g " not in page
    assert "in progress" in page or "no owner" in page


def test_a_page_without_a_key_a_topic_or_a_message_says_what_to_do(stage: Stage, ann: TestClient) -> None:
    assert "Name a topic and a key" in ann.get("/keys").text
    assert "unknown topic" in ann.get("/keys", params={"topic": "none", "key": "a"}).text
    page = explained(ann, stage, "never")
    assert "No group consumes topic" in page
    assert "No message of this key is in a stream" in page
    Failing(stage)
    assert "nothing waits" in explained(ann, stage, "never")


def test_an_operator_pauses_resumes_releases_and_skips_with_a_reason(stage: Stage, ann: TestClient) -> None:
    failing = Failing(stage)
    first, second = failing.publish(("a", b"1"), ("a", b"2"))
    named = {"topic": stage.topic, "group": "g", "key": "a"}
    assert "is paused" in do_action(ann, "key-pause", "a look", **named)
    assert audit(failing, "key pause") == ("ann@console", "a look")
    assert "Paused by ann@console" in explained(ann, stage, "a")
    assert ann.get("/actions/key-release", params=named).status_code == 409
    do_action(ann, "key-resume", **named)
    failing.sql("DELETE FROM mqlayer.parked_key")
    failing.park(first, second)
    assert "is released" in do_action(ann, "key-release", "mended", **named)
    assert audit(failing, "parked release") == ("ann@console", "mended")
    plan = ann.get("/actions/key-skip-head", params=named).text
    assert f"Message {identity_of(first)} of key a becomes a dead message" in plan
    # One that is parked; in the stream, neither is settled.
    assert "3 messages wait behind it" in plan
    assert "is passed over" in do_action(ann, "key-skip-head", "broken", **named)
    assert failing.dead() == [b"1"]
    assert audit(failing, "key skip-head") == ("ann@console", "broken")
    # The plan's message, and no other.
    again = ann.post("/actions/key-skip-head", data={**named, "message": str(identity_of(first)), "reason": "r",
                                                     "token": "token"})  # fmt: skip
    assert again.status_code == 409
    assert failing.dead() == [b"1"]


def test_a_viewer_sees_no_act_and_is_refused(stage: Stage) -> None:
    failing = Failing(stage)
    failing.park(*failing.publish(("a", b"1")))
    named = {"topic": stage.topic, "group": "g", "key": "a"}
    with console_client(world_of(stage), VIEWER) as vic:
        assert "/actions/" not in explained(vic, stage, "a")
        for name in ("key-pause", "key-resume", "key-skip-head", "key-release"):
            assert vic.get(f"/actions/{name}", params=named).status_code == 403
            answer = vic.post(f"/actions/{name}", data=named | {"reason": "r", "token": "token", "message": "1:1:1"})
            assert answer.status_code == 403
    assert (failing.parked(), failing.dead(), failing.audit()) == ([b"1"], [], [])


def test_a_dead_node_is_a_line_of_the_page(start_stage: StartStage, start_redis: StartRedis) -> None:
    node = start_redis()
    stage = start_stage(node.url)
    failing = Failing(stage)
    failing.park(*failing.publish(("a", b"1")))
    node.kill()
    with console_client(world_of(stage), OPERATOR) as browser:
        page = explained(browser, stage, "a")
    assert "waits for an operator" in page
    assert "not available" in page
