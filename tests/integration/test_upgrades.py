"""Old and new code side by side: who is served, who is refused, and the step to the next protocol version."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mqlayer import Receiver
from mqlayer.domain.protocol import PROTOCOL, RELEASE
from mqlayer.errors import Conflict, ProducerClosed, TransactionConflict, VersionRefused
from mqlayer.failpoints import arm
from mqlayer.groups import GroupSettings, MemberSession, ensure_group, join, leave, release, send_heartbeat
from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.maintenance.upgrades import cancel, finalize, finalize_when_due, run_contracts, upgrade_status
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import SCHEMAS, SchemaName, contract, migrate
from mqlayer.postgres.protocol import InForce
from mqlayer.relay import Relay, relay_once
from mqlayer.runtime.presence import Presence
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.workers.tasks import TASKS
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Stage, StartStage, member_of
from tests.fixtures.failpoints import armed, broken_off_at
from tests.fixtures.forked_programs import run_python
from tests.fixtures.next_release import LATER, NEXT, become
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

OLD, NEW = PROTOCOL.most, NEXT.most
LEASE_S = 60.0
PROGRAM = """
import mqlayer

app = mqlayer.App()

@app.consumer("orders", group="g")
def handle(body: bytes) -> None: ...
"""


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of two partitions."""
    return start_stage(redis_url, partitions=2)


@pytest.fixture
def system(stage: Stage) -> Runtime:
    """An operator's runtime, after the next release's migration."""
    prepared(stage)
    return runtime_of(stage.database, stage.prefix, application=stage.database, actor="ann@desk")


def prepared(stage: Stage | World) -> None:
    """Serve the next version too, as its migration does."""
    for schema in SCHEMAS.values():
        ask(stage, f"UPDATE {schema}.protocol SET serves_to = {NEW}, expanded_at = now() - interval '1 hour'")


def refusing_old(stage: Stage | World) -> None:
    """Refuse older code, as a finalization does that drains it."""
    prepared(stage)
    for schema in SCHEMAS.values():
        ask(stage, f"UPDATE {schema}.protocol SET serves_from = {NEW}")


def ask(stage: Stage | World, statement: str) -> list[tuple[object, ...]]:
    with stage.database.connection() as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if (cursor.statusmessage or "").startswith("SELECT") else []


def joined(stage: Stage, name: str, lease_s: float = LEASE_S) -> MemberSession:
    group = ensure_group(
        stage.runtime, RouteCache(stage.database), topic=stage.topic, name="g", settings=GroupSettings()
    )
    return join(stage.database, group_id=group.group_id, member_id=name, lease_s=lease_s)


def in_force(stage: Stage | World) -> list[int]:
    return [ask(stage, f"SELECT in_force FROM {schema}.protocol")[0][0] for schema in SCHEMAS.values()]  # type: ignore[misc]


