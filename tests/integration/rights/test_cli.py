"""Who may look runs each command that only shows, and no other; who may operate runs those that change, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from tests.fixtures.command_scenes import SCENES, SHOWS, SHOWS_BODIES, System, typed, typed_for_nothing
from tests.fixtures.command_tree import leaf_commands
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Stage
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.roles import Roles, role_dsn
from tests.fixtures.screens import faults_of
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of

PLANS = {
    "archive forget-export": "lake",
    "archive retain": "--older-than 2d", "dead redrive": "orders g --all", "group retire": "orders g",
    "group seek": "orders g --to latest", "node lost": "node-1",
    "node balance": "", "node drain": "node-1", "node remove": "node-1", "outbox adopt": "", "outbox renew": "",
    "outbox quarantine discard": "7", "replay start": "orders g --all", "route reopen": "orders",
    "snapshot drop": "cut", "analytics schedule drop": "nightly",
    "versions forget": "sink e --reason r", "versions set": "sink e 2 --reason r",
    "topic delete": "orders", "upgrade finalize": "", "group deploy": "orders g --to main",
    "route merge": "orders {first} {second}", "route move": "orders {first}",
    "route split": "orders {first} --at 100",
}  # fmt: skip
"""What commands that change something only show, too, where nothing says that they are to do it."""
NOTHING_LEFT = {"route reopen": ["orders", "--yes"]}
"""Commands that change something and are tried with nothing to do only: a control database that lost a change needs a
Postgres that fell back (see failover/test_lost_changes.py)."""
BY_FUNCTION = {"outbox delayed cancel"}
"""Publishers of a topic may cancel its messages, so only the function that does it can judge who may."""
OTHERS = {
    **dict.fromkeys(
        (f"analytics {job}" for job in ("audit", "latency", "failures", "fairness", "skew", "all")),
        "needs Java, and the right to analyze",
    ),
    **dict.fromkeys(
        ("analytics journeys", "analytics what-if"),
        "needs Java, and the right to analyze",
    ),
    "analytics shadow": "runs a program's handlers, under the right to analyze: see test_shadow.py",
    "analytics effects": "needs Java, the right to analyze, and that to view where the effects are",
    "analytics certify": "needs a snapshot, and the right to analyze: see test_certificates.py",
    "console": "runs until it is stopped: see console/test_access.py",
    "console-password": "prints a line: see console/test_access.py",
    "consume": "runs until it is stopped, under the right to consume",
    "asyncapi": "reads a program; with --nodes, what node list shows",
    "debug": "runs a program's handler, under the right to operate: see test_debug.py",
    "publish": "needs the right to publish: see test_cli_messages.py",
    "message body": "writes a body, to those who may see bodies: see test_large_bodies.py",
    "peek": "shows what the nodes hold, under their rights: see test_cli_messages.py",
    "tail": "runs until it is stopped, and shows what peek shows",
    "relay": "runs until it is stopped, under the right to relay; operate has it",
    "doctor": "its exit code says how the whole system is: see test_the_doctor_says_the_same_to_both",
    "grant": "needs the right to migrate: see the tests of it below",
    "revoke": "needs the right to migrate: see the tests of it below",
    "migrate": "needs the right to migrate: see the tests of it below",
    "init": "writes files",
    "size": "asks no server",
    "up": "works on a directory, by the account",
    "down": "works on a directory, by the account",
    "status": "works on a directory, by the account",
}  # fmt: skip
JOBS = {
    "analytics schedule run": Right.WORK,
    "archive export": Right.WORK, "archive forget-export": Right.WORK, "archive retain": Right.WORK,
    "archive run": Right.WORK, "archive verify-export": Right.WORK,
    "node rearm": Right.RELAY, "outbox recover": Right.RELAY,
    "outbox rotate": Right.WORK, "route repair": Right.WORK, "trim": Right.WORK,
}  # fmt: skip
"""Commands that do by hand what a process does by itself: its right will do."""
CONSUMERS = {
    "dead discard", "group close-breaker", "group deploy", "group evict", "group open-breaker", "group pause",
    "group resume", "group seek", "key skip-head",
}  # fmt: skip
"""Commands on a group that its consumers may run, too."""
CHANGES = SCENES.keys() | NOTHING_LEFT.keys()


@pytest.fixture(autouse=True)
def here(database_dsn: str, key_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MQLAYER_APP_DSN", raising=False)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", key_prefix)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def system(stage: Stage, start_redis: StartRedis) -> System:
    return System(stage, start_redis)


Act = Callable[[Right], str]


@pytest.fixture
def act_as(database_dsn: str, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Act:
    """Have the commands that follow log in as a role with one right; return its name."""

    def act(right: Right) -> str:
        dsn = role_dsn(database_dsn, right)
        monkeypatch.setenv("MQLAYER_DSN", dsn)
        return Roles.name_of(dsn)

    return act


def path_of(words: list[str]) -> str:
    """Return a command's words without its arguments."""
    known = CHANGES | SHOWS.keys() | SHOWS_BODIES.keys() | OTHERS.keys()
    return next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in known), " ".join(words))


