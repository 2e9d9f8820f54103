"""`mqlayer doctor`: each thing that it looks at, broken and repaired, on real servers."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from mqlayer.doctor import CheckLimits, Finding, diagnose, nodes
from mqlayer.doctor.findings import LIMITS, CheckStatus, run_checks
from mqlayer.doctor.health import system_health
from mqlayer.doctor.nodes import CheckedNode
from mqlayer.doctor.problem_history import Problem
from mqlayer.domain.routing import NodeId
from mqlayer.exporter import control_samples, outbox_samples
from mqlayer.groups.group import GroupSettings, ensure_group
from mqlayer.groups.members import join
from mqlayer.maintenance.jobs import PERIODIC_JOBS
from mqlayer.postgres.database import Database, connect
from mqlayer.postgres.migrations import migrate
from mqlayer.redis.node_connection import Node
from mqlayer.redis.server_info import read_server_info
from mqlayer.relay import relay_once
from mqlayer.routes import finish_changes
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.stack import PostgresServer, RedisServer
from mqlayer.stack.redis_server import DURABLE_OPTIONS
from mqlayer.topics import rearm_node, register_node
from mqlayer.workers.job_claims import claimed
from tests.fixtures.commands import Commands
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.later_steps import LATER, with_later_step
from tests.fixtures.servers import InitialisedClusters, StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.jobs import BY_NAME
from tests.proof.proxy import TcpProxy
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

# One worker starts their Postgres.
pytestmark = pytest.mark.xdist_group("doctor")

PASSWORD = "s3cr3t"
WELL = {
    "fsync": "on",
    "wal_level": "logical",
    "max_prepared_transactions": "4",
    "idle_in_transaction_session_timeout": "60s",
}


# All look at servers that one worker starts.
pytestmark = pytest.mark.xdist_group("doctor")


@pytest.fixture(scope="module")
def well_postgres(server_directory: Path, initialised_clusters: InitialisedClusters) -> Iterator[PostgresServer]:
    """A Postgres with nothing to complain of."""
    initialised_clusters.numbers = itertools.count()
    server = PostgresServer(server_directory / "postgres-well", options=WELL)
    server.start()
    migrate(server.create_database("well"))
    yield server
    server.erase()


@pytest.fixture(scope="module")
def redis_of_the_node(server_directory: Path) -> Iterator[RedisServer]:
    """A Redis of these tests' own."""
    server = RedisServer(server_directory / "redis-ward")
    server.start()
    yield server
    server.erase()


@pytest.fixture
def node(redis_of_the_node: RedisServer) -> Iterator[RedisServer]:
    """The Redis of the one node; a test may do with it what it likes: it is well again afterwards."""
    yield redis_of_the_node
    redis_of_the_node.start()
    with redis.Redis.from_url(redis_of_the_node.url) as client:
        client.replicaof("NO", "ONE")
        for name, value in {**DURABLE_OPTIONS, "maxmemory": "0", "min-replicas-to-write": "0"}.items():
            client.config_set(name, value)


class Ward:
    """An installation, and what the doctor says of it."""

    def __init__(self, world: World) -> None:
        self.world, self.broker_url, self.database = world, "", Database(world.dsn)

    def findings(self, check: str = "", **limits: float) -> list[Finding]:
        """Return the findings of a check that are not well; of all checks without one."""
        changes = {"broker_url": self.broker_url} if self.broker_url else {}
        found = diagnose(self.world.settings(**changes), limits=CheckLimits(**limits))
        assert {finding.check for finding in found} >= {check} - {""}
        return [finding for finding in found if check in ("", finding.check) and finding.verdict != "ok"]

    def finding(self, check: str, **limits: float) -> Finding:
        """Return the one finding of a check that is not well. It has to say how to repair it."""
        (finding,) = self.findings(check, **limits)
        assert finding.fix
        return finding


@pytest.fixture
def ward(well_postgres: PostgresServer, node: RedisServer, key_prefix: str) -> Iterator[Ward]:
    """A topic of two partitions on a node of its own."""
    name = f"ward_{key_prefix.replace('-', '_')}"
    world = World(well_postgres.create_database(name, template="well"), key_prefix, [node.url])
    world.add_topic("orders", partitions=2)
    # Its schemas were made with the template: for this installation, now.
    world.rows("UPDATE mqlayer.migration SET at = now()")
    ward = Ward(world)
    yield ward
    ward.database.close()
    well_postgres.drop_database(name)