def test_a_finalization_is_refused_while_an_older_member_lives_and_names_it(
    stage: Stage, system: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = joined(stage, "old")
    become(monkeypatch)
    assert finalize(system) == "blocked"
    assert in_force(stage) == [OLD, OLD]
    (blocker,) = upgrade_status(system).blockers
    assert (blocker.name, blocker.host, blocker.pid) == (f"{stage.topic}/g/old", socket.gethostname(), os.getpid())
    assert (blocker.version, blocker.most, blocker.beats) == (RELEASE, OLD, True)
    leave(stage.database, session)
    assert finalize(system) == "finalized"
    assert in_force(stage) == [NEW, NEW]
    assert finalize(system) == "finalized", "a second call does nothing"
    assert ask(stage, "SELECT actor, facts->>'version' FROM mqlayer.audit WHERE act = 'upgrade finalize'") == [
        ("ann@desk", str(NEW))
    ]


def test_a_silent_older_member_is_gone_for_good_and_others_get_its_partitions(
    stage: Stage, system: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = joined(stage, "old")
    assert len(send_heartbeat(stage.database, old, lease_s=LEASE_S).assignments) == 2
    ask(stage, "UPDATE mqlayer.member SET lease_until = now() - interval '1 ms'")
    with monkeypatch.context() as patch:
        become(patch)
        joined(stage, "new")
        ask(stage, "UPDATE mqlayer.member SET lease_until = now() - interval '1 ms' WHERE member_id = 'old'")
        assert finalize(system) == "finalized"
        assert set(stage.owners().values()) == {"new"}
    assert not send_heartbeat(stage.database, old, lease_s=LEASE_S).known
    with pytest.raises(
        VersionRefused, match=f"control protocol {NEW}, this code needs protocol {PROTOCOL}: upgrade mqlayer"
    ):
        join(stage.database, group_id=old.group_id, member_id="old", lease_s=LEASE_S, own=[old.session])


def test_an_older_member_that_restarts_before_the_finalization_joins_again(stage: Stage, system: Runtime) -> None:
    leave(stage.database, joined(stage, "old"))
    assert migrate(stage.dsn) == []
    again = joined(stage, "old")
    assert send_heartbeat(stage.database, again, lease_s=LEASE_S).known
    assert [one.name for one in upgrade_status(system).living] == [f"{stage.topic}/g/old"]


def test_a_member_that_joins_while_a_finalization_commits_waits_and_is_refused(
    stage: Stage, system: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between the check and the write there is no room: both lock the protocol's row."""
    leave(stage.database, joined(stage, "old"))
    go = tmp_path / "go"
    arm("upgrade.before_commit", f"wait:{go}")
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with ThreadPoolExecutor(2) as threads:
        with monkeypatch.context() as patch:
            become(patch)
            finalizing = threads.submit(finalize, system)
            wait_until(
                lambda: ask(stage, "SELECT FROM pg_locks WHERE relation = 'mqlayer.protocol'::regclass"
                            " AND mode = 'RowShareLock'"), what="the lock")  # fmt: skip
            # The joining one is of this release.
            patch.setattr("mqlayer.postgres.protocol.PROTOCOL", PROTOCOL)
            joining = threads.submit(joined, stage, "old")
            wait_until(lambda: ask(stage, waiting)[0][0] == 1, what="the join to wait")
            patch.setattr("mqlayer.postgres.protocol.PROTOCOL", NEXT)
            go.touch()
            assert finalizing.result(20) == "finalized"
        with pytest.raises(VersionRefused):
            joining.result(20)


def test_a_finalization_waits_for_a_member_that_joins_and_sees_it(
    stage: Stage, system: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leave(stage.database, joined(stage, "old"))
    monkeypatch.setattr("mqlayer.maintenance.upgrades.LOCK_WAIT", "200ms")
    go = tmp_path / "go"
    arm("member.before_join_commit", f"wait:{go}")
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(joined, stage, "old")
        wait_until(
            lambda: ask(stage, "SELECT FROM pg_locks WHERE relation = 'mqlayer.protocol'::regclass"), what="the lock"
        )
        monkeypatch.setattr("mqlayer.maintenance.upgrades.PROTOCOL", NEXT)
        with pytest.raises(TransactionConflict):
            finalize(system)
        go.touch()
        joining.result(20)
    assert finalize(system) == "blocked"
    assert in_force(stage) == [OLD, OLD]


def test_a_running_older_member_hands_its_partitions_over_and_ends(stage: Stage) -> None:
    handled: list[bytes] = []
    held, go = threading.Event(), threading.Event()

    def handle(body: bytes) -> None:
        if body == b"1":
            held.set()
            assert go.wait(20)
        handled.append(body)

    app = stage.consume(handle)
    stage.send([("key", b"1"), ("key", b"2")])
    assert held.wait(20)
    refusing_old(stage)
    wait_until(lambda: not app.running, what="the refusal")
    (refused,) = [member_of(app).refused]
    assert f"this code needs protocol {PROTOCOL}: upgrade mqlayer on this machine" in str(refused)
    assert set(stage.owners().values()) != {None}, "the running message keeps its partition"
    go.set()
    wait_until(lambda: ask(stage, "SELECT FROM mqlayer.member WHERE lease_until > '-infinity'") == [], what="its end")
    assert handled[:1] == [b"1"]
    # Positions count from 1.
    settled = sum(position.committed - 1 for position in stage.positions().values())
    assert settled == len(handled), "each handled message is settled, the others wait for the next owner"
    assert str(refused) in str(app.health())


def test_a_refused_member_with_a_stuck_handler_waits_for_it_once(stage: Stage) -> None:
    begun, go = threading.Event(), threading.Event()

    def handle(body: bytes) -> None:
        del body
        begun.set()
        go.wait(60)

    app = stage.consume(handle, drain_timeout_s=0.3)
    stage.send([("key", b"1")])
    assert begun.wait(20)
    refusing_old(stage)
    wait_until(
        lambda: ask(stage, "SELECT FROM mqlayer.member WHERE lease_until > '-infinity'") == [],
        timeout_s=30,
        what="its end",
    )
    began = awake_s()
    assert not app.stop(timeout_s=20), "the handler runs on, and can't settle"
    assert awake_s() - began < 10
    go.set()


def test_the_command_ends_with_an_exit_code_of_its_own_and_so_does_a_new_start(
    stage: Stage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old_program.py").write_text(PROGRAM)
    refusing_old(stage)
    environment = {
        **os.environ,
        "MQLAYER_DSN": stage.dsn,
        "MQLAYER_KEY_PREFIX": stage.prefix,
        "PYTHONPATH": str(tmp_path),
    }
    assert run_python("mqlayer", "consume", "old_program:app", env=environment, timeout=30) == 78
    assert "this code needs protocol" in capfd.readouterr().err


@pytest.mark.full
def test_a_supervisor_does_not_start_older_code_again(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "old_program.py").write_text(PROGRAM)
    refusing_old(stage)
    environment = {
        **os.environ,
        "MQLAYER_DSN": stage.dsn,
        "MQLAYER_KEY_PREFIX": stage.prefix,
        "PYTHONPATH": str(tmp_path),
    }
    words = ("mqlayer", "consume", "old_program:app", "--processes", "2")
    assert run_python(*words, env=environment, timeout=60) == 78


def test_a_running_relay_leaves_its_lps_and_ends(world: World) -> None:
    relay = Relay(world.settings(lease_s=1.0), limits=QUICK)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            relay.run()
        except VersionRefused as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    wait_until(lambda: ask(world, "SELECT FROM mqlayer_app.relay"), what="the relay")
    assert [one.kind for one in upgrade_status(world.runtime()).living] == ["relay"]
    refusing_old(world)
    thread.join(20)
    assert f"protocol {NEW}, this code needs protocol {PROTOCOL}" in str(ended[0])
    assert ask(world, "SELECT FROM mqlayer_app.lp_set WHERE relay_id IS NOT NULL") == []
    assert ask(world, "SELECT FROM mqlayer.process") == []
    with pytest.raises(VersionRefused):
        relay_once(world.settings())


def test_producers_and_receivers_of_older_code_are_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqlayer.runtime.presence.LEASE_S", 0.3)
    world = World(stage.dsn, stage.prefix, [])
    with world.producer() as producer, Receiver(stage.topic, group="pop", settings=stage.settings()) as receiver:
        producer.send(stage.topic, key="k", body=b"1")
        (message,) = receiver.receive(wait_s=10)
        refusing_old(stage)
        wait_until(lambda: producer._engine.guarded.closed, what="the refusal")
        with pytest.raises(VersionRefused, match="upgrade mqlayer on this machine"):
            receiver.receive(wait_s=10)
        receiver.ack([message])
        with pytest.raises(ProducerClosed, match="upgrade mqlayer on this machine"):
            producer.send(stage.topic, key="k", body=b"2")
    assert ask(stage, "SELECT kind FROM mqlayer.process") == []
    assert ask(stage, "SELECT FROM mqlayer.source WHERE closed_at IS NULL") == [], "a refused producer is closed as any"


@pytest.mark.world(tasks=True)
def test_a_worker_of_older_code_takes_no_job(world: World) -> None:
    TASKS["clean_attempts"]()
    assert [one.kind for one in upgrade_status(world.runtime()).living] == ["worker"]
    ask(world, "UPDATE mqlayer.job SET next_at = now()")
    refusing_old(world)
    before = ask(world, "SELECT epoch FROM mqlayer.job")
    with pytest.raises(VersionRefused):
        TASKS["clean_attempts"]()
    assert ask(world, "SELECT epoch FROM mqlayer.job") == before


def test_older_processes_drain_before_the_version_is_in_force_and_may_be_served_again(
    stage: Stage, system: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Conflict, match="no finalization drains"):
        cancel(system)
    session = joined(stage, "old")
    with monkeypatch.context() as patch:
        become(patch)
        assert finalize(system, drain=True) == "draining"
        assert finalize(system, drain=True) == "draining"
    assert in_force(stage) == [OLD, OLD]
    answer = send_heartbeat(stage.database, session, lease_s=LEASE_S)
    assert (answer.known, bool(answer.served.refuses(PROTOCOL))) == (True, True)
    with pytest.raises(VersionRefused):
        joined(stage, "older")
    cancel(system)
    assert not send_heartbeat(stage.database, session, lease_s=LEASE_S).served.refuses(PROTOCOL)
    acts = ask(stage, "SELECT act FROM mqlayer.audit WHERE act LIKE 'upgrade %' ORDER BY audit_id")
    assert acts == [("upgrade drain",), ("upgrade cancel",)]
    become(monkeypatch)
    assert finalize(system, drain=True) == "draining"
    for one in send_heartbeat(stage.database, session, lease_s=LEASE_S).assignments:
        release(stage.database, session, one)
    leave(stage.database, session)
    assert finalize(system, drain=True) == "finalized"


def test_contract_steps_wait_until_each_process_acts_on_the_version(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch)
    system = runtime_of(stage.database, stage.prefix, application=stage.database)
    assert migrate(stage.dsn) == [LATER[schema][0] for schema in SCHEMAS], "expand steps alone"
    session, mine = joined(stage, "new"), InForce(OLD)
    assert contract(stage.dsn, schema="control") == []
    assert finalize(system) == "finalized"
    assert contract(stage.dsn, schema="control") == [], "this member may still write the former form"
    assert [one.name for one in upgrade_status(system).behind] == [f"{stage.topic}/g/new"]
    send_heartbeat(stage.database, session, lease_s=LEASE_S, in_force=mine)
    assert mine.version == NEW
    assert contract(stage.dsn, schema="control") == [], "it learned it with this very answer"
    send_heartbeat(stage.database, session, lease_s=LEASE_S, in_force=mine)
    assert [contract(stage.dsn, schema=schema) for schema in SCHEMAS] == [[LATER[schema][1]] for schema in SCHEMAS]
    assert upgrade_status(system).contracts == ()


def test_a_member_that_was_killed_before_it_read_the_version_keeps_no_contract_step_waiting(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other member of its group lives, so no rebalance notes its end."""
    become(monkeypatch)
    system = runtime_of(stage.database, stage.prefix, application=stage.database)
    migrate(stage.dsn)
    joined(stage, "new")
    assert finalize(system) == "finalized"
    dsns = dict.fromkeys(SCHEMAS, stage.dsn)
    assert run_contracts(system, dsns) == []
    ask(stage, "UPDATE mqlayer.member SET lease_until = now() - interval '1 ms'")
    assert len(run_contracts(system, dsns)) == 2


def test_the_application_schema_keeps_the_former_form_while_a_worker_acts_on_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers write both schemas, and have their row in the control schema."""
    become(monkeypatch)
    system = runtime_of(stage.database, stage.prefix, application=stage.database)
    migrate(stage.dsn)
    worker = Presence(stage.database, "worker", "jobs", InForce(OLD))
    with worker.working(60):
        assert finalize(system) == "finalized"
        dsns = dict.fromkeys(SCHEMAS, stage.dsn)
        assert run_contracts(system, dsns) == []
        assert [step.schema for step in upgrade_status(system).contracts] == ["control", "application"]
    assert len(run_contracts(system, dsns)) == 2, "it said that it acts on the version as it ended its job"


def test_a_finalization_that_ended_in_one_schema_is_not_cancelled(stage: Stage, system: Runtime) -> None:
    ask(stage, f"UPDATE mqlayer.protocol SET serves_from = {NEW}, in_force = {NEW}")
    ask(stage, f"UPDATE mqlayer_app.protocol SET serves_from = {NEW}")
    with pytest.raises(Conflict, match="in force in the control schema, so older code stays refused: mqlayer upgrade"):
        cancel(system)
    assert ask(stage, "SELECT serves_from FROM mqlayer_app.protocol") == [(NEW,)]


def test_a_new_database_has_the_newest_version_in_force(
    empty_database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch)
    with broken_off_at("migrate.before_record", occurrence=2):
        migrate(empty_database_dsn)
    migrate(empty_database_dsn)
    world = World(empty_database_dsn, "new", [])
    assert in_force(world) == [NEW, NEW]
    assert upgrade_status(world.runtime()).contracts == ()


def test_a_worker_finalizes_where_the_setting_says_so(
    stage: Stage, system: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch)
    assert not finalize_when_due(system)

    def after(seconds: float) -> Runtime:
        settings = stage.settings(finalize_after_s=seconds)
        return runtime_of(stage.database, settings=settings, application=stage.database)

    assert not finalize_when_due(after(7200))
    session = joined(stage, "old")
    ask(stage, f"UPDATE mqlayer.member SET most = {OLD}")
    assert not finalize_when_due(after(60))
    leave(stage.database, session)
    job = next(job for job in PERIODIC_JOBS if job.name == "finalize_upgrade")
    job.run(after(60), job.every_s)
    assert in_force(stage) == [NEW, NEW]


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        ("upgrade.after_schema", 1),
        pytest.param("upgrade.before_commit", 1, marks=pytest.mark.full),
        pytest.param("upgrade.before_commit", 2, marks=pytest.mark.full),
    ],
)
def test_a_finalization_that_is_killed_is_gone_on_with(stage: Stage, place: str, nth: int) -> None:
    environment = {**os.environ, "MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix}
    run_python("tests.fixtures.next_release", "migrate", env=environment, timeout=60)
    kill = armed(f"{place}=kill@{nth}")
    assert run_python("tests.fixtures.next_release", "finalize", env=environment | kill, timeout=60) == -9
    assert in_force(stage) == ([OLD, OLD] if (place, nth) == ("upgrade.before_commit", 1) else [NEW, OLD])
    assert run_python("tests.fixtures.next_release", "finalize", env=environment, timeout=60) == 0
    assert in_force(stage) == [NEW, NEW]


@pytest.mark.full
def test_a_migration_that_is_killed_before_it_serves_the_version_is_gone_on_with(stage: Stage) -> None:
    environment = {**os.environ, "MQLAYER_DSN": stage.dsn}
    kill = armed("migrate.before_serving=kill@1")
    assert run_python("tests.fixtures.next_release", "migrate", env=environment | kill, timeout=60) == -9
    assert ask(stage, "SELECT serves_to FROM mqlayer.protocol") == [(OLD,)]
    assert run_python("tests.fixtures.next_release", "migrate", env=environment, timeout=60) == 0
    assert ask(stage, "SELECT serves_to, in_force FROM mqlayer.protocol") == [(NEW, OLD)]


def test_the_commands_name_what_waits_and_what_blocks(
    stage: Stage, system: Runtime, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    session = joined(stage, "old")
    become(monkeypatch)
    migrate(stage.dsn)
    assert f"{NEW} waits to be finalized" in run.text("upgrade", "status")
    plan = run("upgrade", "finalize")
    assert f"protocol {NEW} would be in force" in plan.stdout
    assert f"too old: member {stage.topic}/g/old on {socket.gethostname()} (pid {os.getpid()})" in plan.stderr
    refused = run("upgrade", "finalize", "--yes")
    assert (refused.exit_code, in_force(stage)) == (1, [OLD, OLD])
    assert "1 process of older code live" in refused.stderr
    assert run("upgrade", "finalize", "--yes", "--drain", "--timeout", "0").exit_code == 1
    (status,) = run.lines("upgrade", "status")
    assert (status["in_force"], status["target"], status["draining"]) == (OLD, NEW, True)
    assert "served again" in run.text("upgrade", "cancel")
    leave(stage.database, session)
    assert f"protocol {NEW} is in force" in run.text("upgrade", "finalize", "--yes")
    del system


def test_a_command_of_older_code_is_refused_but_may_cancel(
    stage: Stage, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    assert stage.topic in run.text("topic", "list")
    refusing_old(stage)
    told = run("topic", "list")
    assert told.exit_code == 78
    assert f"this code needs protocol {PROTOCOL}: upgrade mqlayer on this machine" in told.stderr
    assert "older processes drain" in run.text("upgrade", "status")
    run.text("upgrade", "cancel")
    assert stage.topic in run.text("topic", "list")


def test_finalizations_at_once_are_one(stage: Stage, system: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        assert {*threads.map(lambda _: finalize(system, drain=True), range(4))} == {"finalized"}
    assert ask(stage, "SELECT act FROM mqlayer.audit WHERE act LIKE 'upgrade %'") == [("upgrade finalize",)]


def test_schemas_in_two_databases_are_finalized_one_after_the_other(
    stage: Stage, empty_database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that only the application schema knows blocks the second one; there is no way back between them."""
    become(monkeypatch)
    migrate(stage.dsn, schema="control")
    with Database(empty_database_dsn) as application:
        system = runtime_of(stage.database, stage.prefix, application=application)
        migrate(empty_database_dsn, schema="application")
        with application.connection() as connection:
            connection.execute(f"UPDATE mqlayer_app.protocol SET serves_from = {OLD}, in_force = {OLD}")
            columns, values = "relay_id, lease_until, most, host", f"'r', now() + interval '1 min', {OLD}, 'h'"
            connection.execute(f"INSERT INTO mqlayer_app.relay ({columns}) VALUES ({values})")
        assert [finalize(system), finalize(system, drain=True)] == ["blocked", "draining"]
        found = upgrade_status(system)
        assert {name: one.served.in_force for name, one in found.schemas.items()} == {
            "control": NEW,
            "application": OLD,
        }
        assert [(one.name, one.host) for one in found.blockers] == [("r", "h")]
        with pytest.raises(Conflict, match="older code stays refused"):
            cancel(system)
        with application.connection() as connection:
            connection.execute("DELETE FROM mqlayer_app.relay")
        assert finalize(system) == "finalized"
        dsns: dict[SchemaName, str] = {"control": stage.dsn, "application": empty_database_dsn}
        assert run_contracts(system, dsns) == [LATER["control"][1]], "the application schema was made anew with its own"


def test_the_release_is_the_package_s() -> None:
    import mqlayer

    assert mqlayer.__version__ == RELEASE
