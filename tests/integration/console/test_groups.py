"""Pages of groups: what is wrong, curves, members, owners, and a partition's head in words; acts of operators."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mqlayer import Context
from mqlayer.console import User, console_app
from mqlayer.console.views.nodes import statuses
from mqlayer.doctor import health
from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.groups.admin import set_group
from mqlayer.groups.pauses import pause_partitions
from mqlayer.groups.retirement import retire_group
from mqlayer.inspect import group_statuses
from mqlayer.metrics.alerts import ALERTS
from mqlayer.postgres.rights import Right
from mqlayer.redis.partition_scripts import settle_command
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.stack import RedisServer
from tests.fixtures.console import FixedAccess, console_client
from tests.fixtures.console_pages import OPERATOR, VIEWER, act, audited, sample, text_of, words
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.wait import wait_until
from tests.proof.manual_member import ManualMember
from tests.proof.route_steps import split
from tests.proof.world import World

GROUP = "/groups/orders/ledger"


@pytest.fixture
def browser(world: World) -> Iterator[TestClient]:
    with console_client(world, OPERATOR) as client:
        yield client


def grouped(world: World, name: str = "ledger", **settings: Any) -> None:
    routes = RouteCache(world.database)
    try:
        given = GroupSettings(start="earliest", **settings)
        ensure_group(world.runtime(), routes, topic="orders", name=name, settings=given)
    finally:
        routes.close()


@pytest.mark.world(partitions=2, relayed=30)
def test_groups_show_what_is_wrong_first_and_a_group_shows_why(world: World, browser: TestClient) -> None:
    assert "There is no group yet" in text_of(browser, "/groups")
    grouped(world)
    sample(world, topic={"stored": [30, 30, 90]}, group={"lag": [30, 30, 40], "oldest_s": [60, 300, 4000]})
    page = text_of(browser, "/groups")
    assert page.count('<a href="/groups/orders/ledger">') == 2, "in trouble, and in the list"
    numbers = re.findall(r'class="number">([^<]*)</td>', page)
    assert numbers[:1] == ["40"]
    assert "25" in numbers, "60 stored and 10 more of lag in two minutes"
    assert "no member" in page
    numbers = re.findall(r'class="number">([^<]*)</td>', text_of(browser, "/topics"))
    assert numbers[:2] == ["30", "25"]
    assert "No group matches" in text_of(browser, "/groups", topic="other")
    page = text_of(browser, GROUP)
    said = words(page)
    assert "No member of this group lives: start a consumer" in said
    assert "2 partitions" in said
    assert "Lag 30 messages" in said
    assert "lag, highest: 40 at the end" in page
    assert "lag: 40 at the end, 30 to 40" in text_of(browser, GROUP, last="hour")
    assert browser.get("/groups/orders/none").status_code == 404
    assert browser.get("/groups/none/none").status_code == 404


@pytest.mark.world(partitions=1, relayed=12, keys=3)
def test_a_head_is_told_in_words_with_gaps_and_a_masked_body(world: World, browser: TestClient) -> None:
    member = ManualMember(world.database, world.key_prefix, "orders")
    one = member.assigned()[1]
    page = words(text_of(browser, f"{GROUP}/partitions/1"))
    assert "hand has not taken it yet under epoch" in page
    with member._connection(one) as connection:
        member._take(connection, one)
        connection.call([settle_command(connection, member._holder(one), [(1, 2), (4, 5), (8, 8)])])
    page = text_of(browser, f"{GROUP}/partitions/1")
    said = words(page)
    assert "It is running at member hand, or waits there for a free worker" in said
    assert "Next offset to settle 3" in said
    assert "3 , 6 to 7 ." in said
    head = re.search(r"Key key-\d .* 3 B (m-\d) ", said)
    assert head is not None
    assert "no route change ends it" in said
    with console_client(world, User("vic", bodies=False)) as viewer:
        masked = words(text_of(viewer, f"{GROUP}/partitions/1"))
    assert "hidden from you: 3 B of body" in masked
    assert head[1] not in masked
    assert "valid" in words(text_of(browser, GROUP))
    pause_partitions(world.runtime(actor="bea"), "orders", "ledger", [1])
    said = words(text_of(browser, f"{GROUP}/partitions/1"))
    assert "Stopped: bea paused partition 1 for the group" in said
    assert "Resume this partition" in said
    assert browser.get(f"{GROUP}/partitions/99").status_code == 404
    assert browser.get(f"{GROUP}/partitions/x").status_code == 400


@pytest.mark.world(partitions=1, relayed=8, keys=8)
def test_a_successor_waits_for_its_parent_and_the_parent_tells_its_seal(world: World, browser: TestClient) -> None:
    member = ManualMember(world.database, world.key_prefix, "orders")
    split(world.runtime(actor="bea"), "orders", 1)
    world.publish(8, keys=8)
    with world.relay():
        world.wait_until_whole()
    said = words(text_of(browser, f"{GROUP}/partitions/2"))
    assert "It waits until parent 1 is drained, or a key's order would break: 8 messages unsettled there" in said
    parent = words(text_of(browser, f"{GROUP}/partitions/1"))
    assert "bea planned the split to version 2" in parent
    assert "its last message has offset 8" in parent
    assert "Its successors: 2 , 3" in parent
    member.consume(1)
    assert "Every message of it is settled" in words(text_of(browser, f"{GROUP}/partitions/1")).replace(
        "every message of it", "Every message of it"
    )
    assert "waits for parents" not in words(text_of(browser, GROUP))


@pytest.mark.world(partitions=1, own_node=True, relayed=4)
def test_a_dead_node_is_the_first_thing_that_a_group_tells(
    world: World, browser: TestClient, node: RedisServer
) -> None:
    grouped(world)
    sample(world, group={"lag": [0, 0]})
    node.kill()
    told = words(text_of(browser, GROUP))
    assert "node not reachable node-1" in told
    assert told.count("refused") == 1
    assert ".." not in told
    assert "Lag unknown: a node does not answer" in told
    # A sample from before its death, with a lag of 0.
    statuses._values.clear()
    told = words(text_of(browser, "/groups"))
    assert "nothing is wrong" not in told
    assert "node-1 can't be used now" in html.unescape(told)
    assert told.count("node away unknown unknown") == 2, "in trouble, and in the list"
    sample(world, group={"lag": [7]})
    assert words(text_of(browser, "/groups")).count("at least 7") == 2
    said = words(text_of(browser, f"{GROUP}/partitions/1"))
    assert "Nothing of this partition can be read or settled" in said
    assert "the head is not known" in said


def test_a_failing_head_tells_its_attempts_and_the_next_one(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(body: bytes, ctx: Context) -> None:
        raise RuntimeError("no <b>mail</b> server")

    stage.send([("key-0", b"0")])
    stage.consume(Recorder(fail), backoff_s=(300.0,), policy="block")
    with TestClient(console_app(stage.settings(), access=FixedAccess(OPERATOR))) as browser:

        def said() -> str:
            return words(text_of(browser, "/groups/orders/g/partitions/1"))

        wait_until(lambda: "Its handler failed once of 17 attempts" in said(), what="the failed attempt")
        assert re.search(r"the next attempt is at .* UTC, in [45] min", said())
        wait_until(lambda: "no &lt;b&gt;mail&lt;/b&gt; server" in said(), what="the error, which is written later")
    (status,) = group_statuses(stage.runtime, "orders", "g", count_keys=False)
    assert status.partitions[0].stall is not None
    # One message within its usual attempts; after five minutes of them it is a problem.
    assert list(health._stalls(status, "orders", "g")) == []
    at_once = ALERTS["MqlayerPartitionsStuck"]._replace(for_s=0)
    monkeypatch.setattr(health, "ALERTS", {**ALERTS, at_once.name: at_once})
    (problem,) = health._stalls(status, "orders", "g")
    assert problem.item == "failing"


@pytest.mark.world(partitions=2, relayed=10)
def test_an_operator_pauses_evicts_seeks_and_retires_and_a_viewer_does_none(world: World, browser: TestClient) -> None:
    member = ManualMember(world.database, world.key_prefix, "orders")
    with console_client(world, VIEWER) as viewer:
        assert "/actions/" not in viewer.get(GROUP).text
        for name in ("group-pause", "group-resume", "group-evict", "group-seek", "group-retire", "breaker-open"):
            fields = {"topic": "orders", "group": "ledger", "member": "hand", "to": "latest", "seek": "0"}
            answer = viewer.post(f"/actions/{name}", data=fields | {"token": "token", "reason": "x"})
            assert answer.status_code == 403, name
    assert not world.rows("SELECT FROM mqlayer.audit WHERE act LIKE 'group %%'")
    named = {"topic": "orders", "group": "ledger"}
    told = act(browser, "group-pause", **named)
    assert "Members of group ledger of topic orders begin no further message; 1 alive now" in told
    assert "was already paused" in act(browser, "group-pause", **named)
    assert "ann@console paused the group" in words(text_of(browser, GROUP))
    act(browser, "group-resume", **named)
    set_group(world.runtime(), "orders", "ledger", breaker_share=0.5)
    assert "Circuit breaker closed; opens where 50 % of the keys fail" in words(text_of(browser, GROUP))
    assert "Probes of one message begin within a second" in act(browser, "breaker-open", **named)
    assert "the circuit breaker is open (ann@console tripped it)" in words(text_of(browser, GROUP))
    assert "A circuit breaker is open" in words(text_of(browser, "/"))
    assert "go on at full speed" in act(browser, "breaker-close", **named)
    act(browser, "partition-pause", **named, partition=2)
    assert world.rows("SELECT partition_id, paused_by FROM mqlayer.partition_pause") == [(2, "ann@console")]
    assert "is resumed" in act(browser, "partition-resume", **named, partition=2)
    member.consume_all()
    told = act(browser, "group-seek", **named, to="earliest", time="")
    assert re.search(r"partition \d: \d+ → 1\b", told)
    assert "Settled messages that are delivered again: at most 10." in told
    assert "Lag 10 messages" in words(text_of(browser, GROUP))
    assert browser.get("/actions/group-seek", params=named | {"to": "time", "time": "soon"}).status_code == 400
    late = browser.post(
        "/actions/group-seek", data=named | {"to": "latest", "seek": "0", "token": "token", "reason": "x"}
    )
    assert late.status_code == 409, "the plan was another position's"
    told = act(browser, "group-evict", **named, member="hand")
    assert "No other member lives: 2 partitions without an owner until one joins" in told
    assert browser.get("/actions/group-evict", params=named | {"member": "hand"}).status_code == 409
    assert "ends for good" in act(browser, "group-retire", **named)
    assert world.rows("SELECT state FROM mqlayer.consumer_group") == [("retired",)]
    for name in ("pause", "resume", "seek", "evict", "retire"):
        assert audited(world, f"group {name}") == [("ann@console", "orders/ledger", "drill")]


@pytest.mark.world(partitions=1, relayed=4)
def test_groups_of_each_mode_and_retired_ones_tell_what_they_are(world: World, browser: TestClient) -> None:
    grouped(world, "cache", mode="broadcast")
    grouped(world, "crowd", mode="shared", visibility_timeout_s=30.0)
    grouped(world, "calls", mode="pop", scope="key")
    assert "No instance is there" in words(text_of(browser, "/groups/orders/cache"))
    assert "Receivers of ordered pop are no members" in words(text_of(browser, "/groups/orders/calls"))
    assert "A receiver has it, or the next one gets it" in words(text_of(browser, "/groups/orders/calls/partitions/1"))
    assert "No member handles it: no member lives" in words(text_of(browser, "/groups/orders/crowd/partitions/1"))
    retire_group(world.runtime(), "orders", "crowd")
    assert "This group is retired: it consumes nothing any more" in words(text_of(browser, "/groups/orders/crowd"))
    assert browser.get("/groups/orders/crowd/partitions/1").status_code == 404
    assert "crowd" not in text_of(browser, "/groups")


@pytest.mark.world(partitions=1, relayed=6)
def test_the_right_to_view_is_enough_for_each_page_and_shows_no_body(world: World) -> None:
    grouped(world)
    world.right = Right.VIEW
    with console_client(world, User("vic", bodies=True)) as viewer:
        for path in ("/topics", "/topics/orders", "/topics/orders/route", "/groups", GROUP):
            assert "Not to be shown now" not in text_of(viewer, path)
        said = words(text_of(viewer, f"{GROUP}/partitions/1"))
    assert "Not to be shown now" not in said
    assert "hidden from you" in said, "the role may not, though the console's user may"
