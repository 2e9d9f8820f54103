"""Messages found by key, time, header, trace and dedup id within bounds; the life of one over splits and acts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.archive import archive_pass, index_days
from mqlayer.domain.message import Identity
from mqlayer.domain.routing import lp_of
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.groups.start_positions import undeleted_partitions
from mqlayer.inspect import (
    LifeStep,
    MessageFilter,
    find_by_dedup_id,
    find_message,
    history_of_key,
    message_life,
    message_search,
    search_messages,
)
from mqlayer.inspect.stream_search import BudgetSpent, StreamSearch
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.redelivery import (
    DeadFilter,
    ParkedFilter,
    discard_dead,
    discard_parked,
    pause_key,
    plan_bulk,
    release_parked,
    resume_key,
    skip_head,
    start_bulk,
    start_redrive,
    work_on,
)
from mqlayer.relay import relay_once
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics import set_archived
from tests.fixtures.archive_scenes import ArchiveScene
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.failed_messages import Failing, identity_of
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def runtime(stage: Stage, actor: str = "ann") -> Runtime:
    return runtime_of(stage.database, stage.prefix, application=stage.database, actor=actor)


def life(stage: Stage, message: object, group: str) -> list[LifeStep]:
    """Return the steps of a message in a group."""
    here = runtime(stage)
    return [one for one in message_life(here, find_message(here, str(message))).steps if one.group == group]


def test_a_life_goes_on_over_a_split_with_each_attempt_and_the_effect(stage: Stage) -> None:
    def act(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 1:
            raise RuntimeError
        with stage.database.connection() as connection, connection.transaction():
            ctx.fence(connection)

    here = runtime(stage)
    set_archived(here, stage.topic, archived=True)
    stage.send([("a", b"1")])
    lp = lp_of(b"a")
    (parent,) = (one.partition for one in stage.route.ranges if one.lp_from <= lp < one.lp_to)
    split(here, stage.topic, parent)
    stage.consume(Recorder(act))
    stage.wait_settled()

    def is_told() -> bool:
        archive_pass(here)
        return {"failed", "settled"} <= {one.step for one in life(stage, f"1:{lp}:1", "g") if one.by is not None}

    wait_until(is_told, what="the outcome and the failure")
    message = message_life(here, find_message(here, f"1:{lp}:1"))
    of_group = [one for one in message.steps if one.group == "g"]
    assert [one.step for one in of_group] == ["delivered", "failed", "applied", "settled"]
    assert {one.by for one in of_group if one.step != "applied"} == {of_group[0].by}
    assert of_group[-1].attempt == 2
    before = {one.step: one for one in message.steps if one.group is None}
    assert list(before) == ["stored", "route_changed", "archived"]
    assert (before["stored"].partition, before["stored"].offset, before["stored"].version) == (parent, 1, 1)
    assert (before["route_changed"].version, before["route_changed"].by) == (2, "ann")
    assert [one.steps for one in message.missing] == ["committed, relayed"]


def test_acts_of_operators_are_steps_of_their_messages_alone(stage: Stage) -> None:
    failing, here = Failing(stage), runtime(stage)
    stage.send([("a", b"1"), ("b", b"1")])
    first, second = failing.records()
    failing.park(first, cause="exhausted")
    failing.dead_letter(second)
    keys = [record.key.decode() for _, record in (first, second)]
    release_parked(here, stage.topic, "g", key=keys[0])
    start_redrive(here, stage.topic, "g", DeadFilter(key=keys[1]), worker="w")
    acts = [one for one in life(stage, identity_of(first), "g") if one.step == "act"]
    assert [(one.by, one.detail) for one in acts] == [
        ("ann", "parked release"), ("ann", "bulk start 1, redrive, of the whole group"),
    ]  # fmt: skip
    assert [one.detail for one in life(stage, identity_of(second), "g") if one.step == "act"] == [
        "bulk start 1, redrive, of the whole group"
    ]
    found = history_of_key(here, stage.topic, keys[0])
    assert [(one.step, one.detail) for one in found.steps][-1] == ("act", "parked release")
    assert [dict(one.groups) for one in found.messages] == [{"g": "parked"}]


def test_a_keys_history_has_every_act_that_touches_a_key(stage: Stage) -> None:
    """Each act that names a key or takes it in a set, by the steps of the key that it leaves when the key went on."""
    failing, here = Failing(stage), runtime(stage)
    acts: dict[str, Callable[[str, Any], object]] = {
        "parked release": lambda key, _: release_parked(here, stage.topic, "g", key=key),
        "parked discard": lambda key, _: discard_parked(here, stage.topic, "g", key=key, reason="why"),
        "key skip-head": lambda key, _: skip_head(here, stage.topic, "g", key, reason="why"),
        "key pause": lambda key, _: pause_key(here, stage.topic, "g", key),
        "key resume": lambda key, _: (pause_key(here, stage.topic, "g", key), resume_key(here, stage.topic, "g", key)),
        "bulk release": lambda key, _: in_bulk("release", ParkedFilter(key=key)),
        "bulk discard": lambda key, _: in_bulk("discard", ParkedFilter(key=key)),
        "bulk redrive": lambda key, record: in_bulk("redrive", DeadFilter(dead_ids=tuple(failing.dead_letter(record)))),
        "bulk keep": lambda key, record: in_bulk("keep", DeadFilter(dead_ids=tuple(failing.dead_letter(record)))),
        "dead discard": lambda key, record: discard_dead(here, failing.dead_letter(record)[0], reason="why"),
    }

    def in_bulk(act: Any, wanted: DeadFilter | ParkedFilter) -> None:
        planned = plan_bulk(here, act, stage.topic, "g", wanted)
        start_bulk(here, planned.bulk_id, reason="why", worker="w")
        assert work_on(here.control, planned.bulk_id, worker="w").done == 1

    for act, do in acts.items():
        (record,) = failing.publish((act, b"1"))
        if "dead" not in act and act not in {"bulk redrive", "bulk keep"}:
            failing.park(record, attempts=3)
        failing.attempt(record, 1, "E: it failed")
        do(act, record)
    # A bulk release leaves its item alone: the key went on, and its stream was trimmed.
    failing.sql("DELETE FROM mqlayer.parked_message")
    failing.sql("DELETE FROM mqlayer.parked_key")
    for act in acts:
        found = history_of_key(here, stage.topic, act)
        told = {one.detail or "" for one in found.steps if one.step in {"act", "redriven"} and one.by == "ann"}
        words = f"bulk action [0-9]+, {act.removeprefix('bulk ')}: done" if act.startswith("bulk") else act
        assert [one for one in told if re.match(words, one)], (act, told)
        assert [one.detail for one in found.steps if one.step == "failed"] == [
            f"message {found.messages[0].found.identity}: E: it failed"
        ]
        assert "attempts that ended well" in {one.steps for one in found.missing}
    released = history_of_key(here, stage.topic, "bulk release")
    (step,) = (one for one in released.steps if one.step == "act")
    assert re.fullmatch(r"bulk action 1, release: done, parked since .* UTC \(exhausted\): why", step.detail or "")
    assert step in life(stage, released.messages[0].found.identity, "g")


def test_an_identity_and_a_time_are_found_by_halving_and_a_search_ends_at_its_budget(stage: Stage) -> None:
    began = time.time()
    stage.clock = lambda: began + sum(stage._seqs.values())
    for number in range(10):
        stage.send((f"k{n % 97}", b"%d" % number) for n in range(1_000))
    here = runtime(stage)
    with here.control.connection() as connection:
        partitions = undeleted_partitions(connection, 1)
    lp = lp_of(b"k7")
    (one,) = (one for one in partitions if one.lp_from <= lp < one.lp_to)
    with closing(StreamSearch(here)) as search:
        record = search.find(one, Identity(1, lp, 41))
        assert record is not None
        assert (record.key, record.body, record.identity.seq) == (b"k7", b"3", 41)
        assert search.looked < 3_000
    with closing(StreamSearch(here)) as search:
        offset = search.offset_at(one, record.at_ms)
        (before, after) = (search.read(one, at) for at in (offset - 1, offset))
        assert before is not None
        assert after is not None
        assert before.at_ms < record.at_ms <= after.at_ms
        assert search.looked < 100
    with closing(StreamSearch(here, records=0)) as search, pytest.raises(BudgetSpent):
        search.find(one, record.identity)
    page = search_messages(here, stage.topic, MessageFilter(key="never"), records=1_000)
    assert (page.messages, page.looked, [step.absence for step in page.missing]) == ([], 1_000, ["not_searched"])
    pages = 1
    while page.after is not None:
        page, pages = (
            search_messages(here, stage.topic, MessageFilter(key="never"), records=2_000, after=page.after),
            pages + 1,
        )
    assert pages > 2


def seqs_of(here: Runtime, key: str, *, limit: int) -> tuple[list[int], set[str], int]:
    """Return what all pages of a key have, from which sources, and how many pages that were."""
    seqs: list[int] = []
    sources: set[str] = set()
    after, pages = None, 0
    while pages == 0 or after is not None:
        page = search_messages(here, "orders", MessageFilter(key=key), limit=limit, after=after)
        assert page.looked <= 100
        seqs += [one.identity.seq for one in page.messages if one.identity is not None]
        sources |= {one.source for one in page.messages}
        after, pages = page.after, pages + 1
    return seqs, sources, pages


def test_a_key_is_paged_over_streams_and_archive_and_each_message_comes_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = runtime(stage)
    set_archived(here, stage.topic, archived=True)
    stage.consume(Recorder(), group="g")
    for first in range(0, 600, 200):
        stage.send([("a", b"%d" % number) for number in range(first, first + 200)] + [("b", b"x")])
        stage.wait_settled()
        archive_pass(here)
    trim_pass(here)
    stage.send([("a", b"%d" % number) for number in range(600, 610)])
    stage.wait_settled()
    expected = list(range(610, 0, -1)), {"stream", "archive"}
    assert seqs_of(here, "a", limit=100) == (*expected, 7)
    # An archive that is read too slowly for one page.
    monkeypatch.setattr(message_search, "BATCHES_AT_ONCE", 1)
    monkeypatch.setattr(message_search, "ARCHIVE_MS", 0)
    seqs, sources, pages = seqs_of(here, "a", limit=1_000)
    assert (seqs, sources, pages >= 3) == (*expected, True)
    found = history_of_key(here, stage.topic, "a", limit=2)
    assert [dict(one.groups) for one in found.messages] == [{"g": "settled"}] * 2


@pytest.mark.world(by_commands=True)
def test_messages_are_found_by_key_time_header_trace_and_dedup_id(world: World, run: Commands) -> None:
    words = ("publish", "orders", "--key", "ann", "--body", "x")
    run.text(*words, "--header", f"traceparent=00-{TRACE}-00f067aa0ba902b7-01", "--dedup-id", "d1")
    run.text(*words, "--header", 'said="ja\\ja"', "--tag", "vip")
    run.text("publish", "orders", "--key", "bob", "--body", "y")
    show = ("message", "show", "--topic", "orders")
    waiting = run.lines(*show, "--key", "ann")
    assert [one["source"] for one in waiting] == ["outbox", "outbox"]
    relay_once(world.settings(), limits=QUICK)
    assert find_by_dedup_id(world.runtime(), "orders", "d1", key="ann").seq == 1
    second, first = run.lines(*show, "--key", "ann")
    assert [one["source"] for one in (first, second)] == ["stream", "stream"]
    for selector in (("--trace-id", TRACE), ("--dedup-id", "d1", "--key", "ann")):
        (found,) = run.lines(*show, *selector)
        assert (found["message"], found["key"]) == (first["message"], "ann")
    (found,) = run.lines(*show, "--header", 'said="ja\\ja"', "--key", "ann")
    assert found["message"] == second["message"]
    at = datetime.now(UTC) - timedelta(seconds=60)
    assert [one["key"] for one in run.lines(*show, "--at", at.isoformat())] == ["ann", "ann", "bob"]
    assert run.failure(*show, "--at", at.isoformat(), "--within", "1").startswith("mqlayer: unknown message")
    text = run.text("key", "history", "orders", "ann", "--limit", "1")
    assert second["message"] in text
    assert f"earlier messages: --after {first['partition']}/{first['offset']}" in text
    lines = run.lines("key", "history", "orders", "ann", "--after", f"{first['partition']}/{first['offset']}")
    assert [line["message"] for line in lines[:-1]] == [first["message"]]
    set_archived(world.runtime(), "orders", archived=True)
    archive_pass(world.runtime())
    for _, partition, _ in world.partitions():
        world.client().delete(world.keys(partition).log)
    for wanted in (MessageFilter(trace_id=TRACE), MessageFilter(header=("said", '"ja\\ja"'), key="ann")):
        (hit,) = search_messages(world.runtime(), "orders", wanted).messages
        assert (hit.source, hit.key) == ("archive", "ann")
    page = search_messages(world.runtime(), "orders", MessageFilter(since=at))
    assert [(one.source, one.key) for one in page.messages] == [("archive", key) for key in ("ann", "ann", "bob")]
    world.right = Right.VIEW
    with Database(world.settings().control_dsn(), application="view") as database:
        viewer = Runtime(database, world.settings(), database)
        with pytest.raises(InvalidInput, match="may see no headers"):
            search_messages(viewer, "orders", MessageFilter(trace_id=TRACE))
        assert len(search_messages(viewer, "orders", MessageFilter(key="ann")).messages) == 2


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (MessageFilter(), "name a key, a time"),
        (MessageFilter(trace_id="7"), "32 hex digits"),
        (MessageFilter(since=datetime(2026, 1, 1)), "with its zone"),  # noqa: DTZ001  # what is refused
    ],
)
def test_a_search_without_a_bound_is_refused(stage: Stage, wanted: MessageFilter, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        search_messages(runtime(stage), stage.topic, wanted)
    with pytest.raises(NotFound, match="ids are remembered for 300 s"):
        find_by_dedup_id(runtime(stage), stage.topic, "d")


def test_a_day_of_the_archive_gets_its_index_once_it_is_over(archive_scene: ArchiveScene) -> None:
    archive_scene.send(1, "a", b"1")
    archive_scene.archive()
    here = runtime_of(archive_scene.database)
    assert index_days(here) == 0
    archive_scene.age(40)
    assert index_days(here) == 1
    assert index_days(here) == 0
    archive_scene.connection.execute("SET enable_seqscan = off")
    plan = archive_scene.rows(
        "EXPLAIN SELECT 1 FROM mqlayer_archive.record WHERE topic_id = 1 AND lp = 663 AND seq = 1"
    )
    assert "_of_lp" in str(plan)


def test_a_header_is_found_in_the_archive_behind_any_number_of_others_that_have_its_text(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_search, "MATCHES_LIMIT", 10)
    here = world.runtime()
    set_archived(here, "orders", archived=True)
    with kept_session(world.dsn, autocommit=True) as connection:
        for tenant in ["1"] + 25 * ["10"]:
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'x', %s)", [f'{{"tenant": "{tenant}"}}'])
    relay_once(world.settings(), limits=QUICK)
    archive_pass(here)
    with world.client() as client:
        client.delete(*(world.keys(partition).log for _, partition, _ in world.partitions()))
    found = search_messages(here, "orders", MessageFilter(header=("tenant", "1")), limit=5)
    assert [one.message for one in found.messages] == [f"1:{lp_of(b'k')}:1"]
