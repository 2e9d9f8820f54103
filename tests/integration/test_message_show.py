"""`message show`: where a message is, what became of it in each group, and who sees its body."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mqlayer.archive import archive_pass
from mqlayer.domain.routing import lp_of
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.rights import Right
from mqlayer.relay import relay_once
from mqlayer.topics import set_archived
from tests.fixtures.commands import Commands, facts_of
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.failed_messages import Failing, identity_of
from tests.fixtures.worker_stores import UseStores
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World


def states(found: dict[str, Any]) -> dict[str, str]:
    return {one["group"]: one["state"] for one in found["groups"]}


def steps(found: dict[str, Any], group: str | None = None) -> list[str]:
    """Return the steps of a message in order: outside of any group, or in one."""
    return [one["step"] for one in found["steps"] if one.get("group") == group]


def absences(found: dict[str, Any], group: str | None = None) -> list[tuple[str, str]]:
    """Return the steps that are missing, each with the kind of its absence."""
    return [(one["steps"], one["absence"]) for one in found["missing"] if one.get("group") == group]


@pytest.fixture
def typed(stage: Stage, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    for name in ("MQLAYER_DSN", "MQLAYER_APP_DSN"):
        monkeypatch.setenv(name, stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    return Commands()


@pytest.mark.world(by_commands=True)
def test_a_message_is_followed_from_the_outbox_to_its_partition(world: World, run: Commands) -> None:
    run.text("publish", "orders", "--key", "ann", "--body", '{"id": 1}', "--header", "trace=7", "--tag", "vip")
    ((row_id,),) = world.rows("SELECT id FROM mqlayer_app.outbox")
    (found,) = run.lines("message", "show", f"outbox/{row_id}")
    assert (found["outbox"], found["message"], found["stored"], found["key"]) == (
        "waits for a relay", None, False, "ann",
    )  # fmt: skip
    assert steps(found) == ["committed"]
    relay_once(world.settings(), limits=QUICK)
    (found,) = run.lines("message", "show", f"outbox/{row_id}")
    assert steps(found) == ["committed", "relayed", "stored"]
    assert absences(found) == [("time of the relay", "never_recorded")]
    (seen,) = run.lines("peek", "orders")
    assert (found["outbox"], found["message"], found["stored"]) == ("relayed", seen["message"], True)
    place = f"{seen['partition']}/{seen['offset']}"
    for named in (found["message"], place, f"orders/{place}"):
        (same,) = run.lines("message", "show", named)
        assert {name: same[name] for name in seen if name not in {"reordered", "published_at"}} == {
            name: value for name, value in seen.items() if name not in {"reordered", "published_at"}
        }
        assert (same["outbox"], same["node"], same["groups"]) == ("relayed", "node-1", [])
    shown = run.text("message", "show", place)
    assert facts_of(shown).items() >= {
        "message": seen["message"], "key": "ann", "outbox": "relayed", "tags": "vip", "header trace": "7",
    }.items()  # fmt: skip
    assert "topic orders has no group" in shown
    assert shown.endswith('body: 9 B, shown as json\n{\n  "id": 1\n}\n')
    assert run("message", "show", place, "--raw").stdout == '{"id": 1}'


def test_each_group_says_what_became_of_it(stage: Stage, typed: Commands) -> None:
    failing = Failing(stage)
    stage.send([("a", b"{}"), ("b", b"{}"), ("c", b"{}")])
    records = failing.records()
    failing.attempt(records[0], 1, "KeyError at shop.py:9")
    failing.park(records[0], cause="exhausted", attempts=1)
    (dead_id,) = failing.dead_letter(records[1], reason="no such customer", actor="ops")
    stage.consume(Recorder(), group="done")
    stage.wait_settled("done")
    parked, dead, waits = (typed.lines("message", "show", str(identity_of(one)))[0] for one in records)
    assert (states(parked)["g"], states(dead)["g"], states(waits)["g"]) == ("parked", "dead", "waiting")
    assert [(one["group"], one["error"]) for one in parked["attempts"]] == [("g", "KeyError at shop.py:9")]
    (of_dead,) = (one for one in dead["groups"] if one["group"] == "g")
    assert (of_dead["by"], of_dead["detail"]) == ("ops", f"dead message {dead_id}, exhausted: no such customer")
    assert {states(found)["done"] for found in (parked, dead, waits)} == {"settled"}
    assert steps(parked, "g") == ["failed", "parked", "waiting"]
    assert steps(dead, "g") == ["dead"]
    assert steps(waits, "g") == ["waiting"]
    assert steps(waits, "done") == ["settled"]
    assert absences(waits, "done") == [("deliveries, member and time of settling", "never_recorded")]
    assert absences(waits) == [("committed, relayed", "no_longer_known")]


def test_after_trimming_the_archive_knows_who_handled_it(stage: Stage, typed: Commands) -> None:
    here = runtime_of(stage.database, stage.prefix)
    set_archived(here, stage.topic, archived=True)
    stage.send([(f"k{number}", b"body") for number in range(600)])
    stage.consume(Recorder(), group="done")
    stage.wait_settled("done")
    (seen, *_) = typed.lines("peek", "orders", "--limit", "1000")
    archive_pass(here)
    assert trim_pass(here).total > 0
    for named in (seen["message"], f"{seen['partition']}/{seen['offset']}"):
        (found,) = typed.lines("message", "show", named)
        assert (found["stored"], found["archived"], found["body"], found["offset"]) == (
            False, True, "body", seen["offset"],
        )  # fmt: skip
        ((group),) = found["groups"]
        assert (group["group"], group["state"]) == ("done", "handled")
        assert group["by"].startswith("m-")
        assert steps(found) == ["stored", "archived"]
        delivered, settled = (one for one in found["steps"] if one.get("group") == "done")
        assert (delivered["step"], settled["step"]) == ("delivered", "settled")
        assert delivered["by"] == settled["by"] == group["by"]
    text = typed.text("message", "show", seen["message"])
    assert "not there any more" in text
    assert re.search(r"\n[-0-9]+ [:.0-9]+  settled +group done, by m-[-.a-z0-9]+, attempt 1, partition", text)


def test_a_message_that_was_trimmed_and_not_archived_is_told_from_one_that_never_was(
    stage: Stage, typed: Commands
) -> None:
    stage.send([("k", b"body")] * 600)
    stage.consume(Recorder(), group="done")
    stage.wait_settled("done")
    assert trim_pass(runtime_of(stage.database, stage.prefix)).total > 0
    lp = lp_of(b"k")
    (found,) = typed.lines("message", "show", f"1:{lp}:1", "--topic", "orders")
    assert (found["stored"], found["partition"], steps(found)) == (False, None, [])
    assert ("stored", "no_longer_known") in absences(found)
    assert "unknown message" in typed.failure("message", "show", f"1:{lp}:601", "--topic", "orders")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("x", "'x' names no message: say SOURCE:LP:SEQ, PARTITION/OFFSET"),
        ("999999/1", "unknown partition 999999"),
        ("mails/1/1", "unknown"),
        ("1:5:999", "unknown message '1:5:999'"),
        ("outbox/12345", "unknown row of the outbox"),
    ],
)
def test_what_is_not_there_is_refused(stage: Stage, typed: Commands, named: str, said: str) -> None:
    assert said in typed.failure("message", "show", named)


@pytest.mark.world(by_commands=True, relayed=1)
def test_bodies_and_headers_are_hidden_from_those_who_only_view(
    world: World, run: Commands, use_stores: UseStores
) -> None:
    """The server says so; the nodes are asked under a user that could read them."""
    (seen,) = run.lines("peek", "orders")
    shown = {"peek": ("peek", "orders"), "message": ("message", "show", f"{seen['partition']}/{seen['offset']}")}
    for right, hidden in ((Right.VIEW, True), (Right.OPERATE, False)):
        world.right = right
        use_stores(world.environment())
        for words in shown.values():
            (line,) = run.lines(*words)
            assert line["body"] == (None if hidden else seen["body"])
            assert (line["headers"] is None, line["body_is"] == "hidden") == (hidden, hidden)
            result = run(*words)
            assert (seen["body"] in result.output, "mqlayer grant operate" in result.output) == (not hidden, hidden)
        raw = run(*shown["message"], "--raw")
        assert (raw.stdout, raw.exit_code) == ("" if hidden else seen["body"], 0)
