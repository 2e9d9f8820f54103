"""`mqlayer route …` as it is typed: plan, apply, watch, show, history, repair, drop."""

from __future__ import annotations

import getpass
import os
import pty
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from mqlayer import App
from mqlayer.routes import finish_changes
from mqlayer.runtime.runtime import Runtime
from tests.fixtures.commands import Commands
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.forked_programs import ask_python, is_stopped, run_python, start_python
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import merge
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(by_commands=True, nodes=2)


def ranges(run: Commands) -> list[tuple[int, int, int, str]]:
    return [(r["lp_from"], r["lp_to"], r["partition"], r["node"]) for r in run.lines("route", "show", "orders")]


AS_BEFORE = [(0, 512, 1, "node-1"), (512, 1024, 2, "node-2")]


def leave_planned(world: World) -> None:
    with broken_off_at("change.after_plan"):
        merge(runtime_of(world.database, world.key_prefix), "orders", [1, 2])


def test_a_plan_says_what_would_be_done_and_changes_nothing(world: World, run: Commands) -> None:
    words = ("route", "split", "orders", "1", "--at", "100", "--at", "300", "--to", "node-2")
    said = run.text(*words)
    assert said.splitlines() == [
        "split of topic orders: route version 1 -> 2",
        "  ends partition 1: LPs [0, 512) on node-1",
        "  makes a partition: LPs [0, 100) on node-2",
        "  makes a partition: LPs [100, 300) on node-2",
        "  makes a partition: LPs [300, 512) on node-2",
        "nothing was changed: --yes does this",
    ]
    assert run.text(*words, "--plan") == said
    assert ranges(run) == AS_BEFORE
    assert world.rows("SELECT 1 FROM mqlayer.route_change") == []


def test_what_is_applied_is_what_was_planned(world: World, run: Commands) -> None:
    words = ("route", "split", "orders", "1", "--at", "100", "--to", "node-1", "--to", "node-2")
    planned = run.text(*words).splitlines()[:-1]
    *done, last = run.text(*words, "--yes", "--if-version", "1").splitlines()
    assert done == planned
    assert last == "route version 2 of topic orders is in force"
    assert ranges(run) == [(0, 100, 3, "node-1"), (100, 512, 4, "node-2"), (512, 1024, 2, "node-2")]


def test_a_merge_and_a_move(world: World, run: Commands) -> None:
    assert "LPs [0, 1024) on node-1" in run.text("route", "merge", "orders", "2", "1", "--yes")
    assert "on node-2" in run.text("route", "move", "orders", "3", "--yes")
    assert ranges(run) == [(0, 1024, 4, "node-2")]
    assert "on node-1" in run.text("route", "move", "orders", "4", "--to", "node-1", "--yes")


def test_a_plan_says_that_it_goes_on_without_the_old_node(world: World, run: Commands) -> None:
    assert "does not answer" in run.text("route", "move", "orders", "1", "--unreachable")
    assert "does not answer" not in run.text("route", "move", "orders", "1")


def test_a_split_without_a_point_halves_the_load(world: World, run: Commands) -> None:
    world.publish(300, keys=60)
    run.text("relay", "--once")
    said = run.text("route", "split", "orders", "1")
    point = int(said.splitlines()[2].split(",")[1].split(")")[0])
    lps = [row[0] for row in world.rows("SELECT lp FROM mqlayer_app.outbox WHERE lp < 512")]
    unevenness = {at: abs(len(lps) - 2 * sum(lp < at for lp in lps)) for at in range(1, 512)}
    assert unevenness[point] == min(unevenness.values())
    assert run.text("route", "split", "orders", "1", "--measure", "0.01") == said, "where nothing comes, all that came"


BAD: Final[list[tuple[tuple[str, ...], str]]] = [
    (("split", "orders", "1", "--at", "0"), "a part would be empty"),
    (("split", "orders", "1", "--at", "600"), "a part would be empty"),
    (("split", "orders", "1", "--at", "5", "--at", "5"), "several different"),
    (("split", "orders", "1", "--at", "5", "--measure", "1"), "not both"),
    (("split", "orders", "1", "--measure", "4000"), "measured for 0 to 3600"),
    (("split", "orders", "9", "--at", "5"), "unknown partition 9"),
    (("split", "orders", "9"), "unknown partition 9"),
    (("split", "orders", "1", "--at", "5", "--to", "nobody"), "unknown node 'nobody'"),
    (("split", "orders", "1", "--at", "5", "--to", "node-1", "--to", "node-1", "--to", "node-1"), "name one node"),
    (("merge", "orders", "1"), "two different partitions"),
    (("merge", "orders", "1", "1"), "two different partitions"),
    (("merge", "orders", "1", "3"), "unknown partition 3"),
    (("move", "orders", "1", "--to", "node-1"), "is on that node already"),
    (("move", "orders", "1", "--if-version", "2"), "is at route version 1, not 2"),
    (("move", "orders", "1", "--plan", "--yes"), "choose one"),
    (("move", "orders", "1", "--watch"), "mqlayer route watch"),
    (("move", "nowhere", "1"), "mqlayer topic create nowhere"),
    (("move", "No Where", "1"), "bad topic name"),
    (("show", "nowhere"), "mqlayer topic create nowhere"),
    (("show", "orders", "--version", "7"), "topic 'orders' has 1 to 1"),
    (("history", "nowhere"), "mqlayer topic create nowhere"),
    (("watch", "nowhere"), "mqlayer topic create nowhere"),
    (("repair", "nowhere"), "mqlayer topic create nowhere"),
    (("drop", "nowhere"), "mqlayer topic create nowhere"),
    (("drop", "orders"), "there is nothing to drop"),
]
"""What can't be done, and a part of what is said to it."""