def test_every_command_is_known_here() -> None:
    assert {path_of(words) for words in leaf_commands()} == CHANGES | SHOWS.keys() | SHOWS_BODIES.keys() | OTHERS.keys()


@pytest.mark.parametrize("command", some_of(sorted(SCENES), 3))
def test_who_may_operate_does_what_who_may_view_is_refused(
    system: System, act_as: Act, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output then fits a terminal."""
    scene = SCENES[command]
    words = [*command.split(), *typed(scene, system)]
    role = act_as(Right.VIEW)
    named = "mqlayer grant RIGHT ROLE" if command in BY_FUNCTION else f"mqlayer grant operate {role}"
    assert named in Commands().failure(*words)
    act_as(Right.OPERATE)
    monkeypatch.setenv("COLUMNS", "80")
    shown = Commands().text(*words)
    assert faults_of(shown, 80) == []
    assert " ".join(scene.said.format(**system.facts).split()) in " ".join(shown.split())


@pytest.mark.slow
def test_who_may_view_is_refused_each_change_where_there_is_nothing_to_do(database_dsn: str, act_as: Act) -> None:
    """Postgres refuses statements; a command that finds nothing to do runs none that changes something."""
    nothing = {command: typed_for_nothing(scene) for command, scene in SCENES.items()} | NOTHING_LEFT
    for right in (Right.VIEW, Right.ANALYZE):
        role = act_as(right)
        for command, words in nothing.items():
            said = Commands().failure(*command.split(), *words)
            named = "mqlayer grant RIGHT ROLE" if command in BY_FUNCTION else f"mqlayer grant operate {role}"
            assert named in said, (command, said)
    with Database(database_dsn) as database, database.connection() as connection:
        assert connection.execute("SELECT count(*) FROM mqlayer.audit").fetchone() == (0,)


@pytest.mark.parametrize("command", some_of(JOBS, 3))
def test_a_process_may_do_its_job_by_hand(system: System, act_as: Act, command: str) -> None:
    words = typed(SCENES[command], system)
    act_as(JOBS[command])
    assert SCENES[command].said.format(**system.facts) in Commands().text(*command.split(), *words)


@pytest.mark.parametrize("command", some_of(sorted(CONSUMERS), 4))
def test_a_consumer_changes_its_own_group_and_no_other(
    system: System, roles: Roles, monkeypatch: pytest.MonkeyPatch, logging_as_before: None, command: str
) -> None:
    words = [*command.split(), *typed(SCENES[command], system)]
    monkeypatch.setenv("MQLAYER_DSN", roles.login(Right.CONSUME, scopes=["orders/other"]))
    Commands().failure(*words)
    monkeypatch.setenv("MQLAYER_DSN", roles.login(Right.CONSUME, scopes=["orders/g"]))
    assert SCENES[command].said.format(**system.facts) in Commands().text(*words)


def test_who_may_view_sees_plans_of_changes(system: System, act_as: Act) -> None:
    system.old_day()
    system.cut()
    system.make_schedule()
    system.another_node()
    system.exported()
    first, second = system.stage.partitions
    act_as(Right.VIEW)
    for command, words in PLANS.items():
        result = Commands()(*command.split(), *words.format(first=first, second=second).split())
        assert (result.exit_code, "nothing was changed: --yes" in result.stdout) == (0, True), (command, result.output)


@pytest.mark.slow
def test_who_may_view_runs_all_that_shows(system: System, act_as: Act) -> None:
    system.all_that_is_shown()
    for right in (Right.VIEW, Right.OPERATE):
        act_as(right)
        for command, words in SHOWS.items():
            result = Commands()(*command.split(), *words.format(**system.facts).split())
            assert result.exit_code == 0, (right, command, result.output)


def test_bodies_are_for_those_who_operate(system: System, act_as: Act) -> None:
    for command, words in SHOWS_BODIES.items():
        typed_words = [*command.split(), *words.format(**system.facts).split()]
        act_as(Right.VIEW)
        assert "permission denied" in Commands().failure(*typed_words)
        act_as(Right.OPERATE)
        Commands().text(*typed_words)


def test_the_doctor_says_the_same_to_both(system: System, act_as: Act) -> None:
    found = []
    for right in (Right.VIEW, Right.OPERATE):
        act_as(right)
        result = Commands()("doctor")
        assert isinstance(result.exception, SystemExit | None)
        found.append((result.exit_code, result.stdout.count("\n")))
    assert found[0] == found[1]


@pytest.mark.parametrize("command", ["grant view {role}", "revoke view {role}"])
def test_rights_and_schemas_are_neither_for_those_who_view_nor_who_operate(act_as: Act, command: str) -> None:
    for right in (Right.VIEW, Right.OPERATE):
        role = act_as(right)
        assert f"mqlayer grant migrate {role}" in Commands().failure(*command.format(role=role).split())


def test_migrating_is_for_the_schemas_owner_where_something_is_left_to_migrate(act_as: Act, database_dsn: str) -> None:
    role = act_as(Right.OPERATE)
    assert "nothing to do" in Commands().text("migrate")
    with kept_session(database_dsn) as connection:
        connection.execute("DELETE FROM mqlayer_app.migration")
        connection.commit()
    assert f"GRANT mqlayer_owner TO {role}" in Commands().failure("migrate")
