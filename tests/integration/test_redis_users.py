"""Each process runs under a Redis user of its own, on a server whose default user is off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from mqlayer.errors import ConfigurationRefused
from mqlayer.postgres.database import Database
from mqlayer.redis.roles import GRANTED, RedisRole
from mqlayer.topics import create_topic, rearm_node, register_node
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.servers import StartRedis, redis_7_program
from tests.fixtures.user_programs import EACH, TOPIC
from tests.fixtures.user_sites import (
    ADMIN,
    ADMIN_PASSWORD,
    JOB_TASKS,
    OUTBOXED,
    PROGRAMS,
    Site,
    UserFiles,
    armed_run,
    call_jobs_due,
    publish_through_the_outbox,
    site_on,
)
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of


@pytest.fixture
def site(
    database_dsn: str, key_prefix: str, start_redis: StartRedis, tmp_path: Path, logging_as_before: None
) -> Iterator[Site]:
    users = UserFiles.make(tmp_path, key_prefix)
    server = start_redis(program=redis_7_program(), options={"aclfile": str(users.acl_file)})
    with site_on([server], server.url, users, dsn=database_dsn, prefix=key_prefix) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_process_does_its_work_as_its_own_user_and_is_refused_nothing(site: Site, database_dsn: str) -> None:
    operator, viewer, worker = RedisRole.OPERATOR, RedisRole.VIEWER, RedisRole.WORKER
    site.type(operator, "node", "register", "n1", site.url)
    site.type(operator, "topic", "create", TOPIC, "--partitions", "2", "--archived")
    relay = site.start(RedisRole.RELAY, "relay", "relay")
    members = site.start(RedisRole.CONSUMER, "members", "members", module=PROGRAMS)
    site.start(RedisRole.CONSUMER, "receiver", "receive", module=PROGRAMS)
    publish_through_the_outbox(database_dsn)
    direct = int(site.run(RedisRole.PUBLISHER, "publish"))
    assert direct == 2 * EACH

    all_of_it = OUTBOXED + direct
    expected = {"ordered": all_of_it, "shared": all_of_it, "every": all_of_it + 1, "popped": all_of_it + 1}
    wait_until(
        lambda: (
            all(site.handled()[group] >= count for group, count in expected.items())
            and site.handled()["tagged"] == EACH
        ),
        timeout_s=60,
        what=f"all handled: {site.handled()} of {expected}",
    )
    assert site.refusals() == set()

    # What people look at.
    site.type(viewer, "verify", TOPIC)
    for words in (
        ("group", "lag", TOPIC), ("group", "show", TOPIC, "ordered"), ("route", "show", TOPIC),
        ("key", "explain", TOPIC, "k1", "--group", "ordered"), ("archive", "status"), ("node", "list"),
    ):  # fmt: skip
        site.type(viewer, *words)
    said = site.type(viewer, "doctor", "--all", code=1)
    assert "may do all that it needs" in said
    assert site.refusals() == set()

    # What the worker does, and what operators do, beside each other.
    site.run(worker, "job", *JOB_TASKS)
    site.type(operator, "route", "split", TOPIC, "1", "--at", "128", "--yes")
    call_jobs_due(database_dsn)
    site.run(worker, "job", "repair_routes", "trim", "archive", "clean_marks")
    site.type(operator, "trim")
    site.type(operator, "archive", "run", "--once")
    site.type(operator, "route", "repair")
    site.type(operator, "node", "rearm", "n1")
    site.type(operator, "verify", TOPIC)
    assert site.refusals() == set()

    # A restart: who may not arm leaves it to a worker, and goes on when that did.
    run = armed_run(database_dsn)
    site.server.restart()
    publish_through_the_outbox(database_dsn)
    before = len(site.log.read_text().splitlines())
    site.wait_armed_by_worker(database_dsn, run)
    site.run(RedisRole.PUBLISHER, "publish")
    wait_until(lambda: len(site.log.read_text().splitlines()) > before, timeout_s=30, what="the members go on")
    assert site.refusals() == set()
    for file in (relay, members):
        site.unspoken(file.read_text())


def test_a_viewer_looks_and_changes_nothing(site: Site) -> None:
    operator, viewer = RedisRole.OPERATOR, RedisRole.VIEWER
    site.type(operator, "node", "register", "n1", site.url)
    site.type(operator, "topic", "create", TOPIC)
    with site.admin() as client:
        before = sorted((key, client.dump(key)) for key in client.scan_iter("*"))
    for words in (
        ("topic", "create", "others"), ("node", "rearm", "n1", "--former"),
        ("node", "set", "n1", "--url", site.url.replace("127.0.0.1", "localhost")),
        ("node", "register", "n2", site.url.replace("127.0.0.1", "localhost")),
        ("route", "split", TOPIC, "1", "--at", "64", "--yes"),
    ):  # fmt: skip
        said = site.type(viewer, *words, code=1)
        assert "mqlayer node acl" in said, said
    with site.admin() as client:
        assert sorted((key, client.dump(key)) for key in client.scan_iter("*")) == before


def test_a_process_that_lacks_a_right_says_which_before_it_serves(site: Site) -> None:
    site.type(RedisRole.OPERATOR, "node", "register", "n1", site.url)
    site.type(RedisRole.OPERATOR, "topic", "create", TOPIC)
    with site.admin() as client:
        client.execute_command("ACL", "SETUSER", "u-publisher", "-hmget")
    said = site.run(RedisRole.PUBLISHER, "publish", code=1)
    assert "+hmget" in said
    assert "mqlayer node acl publisher --user u-publisher" in said


@pytest.mark.full
def test_a_worker_that_lacks_a_right_says_which_and_does_not_start(site: Site) -> None:
    """One node that is away does not hide what another refuses."""
    site.type(RedisRole.OPERATOR, "node", "register", "n1", site.url)
    with psycopg.connect(site.environment["MQLAYER_DSN"]) as connection:
        connection.execute("INSERT INTO mqlayer.node (name, url) VALUES ('unreachable', 'redis://127.0.0.1:1/0')")
    worker = ("celery", "-A", "mqlayer.workers.app", "worker", "--pool", "solo")

    def start() -> tuple[int, str]:
        environment = site.of(RedisRole.WORKER) | {"MQLAYER_BROKER_URL": "memory://"}
        done = ask_python(*worker, env=environment)
        site.unspoken(done.stdout + done.stderr)
        return done.returncode, done.stdout + done.stderr

    with site.admin() as client:
        client.execute_command("ACL", "SETUSER", "u-worker", "-xtrim", "clearselectors")
    code, said = start()
    assert code != 0
    assert "mqlayer node acl worker --user u-worker" in said
    assert " ready." not in said
    with site.admin() as client:
        client.execute_command("ACL", "SETUSER", "u-worker", "resetpass", ">another")
    code, said = start()
    assert code != 0
    assert "set MQLAYER_REDIS_USER and MQLAYER_REDIS_PASSWORD_FILE" in said


def test_the_check_of_a_user_names_what_is_missing(site: Site) -> None:
    site.type(RedisRole.OPERATOR, "node", "register", "n1", site.url)
    for role in GRANTED:
        said = site.type(RedisRole.OPERATOR, "node", "acl", role, "--user", f"u-{role}", "--check")
        assert "may do all that it needs" in said
    said = site.type(RedisRole.OPERATOR, "node", "acl", "publisher", "--user", "u-viewer", "--check", code=1)
    assert "+hset on" in said
    assert "unknown" not in said


def test_a_default_user_without_rights_is_refused_because_a_restart_would_lose_what_scripts_wrote(
    database_dsn: str, start_redis: StartRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis 7.0 to 8.0 read transactions of their file with the rights of user default, also where it is off.

    Valkey 9.1 does not; it is refused all the same: a version says little of builds with changes of their own.
    """
    program = redis_7_program()
    acl_file = tmp_path / "users.acl"
    acl_file.write_text(f"user {ADMIN} on >{ADMIN_PASSWORD} ~* &* +@all\nuser default off\n")
    server = start_redis(program=program, options={"aclfile": str(acl_file)})
    monkeypatch.setenv("MQLAYER_REDIS_USER", ADMIN)
    monkeypatch.setenv("MQLAYER_REDIS_PASSWORD", ADMIN_PASSWORD)
    with Database(database_dsn) as database:
        with pytest.raises(ConfigurationRefused, match="user default off"):
            register_node(runtime_of(database), name="n1", url=server.url)
        register_node(runtime_of(database, unsafe=True), name="n1", url=server.url)
        create_topic(runtime_of(database, "mq", unsafe=True), TOPIC)
        with redis.Redis.from_url(server.url, username=ADMIN, password=ADMIN_PASSWORD) as client:
            client.eval("redis.call('SET', 'a', '1') redis.call('SET', 'b', '1')", 0)
            server.restart()
            keeps = program.flavour == "valkey" and program.version >= (9, 1)
            assert client.exists("a", "b") == (2 if keeps else 0), "does this server still need the check?"
            client.acl_setuser("default", enabled=False, keys=["*"], categories=["+@all"])
            client.eval("redis.call('SET', 'a', '1') redis.call('SET', 'b', '1')", 0)
            client.acl_save()
            server.restart()
            assert client.exists("a", "b") == 2
        assert rearm_node(runtime_of(database, "mq"), "n1")[0].armed_run_id