@pytest.mark.slow
def test_what_can_not_be_done_is_one_line_and_changes_nothing(world: World, run: Commands) -> None:
    """Cases 13 to 15."""
    for words, reason in BAD:
        assert reason in run.failure("route", *words)
        if words[0] in ("split", "merge", "move") and not {"--plan", "--watch"} & set(words):
            assert reason in run.failure("route", *words, "--yes")
    assert ranges(run) == AS_BEFORE
    assert world.rows("SELECT 1 FROM mqlayer.route_change") == []
    assert world.rows("SELECT count(*)::int FROM mqlayer.partition") == [(2,)]


def test_partitions_that_are_not_adjacent_are_not_merged(world: World, run: Commands) -> None:
    """Case 14."""
    run.text("route", "split", "orders", "1", "--at", "100", "--yes")
    assert "not adjacent" in run.failure("route", "merge", "orders", "3", "2", "--yes")


def test_a_route_is_drawn_with_its_lineage(world: World, run: Commands) -> None:
    run.text("route", "split", "orders", "1", "--at", "256", "--yes")
    title, head, first, second, third = run.text("route", "show", "orders").splitlines()
    assert title == "topic orders, route version 2"
    assert head.split() == ["partition", "LPs", "of", "all", "node", "state", "from"]
    assert first.split() == ["3", "[0,", "256)", "#" * 8 + "." * 24, "node-1", "open", "1"]
    assert second.split()[3] == "." * 8 + "#" * 8 + "." * 16
    assert third.split() == ["2", "[512,", "1024)", "." * 16 + "#" * 16, "node-2", "open"]
    (old, _) = run.lines("route", "show", "orders", "--version", "1")
    assert (old["partition"], old["state"], old["parents"]) == (1, "sealed", [])
    assert [line["parents"] for line in run.lines("route", "show", "orders")] == [[1], [1], []]


def test_the_history_tells_who_did_what_and_how_long_it_took(world: World, run: Commands) -> None:
    assert "never changed" in run.text("route", "history", "orders")
    run.text("route", "split", "orders", "1", "--at", "256", "--yes")
    run.text("route", "merge", "orders", "3", "4", "--yes")
    first, second = run.lines("route", "history", "orders")
    assert (first["version"], first["kind"], first["state"]) == (2, "split", "done")
    assert (second["version"], second["parents"], second["successors"]) == (3, [3, 4], [5])
    assert first["actor"].startswith(f"{getpass.getuser()}@")
    assert all(0 < first[step] < 60_000 for step in ("seal_ms", "open_ms", "done_ms"))
    assert "1 -> 3, 4" in run.text("route", "history", "orders")


def test_an_open_change_is_finished_by_the_next_command(world: World, run: Commands) -> None:
    leave_planned(world)
    assert "mqlayer route repair orders" in run.failure("route", "move", "orders", "1")
    refused = run("route", "move", "orders", "1", "--yes")
    assert refused.exit_code == 1
    assert "unknown partition 1" in refused.stderr.splitlines()[-1]
    assert [line["state"] for line in run.lines("route", "history", "orders")] == ["done"]