@pytest.fixture
def doctor(ward: Ward, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    """The command on that installation."""
    for name, value in ward.world.environment().items():
        monkeypatch.setenv(name, value)
    return Commands()


# -- all is well -------------------------------------------------------------------------------------------------------


def test_of_a_well_installation_nothing_is_broken(
    ward: Ward, doctor: Commands, start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be helped on this machine is the version of its Redis."""
    monkeypatch.setenv("MQLAYER_BROKER_URL", start_redis().url)
    # The database is a copy of one that may be minutes old: jobs that never ran would be late.
    ward.world.rows("UPDATE mqlayer.migration SET at = now()")
    assert claimed(ward.database, BY_NAME["trim"])
    # Commands of the same process keep the relay from its heartbeat.
    with ward.world.relay(lease_s=30.0):
        wait_until(lambda: ward.findings("relay") == [], what="the relay has all LP sets")
        found = doctor.lines("doctor")
        shown = doctor("doctor")
    assert {line["check"] for line in found if line["verdict"] != "ok"} <= {"version"}
    assert {line["check"] for line in found} == {
        "reachable", "version", "durability", "connections", "transactions", "prepared", "slots", "functions",
        "clock",
        "sessions", "pooler",
        "control schema", "replaced", "numbers", "unarmed", "draining", "beat", "protocol", "routes", "autopilot",
        "deletions", "groups", "parked", "pauses", "archive", "exports", "schedules", "application schema",
            "relay", "recovery", "quarantined",
        "publishers", "large_bodies", "versions",
        "armed", "role", "persistence", "eviction", "memory", "replicas", "broker apart",
        "rights",
    }  # fmt: skip
    assert all(set(line) == {"check", "subject", "verdict", "seen", "fix"} for line in found)
    assert shown.exit_code == 0
    fine = sum(line["verdict"] == "ok" for line in found)
    assert f"{len(found)} checks: {fine} fine" in shown.stdout
    areas = re.findall(r"^  (\S+) +\d+ of (\d+) fine", shown.stdout, re.MULTILINE)
    assert [name for name, _ in areas] == ["database", "broker", "nodes"]
    assert sum(int(count) for _, count in areas) == len(found)
    assert "ok: durability" not in shown.stdout
    assert "\nok: durability, database: " in doctor.text("doctor", "--all")


def test_the_exit_code_is_one_when_something_is_broken(doctor: Commands, node: RedisServer) -> None:
    with redis.Redis.from_url(node.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    shown, as_json = doctor("doctor"), doctor("doctor", "--json")
    assert (shown.exit_code, as_json.exit_code) == (1, 1), shown.output
    assert "CONFIG SET maxmemory-policy noeviction" in shown.stdout
    verdicts = {line["check"]: line["verdict"] for line in map(json.loads, as_json.stdout.splitlines())}
    assert verdicts["eviction"] == "broken"


def test_a_node_of_any_version_can_be_asked(every_redis: RedisServer) -> None:
    """Its version may be a bad one; nothing else is, and what 6.2 can't do is named."""
    answers = read_server_info(every_redis.url, timeout_s=5.0)
    assert answers.version == every_redis.program.version
    asked = CheckedNode(Node(NodeId(1), "n1", every_redis.url, answers.run_id), None, answers)
    found = run_checks(nodes.CHECKS, asked, asked.subject, LIMITS)
    assert {finding.check for finding in found if finding.verdict != "ok"} <= {"version"}
    assert len(found) == len(nodes.CHECKS) - 1, "no topic has a durability class"


def test_two_databases_are_asked_for_what_each_holds(ward: Ward, well_postgres: PostgresServer) -> None:
    name = f"outbox_{ward.world.key_prefix.replace('-', '_')}"
    ward.world.control_dsn, ward.world.app_dsn = (
        ward.world.dsn,
        well_postgres.create_database(name, template="well"),
    )
    found = diagnose(ward.world.settings())
    kinds = {
        check: {f.subject.split()[0] for f in found if f.check == check} for check in ("beat", "relay", "prepared")
    }
    assert kinds == {"beat": {"control"}, "relay": {"application"}, "prepared": {"control", "application"}}
    well_postgres.drop_database(name)


# -- nodes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "bad", "good", "check", "verdict"),
    some_of(
        [
            ("maxmemory-policy", "allkeys-lru", "noeviction", "eviction", "broken"),
            ("appendonly", "no", "yes", "persistence", "broken"),
            ("appendfsync", "everysec", "always", "persistence", "warning"),
            ("appendfsync", "no", "always", "persistence", "broken"),
            ("no-appendfsync-on-rewrite", "yes", "no", "persistence", "broken"),
            ("maxmemory", "100kb", "0", "memory", "broken"),
            ("maxmemory", "100gb", "0", "memory", ""),
            ("min-replicas-to-write", "1", "0", "replicas", "broken"),
        ],
        3,
    ),
)
def test_a_setting_of_a_node_is_named_until_it_is_repaired(
    ward: Ward, node: RedisServer, setting: str, bad: str, good: str, check: str, verdict: str
) -> None:
    with redis.Redis.from_url(node.url) as client:
        client.config_set(setting, bad)
        assert [finding.verdict for finding in ward.findings(check)] == [verdict] * bool(verdict)
        client.config_set(setting, good)
    assert ward.findings(check) == []


def test_a_node_that_restarted_is_not_armed_until_somebody_arms_it(ward: Ward, node: RedisServer) -> None:
    node.restart()
    finding = ward.finding("armed")
    assert finding.verdict == "broken"
    assert "mqlayer node rearm node-1" in finding.fix
    rearm_node(runtime_of(ward.database, ward.world.key_prefix), "node-1")
    assert ward.findings("armed") == []


def test_a_node_that_was_given_up_and_answers_is_told(ward: Ward, node: RedisServer) -> None:
    ward.world.rows("UPDATE mqlayer.node SET lost_at = now()")
    assert "given up" in ward.finding("armed").seen
    node.stop()
    found = [finding for finding in ward.findings("reachable") if finding.subject.startswith("node")]
    assert found == [], "it is not expected to answer"


def test_a_replica_and_a_cluster_are_no_nodes(ward: Ward, node: RedisServer, start_redis: StartRedis) -> None:
    cluster = start_redis(options={"cluster-enabled": "yes"})
    with redis.Redis.from_url(cluster.url) as client:
        # Registering asks for keys, which a cluster without slots refuses.
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        wait_until(lambda: client.cluster("info")["cluster_state"] == "ok", what="the slots")
    # It was a Redis by itself when it was registered: a server of a cluster is refused.
    register_node(runtime_of(ward.database), name="cluster", url=start_redis().url)
    with ward.database.connection() as connection:
        connection.execute("UPDATE mqlayer.node SET url = %s WHERE name = 'cluster'", (cluster.url,))
    assert "cluster mode" in ward.finding("role").seen
    with redis.Redis.from_url(node.url) as client:
        client.replicaof("127.0.0.1", str(cluster.port))
        assert {finding.verdict for finding in ward.findings("role")} == {"broken"}
        assert len(ward.findings("role")) == 2
        client.replicaof("NO", "ONE")
    assert len(ward.findings("role")) == 1


def test_a_node_that_forbids_to_ask_for_settings_is_unknown_in_these(
    ward: Ward, node: RedisServer, doctor: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with managed servers. Its password is in no line."""
    with redis.Redis.from_url(node.url) as client:
        client.acl_setuser("limited", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"],
                           categories=["+@all"], commands=["-config"])  # fmt: skip
        client.config_set("maxmemory-policy", "allkeys-lru")
    monkeypatch.setenv("MQLAYER_REDIS_USER", "limited")
    monkeypatch.setenv("MQLAYER_REDIS_PASSWORD", PASSWORD)
    assert ward.finding("persistence").verdict == "unknown"
    assert ward.finding("eviction").verdict == "broken", "INFO tells it too"
    shown = doctor("doctor", "--json").output + doctor("doctor").output
    assert PASSWORD not in shown


def test_a_node_that_is_away_or_silent_is_broken_and_the_others_are_looked_at(
    ward: Ward, node: RedisServer, start_redis: StartRedis
) -> None:
    other = start_redis()
    register_node(runtime_of(ward.database), name="other", url=other.url)
    node.kill()
    finding = next(f for f in ward.findings("reachable") if f.subject.startswith("node"))
    assert finding.verdict == "broken"
    assert "mqlayer node lost node-1" in finding.fix
    other.send(signal.SIGSTOP)
    try:
        began = awake_s()
        verdicts = {f.subject.split()[1]: f.verdict for f in ward.findings("reachable", connect_s=1.0) if "(" in f.seen
                    or "available" in f.seen}  # fmt: skip
        assert awake_s() - began < 5
    finally:
        other.send(signal.SIGCONT)
    assert verdicts == {"node-1": "broken", "other": "broken"}


# -- Postgres ----------------------------------------------------------------------------------------------------------


def test_a_long_transaction_is_named_by_pid_and_program_never_by_its_text(ward: Ward) -> None:
    with psycopg.connect(ward.world.dsn, application_name="shop") as connection:
        connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'payl0ad')")
        assert ward.findings("transactions") == [], "it is young"
        finding = ward.finding("transactions", transaction_s=0.0)
        assert finding.verdict == "warning"
        assert f"pid {connection.info.backend_pid} (shop) has been idle in a transaction" in finding.seen
        assert "LPs get stuck" in finding.seen
        assert "payl0ad" not in str(finding)
        with psycopg.connect(ward.world.dsn, application_name="late") as late, ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(late.execute, "SELECT mqlayer_app.publish_v1('orders', 'k', 'x')")
            told = rf"\(late\) has waited in a transaction of .*, now for pid {connection.info.backend_pid}"
            held = wait_until(
                lambda: [one for one in ward.findings("transactions", transaction_s=0.0) if re.search(told, one.seen)],
                what="who waits for whom",
            )
            assert held[0].fix.startswith(f"end the transaction of pid {connection.info.backend_pid}")
            assert "sessions that wait for it: 1" in ward.findings("transactions", transaction_s=0.0)[0].seen
            late.cancel_safe()
            with pytest.raises(psycopg.errors.QueryCanceled):
                waiting.result(20)
            late.rollback()
        assert ward.finding("transactions", transaction_s=0.0, transaction_broken_s=0.0).verdict == "broken"
        connection.rollback()
        connection.execute("SELECT 1")
        assert "vacuum" in ward.finding("transactions", transaction_s=0.0, transaction_broken_s=0.0).seen
    assert ward.findings("transactions", transaction_s=0.0) == []


def test_a_role_that_sees_no_other_transactions_is_told_so(ward: Ward) -> None:
    role = f"limited_{ward.world.key_prefix.replace('-', '_')}"
    ward.world.rows(f"CREATE ROLE {role} LOGIN")
    try:
        ward.world.app_dsn = ward.world.control_dsn = ward.world.dsn.replace("postgres@", f"{role}@")
        finding = ward.finding("transactions")
        assert (finding.verdict, "pg_read_all_stats" in finding.fix) == ("unknown", True)
        assert {f.verdict for f in ward.findings("control schema")} == {"unknown"}, "it may not read that either"
    finally:
        ward.world.rows(f"DROP ROLE {role}")


def test_a_prepared_transaction_is_named_until_it_is_ended(ward: Ward) -> None:
    with psycopg.connect(ward.world.dsn, autocommit=True) as connection:
        for statement in ("BEGIN", "SELECT mqlayer_app.publish_v1('orders', 'k', '')", "PREPARE TRANSACTION 'order-1'"):
            connection.execute(statement.encode())
    # Its client is gone.
    with psycopg.connect(ward.world.dsn, autocommit=True) as connection:
        assert ward.findings("prepared") == []
        finding = ward.finding("prepared", transaction_s=0.0)
        assert finding.verdict == "broken", "it holds an LP"
        assert "ROLLBACK PREPARED 'order-1'" in finding.fix
        connection.execute("ROLLBACK PREPARED 'order-1'")
        assert ward.findings("prepared", transaction_s=0.0) == []


def test_a_replication_slot_without_a_client_is_named_until_it_is_dropped(ward: Ward) -> None:
    assert ward.findings("slots") == []
    ward.world.rows("SELECT pg_create_logical_replication_slot('warehouse', 'pgoutput')")
    try:
        ward.world.publish(1)
        finding = ward.finding("slots")
        assert finding.verdict == "warning"
        assert finding.seen.startswith("logical slot 'warehouse', which has no client, holds dead rows of catalogs for")
        assert "pg_drop_replication_slot('warehouse')" in finding.fix
        assert ward.finding("slots", slot_bytes=1).verdict == "broken"
    finally:
        ward.world.rows("SELECT pg_drop_replication_slot('warehouse')")
    assert ward.findings("slots") == []


def test_settings_that_lose_commits_are_broken(ward: Ward, postgres_server: Any) -> None:
    name = psycopg.conninfo.conninfo_to_dict(ward.world.dsn)["dbname"]
    assert ward.findings("durability") == []
    ward.world.rows(f"ALTER DATABASE {name} SET synchronous_commit = off")
    finding = ward.finding("durability")
    assert (finding.verdict, finding.seen) == ("broken", "synchronous_commit off")
    ward.world.control_dsn = ward.world.app_dsn = postgres_server.dsn("postgres")
    assert [f.seen for f in ward.findings("durability")] == ["fsync off"], "as this test's shared server has it"


@contextmanager
def a_standby_away(server: PostgresServer) -> Iterator[None]:
    """Let commits wait for a standby that is not there."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SET synchronous_commit = local")

        def wait_for(names: str) -> None:
            connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'".encode())
            connection.execute("SELECT pg_reload_conf()")
            shown = "SHOW synchronous_standby_names"
            wait_until(lambda: connection.execute(shown).fetchone() == (names,), what="the setting")

        wait_for("away")
        try:
            yield
        finally:
            wait_for("")


def test_commits_that_wait_for_a_standby_are_a_finding_a_problem_and_a_metric(
    ward: Ward, well_postgres: PostgresServer
) -> None:
    def told() -> list[Problem]:
        found = system_health(ward.world.runtime())
        return [one for one in found.problems if one.alert.name == "MqlayerCommitsWait"]

    def publish() -> None:
        with psycopg.connect(ward.world.dsn) as connection:
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', '1')")

    def waited_s() -> float:
        ((value, labels),) = control_samples(ward.world.runtime())["mqlayer.postgres.commit_wait"]
        assert labels == {"schema": "control"}
        return value

    assert (told(), waited_s()) == ([], 0)
    with a_standby_away(well_postgres):
        (problem,) = told()
        assert "no synchronous standby is there" in problem.text
        assert problem.place.item == "control", "of one server, once"
        committing = threading.Thread(target=publish)
        committing.start()
        wait_until(lambda: waited_s() > 0, what="a commit to wait")
        (finding,) = ward.findings("durability", synchronous_s=0.0)
        assert finding.seen.startswith("1 commits wait for a synchronous standby, the first for")
        assert outbox_samples(ward.world.database)["mqlayer.postgres.commit_wait"][0][0] > 0
        assert committing.is_alive()
    committing.join(timeout=20)
    assert (committing.is_alive(), told(), waited_s()) == (False, [], 0)


def test_a_role_whose_idle_transactions_are_never_ended_is_named(ward: Ward) -> None:
    assert ward.findings("publishers") == []
    name = psycopg.conninfo.conninfo_to_dict(ward.world.dsn)["dbname"]
    ward.world.rows(f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = 0")
    finding = ward.finding("publishers")
    assert finding.verdict == "warning"
    assert "ALTER ROLE postgres SET idle_in_transaction_session_timeout" in finding.fix
    ward.world.rows(f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '30s'")
    assert ward.findings("publishers") == []


def test_functions_that_a_caller_can_mislead_and_a_superusers_schema_are_told_until_the_next_migration(
    ward: Ward,
) -> None:
    assert ward.findings("functions") == []
    with connect(ward.world.dsn) as connection:
        connection.execute("ALTER FUNCTION mqlayer_app.publish_v1 SET search_path = pg_catalog, mqlayer_app")
        connection.execute("ALTER SCHEMA mqlayer_archive OWNER TO CURRENT_USER")
    found = ward.findings("functions")
    assert [(finding.verdict, finding.fix) for finding in found] == [
        (CheckStatus.BROKEN, "mqlayer migrate"),
        (CheckStatus.WARNING, "mqlayer migrate"),
    ]
    assert "1 functions, such as mqlayer_app.publish_v1," in found[0].seen
    assert "a superuser owns mqlayer_archive," in found[1].seen
    migrate(ward.world.dsn)
    assert ward.findings("functions") == []


@pytest.mark.parametrize(
    ("setting", "value", "harmless"),
    some_of(
        [
            ("default_transaction_isolation", "serializable", "read committed"),
            ("default_transaction_read_only", "on", "off"),
            ("synchronous_commit", "off", "local"),
            ("statement_timeout", "900ms", "2min"),
            ("lock_timeout", "5", "30s"),
            ("client_encoding", "latin1", "utf8"),
            ("session_replication_role", "replica", "origin"),
            ("plpgsql.extra_errors", "all", "none"),
        ],
        3,
    ),
)
def test_settings_that_hurt_an_applications_sessions_are_named_with_whose_they_are(
    ward: Ward, setting: str, value: str, harmless: str
) -> None:
    assert ward.findings("sessions") == []
    name = psycopg.conninfo.conninfo_to_dict(ward.world.dsn)["dbname"]
    role = f"shop_{name}"

    def run(statement: str) -> None:
        # Sessions of ours write, whatever they begin with.
        with ward.database.connection() as connection:
            connection.execute(statement.encode())

    run(f"CREATE ROLE {role}")
    places = [f"DATABASE {name}", f"ROLE {role}", f"ROLE {role} IN DATABASE {name}"]
    for whose in places:
        run(f"ALTER {whose} SET {setting} = '{value}'")
    found = ward.findings("sessions")
    assert sorted((one.verdict, one.fix) for one in found) == sorted(
        (CheckStatus.WARNING, f"ALTER {whose} RESET {setting}") for whose in places
    )
    assert all(f"{setting} = {value}" in one.seen for one in found)
    for whose in places:
        run(f"ALTER {whose} SET {setting} = '{harmless}'")
    assert ward.findings("sessions") == []
    run(f"DROP ROLE {role}")


@pytest.mark.full
def test_few_free_connections_are_a_warning(ward: Ward) -> None:
    assert ward.findings("connections") == []
    assert "max_connections" in ward.finding("connections", part=0.0).fix


def test_a_schema_that_is_missing_older_or_newer_is_broken(
    ward: Ward, empty_database_dsn: str, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {line["check"]: line for line in map(json.loads, run("doctor", "--json").stdout.splitlines())}
    for schema in ("control", "application"):
        assert found[f"{schema} schema"]["verdict"] == "broken"
        assert found[f"{schema} schema"]["fix"] == "run `mqlayer migrate`"
    assert "beat" not in found, "nobody knows what another schema would answer"
    assert found["reachable"]["verdict"] == "unknown", "nodes are not known"
    run.text("migrate")
    assert {line["verdict"] for line in map(json.loads, run("doctor", "--json").stdout.splitlines())
            if line["check"].endswith("schema")} == {"ok"}  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("mqlayer.postgres.migrations.migrations", with_later_step)
        finding = ward.finding("control schema")
    before, after = LATER["control"].number - 1, LATER["control"].number
    assert finding.seen == f"it has control schema {before}, this code needs control schema {after}"
    assert "run `mqlayer migrate`" in finding.fix
    ward.world.rows("INSERT INTO mqlayer.migration (number, name) VALUES (99, 'of tomorrow')")
    assert ward.findings("control schema") == [], "it serves this code"
    ward.world.rows("UPDATE mqlayer.protocol SET serves_to = 9, in_force = 9, serves_from = 9")
    assert "upgrade mqlayer" in ward.finding("control schema").fix


def test_a_postgres_that_is_away_is_broken_and_its_password_in_no_line(ward: Ward, doctor: Commands) -> None:
    bad = ward.world.dsn.replace("postgres@", f"postgres:{PASSWORD}@")
    bad = bad.replace(f":{psycopg.conninfo.conninfo_to_dict(bad)['port']}/", ":1/")
    ward.world.control_dsn = ward.world.app_dsn = bad
    found = {f.subject.split()[0]: f for f in ward.findings("reachable")}
    assert (found["database"].verdict, found["nodes"].verdict) == ("broken", "unknown")
    assert "MQLAYER_DSN" in found["database"].fix
    assert PASSWORD not in str(ward.findings())


def test_a_postgres_that_accepts_and_never_answers_is_unknown_within_the_time(ward: Ward) -> None:
    facts = psycopg.conninfo.conninfo_to_dict(ward.world.dsn)
    with TcpProxy("127.0.0.1", int(facts["port"] or 0)) as proxy:
        proxy.half_open()
        ward.world.control_dsn = ward.world.app_dsn = ward.world.dsn.replace(f":{facts['port']}/", f":{proxy.port}/")
        began = awake_s()
        found = {f.subject.split()[0]: f for f in ward.findings("reachable", server_s=0.5)}
        assert awake_s() - began < 5
    assert found["database"].verdict == "unknown"
    assert "did not answer" in found["database"].seen


# -- what waits --------------------------------------------------------------------------------------------------------


def test_jobs_that_nobody_runs_are_told(ward: Ward) -> None:
    """Members join and leave without the worker; what it does besides is late."""
    finding = ward.finding("beat")
    assert (finding.verdict, finding.seen) == ("warning", "no periodic job ever ran")
    ward.world.rows("UPDATE mqlayer.migration SET at = now()")
    assert claimed(ward.database, BY_NAME["clean_fence"])
    assert ward.findings("beat") == [], "the others have time to run for the first time"
    ward.world.rows("UPDATE mqlayer.job SET last_at = now() - interval '840 seconds'")
    assert ward.findings("beat") == [], "its interval is 300 s: it is not late before three of them"
    ward.world.rows("UPDATE mqlayer.job SET last_at = now() - interval '1 hour', next_at = now()")
    finding = ward.finding("beat")
    assert finding.verdict == "broken"
    assert finding.seen == "clean_fence is late by 55 min; it is due every 300 s"
    assert "--beat" in finding.fix
    assert claimed(ward.database, BY_NAME["clean_fence"])
    assert ward.findings("beat") == []
    ward.world.rows("UPDATE mqlayer.migration SET at = now() - interval '1 hour'")
    late = {finding.seen.split()[0] for finding in ward.findings("beat")}
    assert late == {job.name for job in PERIODIC_JOBS} - {"clean_fence"}


def test_messages_that_nobody_relays_are_told(ward: Ward) -> None:
    assert ward.finding("relay").verdict == "warning", "nothing waits as yet"
    ward.world.publish(5)
    finding = ward.finding("relay", outbox_s=0.0)
    assert finding.verdict == "broken"
    assert "no relay lives; 5 outbox rows wait" in finding.seen
    with ward.world.relay():
        ward.world.wait_until_whole()
    relay_once(ward.world.settings(), limits=QUICK)
    assert ward.finding("relay", outbox_s=0.0).seen == "no relay lives; no outbox row waits"


def test_an_outbox_that_waits_to_be_recovered_is_told(ward: Ward) -> None:
    """Case 72."""
    ward.world.publish(5)
    relay_once(ward.world.settings(), limits=QUICK)
    assert ward.findings("recovery") == []
    for timeline, why in ((-1, "more than it ever numbered"), (77, "was on 77")):
        ward.world.rows(f"UPDATE mqlayer_app.identity SET timeline = {timeline}")
        finding = ward.finding("recovery")
        assert (finding.verdict, why in finding.seen) == ("broken", True), finding
        assert "mqlayer outbox recover --unproven" in finding.fix
        relay_once(ward.world.settings(), limits=QUICK)
        assert ward.findings("recovery") == []


def test_a_postgres_that_was_replaced_is_told_before_and_after_somebody_saw_to_it(ward: Ward) -> None:
    """Case 72. From then on no node is armed, until somebody arms it."""
    assert ward.findings("replaced") == ward.findings("unarmed") == []
    ward.world.rows("UPDATE mqlayer.server SET timeline = timeline + 1")
    finding = ward.finding("replaced")
    assert (finding.verdict, "no process has connected since" in finding.seen) == ("broken", True)
    with Database(ward.world.dsn) as database, database.connection():
        assert ward.finding("replaced").verdict == "warning"
        assert ward.finding("unarmed").verdict == "warning"
        unarmed = ward.finding("unarmed", unarmed_s=0.0)
        assert (unarmed.verdict, "mqlayer node rearm node-1" in unarmed.fix) == ("broken", True)
        rearm_node(runtime_of(database, ward.world.settings().key_prefix), "node-1")
    assert ward.findings("unarmed") == []
    assert ward.findings("replaced", replaced_s=0.0) == []


def test_a_sequence_that_gave_out_many_of_its_numbers_is_told(ward: Ward) -> None:
    assert ward.findings("numbers") == []
    for last, verdict in ((1_000_000_000, "warning"), (2_000_000_000, "broken")):
        ward.world.rows(f"SELECT setval('mqlayer.partition_partition_id_seq', {last})")
        finding = ward.finding("numbers")
        assert finding.verdict == verdict
        assert "mqlayer.partition_partition_id_seq gave out" in finding.seen


def test_lp_sets_without_an_owner_and_rows_that_wait_beside_a_relay_are_told(ward: Ward) -> None:
    ward.world.rows(
        "INSERT INTO mqlayer_app.relay (relay_id, lease_until, most) VALUES ('r1', now() + interval '1 hour', 99)"
    )
    assert "16 of 16 LP sets have no owner" in ward.finding("relay").seen
    ward.world.rows("UPDATE mqlayer_app.lp_set SET relay_id = 'r1', lease_until = now() + interval '1 hour'")
    assert ward.findings("relay") == []
    ward.world.publish(3)
    assert ward.findings("relay") == []
    finding = ward.finding("relay", outbox_s=0.0)
    assert (finding.verdict, "3 outbox rows wait" in finding.seen) == ("broken", True)


def test_rows_quarantined_are_broken_until_they_are_tried_again(ward: Ward) -> None:
    ward.world.publish(1)
    ward.world.rows(
        "INSERT INTO mqlayer_app.quarantined SELECT topic_id, lp, seq, 'too large' FROM mqlayer_app.counter WHERE "
        "seq > 0"
    )
    finding = ward.finding("quarantined")
    assert (finding.verdict, "the first: too large" in finding.seen) == ("broken", True)
    assert "no outbox row waits" in ward.finding("relay").seen, "it is counted once"
    ward.world.rows("DELETE FROM mqlayer_app.quarantined")
    assert ward.findings("quarantined") == []
    ward.world.rows("INSERT INTO mqlayer_app.voided VALUES (7, 1, 0, 1, 'too large', now(), 'k', NULL, 'b')")
    finding = ward.finding("quarantined")
    assert (finding.verdict, "passed over; the first: too large" in finding.seen) == ("warning", True)
    ward.world.rows("UPDATE mqlayer_app.voided SET body = NULL, ended = 'discarded', ended_at = now()")
    assert ward.findings("quarantined") == []


def test_a_version_that_does_not_come_is_told(ward: Ward) -> None:
    take = "SELECT mqlayer_app.version_take_v1('profile', 'u1', 2, '', '{}', '', 1, 9, 999, 9, 999, 60)"
    ward.world.rows(take)
    assert ward.findings("versions") == [], "not for long"
    ward.world.rows("UPDATE mqlayer_app.entity_version SET missing_since = missing_since - interval '61 seconds'")
    finding = ward.finding("versions")
    assert finding.verdict == "warning"
    told = re.search(r"overdue: 1, the first of profile for (\d+) s; 1 later events", finding.seen)
    assert told, finding.seen
    assert int(told[1]) >= 61
    ward.world.rows("SELECT mqlayer_app.version_set_v1('profile', 'u1', 0, true)")
    assert ward.findings("versions") == []


def test_a_route_change_that_waits_is_told(ward: Ward) -> None:
    prefix = ward.world.key_prefix
    with broken_off_at("change.after_seal"):
        split(runtime_of(ward.database, prefix), "orders", 1, at=[100])
    assert ward.findings("routes") == [], "it may be under way"
    finding = ward.finding("routes", change_s=0.0)
    assert finding.verdict == "broken"
    assert "split 1 of topic orders is sealing" in finding.seen
    assert "mqlayer route repair orders" in finding.fix
    finish_changes(runtime_of(ward.database, prefix, application=ward.database))
    assert ward.findings("routes", change_s=0.0) == []


def test_a_group_without_members_holds_trimming_up(ward: Ward) -> None:
    group = ensure_group(
        runtime_of(ward.database, ward.world.key_prefix),
        RouteCache(ward.database),
        topic="orders",
        name="ledger",
        settings=GroupSettings(start="earliest"),
    )
    finding = ward.finding("groups")
    assert (finding.verdict, "group ledger of topic orders" in finding.seen) == ("warning", True)
    join(ward.database, group_id=group.group_id, member_id="m-1", lease_s=60)
    assert ward.findings("groups") == []


# -- broker ------------------------------------------------------------------------------------------------------------


def test_a_broker_on_the_redis_of_a_node_is_a_warning(ward: Ward, node: RedisServer, start_redis: StartRedis) -> None:
    ward.broker_url = node.url.replace("/0", "/3")
    finding = ward.finding("broker apart")
    assert (finding.verdict, "node node-1" in finding.seen) == ("warning", True)
    other = start_redis()
    ward.broker_url = other.url.replace("redis://", f"redis://:{PASSWORD}@")
    other.kill()
    (away,) = [f for f in ward.findings("reachable") if f.subject.startswith("broker")]
    assert (away.verdict, PASSWORD in str(away)) == ("broken", False)
    ward.broker_url = "amqp://guest@127.0.0.1"
    (foreign,) = [f for f in ward.findings("reachable") if f.subject.startswith("broker")]
    assert foreign.verdict == "unknown"


def test_bodies_that_stay_and_a_bucket_that_does_not_answer_are_reported(
    ward: Ward, doctor: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    ward.world.rows(
        "INSERT INTO mqlayer_app.large_body_cut (topic_id, seqs, made_at) VALUES (7, '{1}', now() - interval '2 days')"
    )
    (finding,) = ward.findings("large_bodies")
    assert (finding.verdict, "mqlayer outbox quarantine list" in finding.fix) == ("warning", True)
    assert "large bodies of 1 topics stay" in finding.seen
    monkeypatch.setenv("MQLAYER_LARGE_BODIES", "s3")
    found = [one for one in doctor("doctor", "--json").stdout.splitlines() if "body store" in one]
    assert len(found) == 1
    assert "no bucket is given: set MQLAYER_S3_BUCKET" in found[0]