def test_earlier_changes_are_finished_once_for_a_command(
    world: World, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[str] = []

    def noted(runtime: Runtime, *, topic: str) -> dict[int, str]:
        finished.append(topic)
        return finish_changes(runtime, topic=topic)

    monkeypatch.setattr("mqlayer.routes.planner.finish_changes", noted)
    leave_planned(world)
    finished.clear()
    assert "route version 3" in run.text("route", "move", "orders", "3", "--yes")
    assert finished == ["orders"]


def test_an_open_change_is_not_finished_where_a_version_is_asked_for(world: World, run: Commands) -> None:
    leave_planned(world)
    assert "is open" in run.failure("route", "move", "orders", "1", "--yes", "--if-version", "1")
    assert ranges(run) == AS_BEFORE


@pytest.mark.full
def test_repair_says_what_became_of_each_change(world: World, run: Commands) -> None:
    assert run.text("route", "repair") == "no change is open\n"
    leave_planned(world)
    world.rows("UPDATE mqlayer.node SET armed_run_id = 'another' WHERE name = 'node-2'")
    waiting = run("route", "repair", "orders")
    assert waiting.exit_code == 1
    assert "change 1 waits: " in waiting.stderr
    run.text("node", "rearm", "node-2")
    assert run.text("route", "repair", "orders") == "change 1 is done\n"


def test_a_change_that_sealed_nothing_is_dropped(world: World, run: Commands) -> None:
    leave_planned(world)
    assert run.text("route", "drop", "orders") == "change 1 is dropped; the route is as before\n"
    assert ranges(run) == AS_BEFORE
    (change,) = run.lines("route", "history", "orders")
    assert (change["state"], change["seal_ms"]) == ("dropped", None)
    assert run.text("route", "merge", "orders", "1", "2", "--yes").endswith("is in force\n")


def consumer(world: World) -> App:
    app = App(world.settings(lease_s=10.0))
    app.consumer("orders", group="ledger")(lambda body: None)
    return app


def test_watching_ends_when_every_group_has_drained(world: World, run: Commands) -> None:
    world.publish(50)
    run.text("relay", "--once")
    app = consumer(world)
    app.start()
    app.stop()
    for name in ("1", "2"):
        run.text("route", "split", "orders", name, "--yes")
    late = run("route", "watch", "orders", "--timeout", "0")
    assert late.exit_code == 1
    assert late.stderr == "mqlayer: not drained within 0 s by: ledger\n"
    assert late.stdout.startswith("group ledger, partition 1: ")
    app = consumer(world)
    app.start()
    try:
        said = run.text("route", "watch", "orders", "--timeout", "30").splitlines()
        assert said[-1] == "every group of topic orders has drained what is sealed"
        said = run.text("route", "merge", "orders", "3", "4", "--yes", "--watch", "--timeout", "30").splitlines()
        assert said[-1] == "every group of topic orders has drained what is sealed"
    finally:
        app.stop()


@pytest.mark.full
def test_watching_says_that_a_node_is_away(world: World, run: Commands) -> None:
    app = consumer(world)
    app.start()
    app.stop()
    run.text("route", "split", "orders", "1", "--yes")
    world.rows("UPDATE mqlayer.node SET armed_run_id = 'another'")
    assert "partition 1: its node is away" in run("route", "watch", "orders", "--timeout", "0").stdout


@pytest.mark.full
def test_on_a_terminal_watching_is_live(world: World, run: Commands) -> None:
    app = consumer(world)
    app.start()
    app.stop()
    run.text("route", "split", "orders", "1", "--yes")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "wb", buffering=0) as terminal:
        code = run_python(
            *("mqlayer", "route", "watch", "orders", "--timeout", "0"),
            env=world.environment(TERM="xterm", COLUMNS="100"), stdout=terminal, timeout=60,
        )  # fmt: skip
        shown = screen.read(4096).decode()
    assert code == 1
    assert "left to drain" in shown
    assert "ledger" in shown


def test_an_operator_who_is_stopped_while_planning_holds_the_topic_for_seconds_only(
    world: World, run: Commands, tmp_path: Path
) -> None:
    command = ("mqlayer", "route", "split", "orders", "1", "--at", "100", "--yes")
    environment = world.environment("change.before_plan_commit=stop")
    said = tmp_path / "said"
    with said.open("wb") as output:
        stopped = start_python(*command, env=environment, stderr=output)
    try:
        wait_until(lambda: is_stopped(stopped), timeout_s=60, what="it stopped")
        assert "is in force" in run.text("route", "split", "orders", "2", "--at", "600", "--yes")
    finally:
        stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(30) == 1
    assert len(said.read_text().splitlines()) == 1
    assert [change["kind"] for change in run.lines("route", "history", "orders")] == ["split"]
    assert ranges(run)[0] == AS_BEFORE[0]


def test_two_operators_get_one_version_each_or_a_conflict(world: World, run: Commands) -> None:
    """Case 12."""
    command = ["mqlayer", "route", "split", "orders", "--yes", "--if-version", "1", "--at"]

    def split(partition: int, at: int) -> subprocess.CompletedProcess[str]:
        return ask_python(*command, str(at), str(partition), env=world.environment())

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(split, (1, 2), (100, 600)))
    assert sorted(done.returncode for done in ended) == [0, 1]
    (loser,) = (done for done in ended if done.returncode)
    assert len(loser.stderr.splitlines()) == 1
    assert [change["version"] for change in run.lines("route", "history", "orders")] == [2]
