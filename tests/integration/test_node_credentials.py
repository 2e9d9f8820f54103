"""Postgres knows where nodes are; how to log in to them is a setting of each process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from mqlayer.domain.routing import NodeId
from mqlayer.errors import AccessDenied, Conflict, InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.redis.access import NodeAccess, access_here, broker_access, broker_url, forget_access, use_access
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.server_info import read_server_info
from mqlayer.settings import Settings
from mqlayer.stack import RedisServer
from mqlayer.topics import list_nodes, register_node, set_node_address
from tests.fixtures.commands import Commands
from tests.fixtures.servers import StartRedis
from tests.proof.runtimes import runtime_of

PASSWORD = "first-p@ss/w%"
SECOND = "second-p@ss"


@pytest.fixture
def database(database_dsn: str) -> Iterator[Database]:
    with Database(database_dsn) as found:
        yield found


@pytest.fixture
def commands(database_dsn: str, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    monkeypatch.setenv("MQLAYER_DSN", database_dsn)
    return Commands()


@pytest.fixture
def guarded(start_redis: StartRedis) -> RedisServer:
    """A Redis that lets nobody in but user app."""
    return start_redis(options={"user": f"app on >{PASSWORD} ~* +@all", "requirepass": "another"})


@pytest.fixture
def password_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "redis-n1"
    path.write_text(f"{PASSWORD}\n")
    monkeypatch.setenv("MQLAYER_REDIS_USER", "app")
    monkeypatch.setenv("MQLAYER_REDIS_PASSWORD_FILE", str(tmp_path / "redis-{node}"))
    return path


def test_a_url_with_a_password_is_refused_and_nothing_of_it_is_kept_or_shown(
    database: Database, guarded: RedisServer, commands: Commands
) -> None:
    url = guarded.url.replace("redis://", "redis://app:s3cr3t@")
    with pytest.raises(InvalidInput, match="MQLAYER_REDIS_USER") as refused:
        register_node(runtime_of(database), name="n1", url=url)
    assert "s3cr3t" not in str(refused.value)
    said = commands("node", "register", "n1", url)
    assert said.exit_code == 1
    assert "MQLAYER_REDIS_PASSWORD_FILE" in said.output
    assert "s3cr3t" not in said.output
    assert list_nodes(database) == []


def test_a_node_is_registered_with_the_password_of_its_own_file(
    database: Database, database_dsn: str, guarded: RedisServer, password_file: Path
) -> None:
    node = register_node(runtime_of(database), name="n1", url=guarded.url)
    assert node.url == guarded.url
    with psycopg.connect(database_dsn) as connection:
        rows = connection.execute("SELECT n::text FROM mqlayer.node n UNION ALL SELECT a::text FROM mqlayer.audit a")
        assert not any("app" in text or PASSWORD in text for (text,) in rows)
    with pytest.raises(InvalidInput, match="MQLAYER_REDIS_USER"):
        set_node_address(runtime_of(database, "mq"), "n1", guarded.url.replace("//", "//u:p@"))


def test_a_new_password_counts_from_the_next_connection_on(
    database: Database, guarded: RedisServer, password_file: Path
) -> None:
    node = register_node(runtime_of(database), name="n1", url=guarded.url)
    with NodeConnection(node) as connection:
        assert connection.call([("ACL", "SETUSER", "app", f">{SECOND}", f"<{PASSWORD}")]) == [b"OK"]
        connection.close()
        with pytest.raises(AccessDenied, match="MQLAYER_REDIS_USER") as denied:
            connection.connect()
        assert PASSWORD not in str(denied.value)
        password_file.write_text(SECOND)
        assert connection.call([("ACL", "WHOAMI")]) == [b"app"]


@pytest.mark.parametrize("fault", ["missing", "empty"])
def test_a_password_file_that_can_not_be_used_is_named(
    database: Database, guarded: RedisServer, password_file: Path, fault: str
) -> None:
    if fault == "missing":
        password_file.unlink()
    else:
        password_file.write_text("\n")
    with pytest.raises(AccessDenied, match=str(password_file)):
        register_node(runtime_of(database), name="n1", url=guarded.url)


def test_a_user_without_a_password_is_told_what_to_set(
    database: Database, guarded: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQLAYER_REDIS_USER", "app")
    with pytest.raises(AccessDenied, match="MQLAYER_REDIS_PASSWORD_FILE"):
        register_node(runtime_of(database), name="n1", url=guarded.url)


def test_no_login_at_all_is_told_what_to_set(database: Database, guarded: RedisServer) -> None:
    with pytest.raises(AccessDenied, match="MQLAYER_REDIS_USER"):
        register_node(runtime_of(database), name="n1", url=guarded.url)


LOGGING_IN_URLS = ("redis://{}:{}@h:1/0", "redis://h:1/0?username={}&password={}", "sentinel://{}:{}@h:1/orders/0")


@pytest.mark.parametrize("form", LOGGING_IN_URLS)
def test_a_nodes_url_that_logs_in_besides_the_settings_is_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres refuses such rows; this is for one that came there all the same."""
    monkeypatch.setenv("MQLAYER_REDIS_USER", "app")
    monkeypatch.setenv("MQLAYER_REDIS_PASSWORD", PASSWORD)
    connection = NodeConnection(Node(NodeId(1), "n1", form.format("old", "0ld"), None), any_run=True)
    with pytest.raises(AccessDenied, match="its URL holds a user or a password") as refused:
        connection.connect()
    assert "0ld" not in str(refused.value)


def test_settings_take_the_place_of_what_the_brokers_url_logs_in_with(guarded: RedisServer) -> None:
    for query, before in (("", "old:0ld@"), ("?username=old&password=0ld", "")):
        url = guarded.url.replace("redis://", f"redis://{before}") + query
        settings = Settings(broker_url=url, broker_user="app", broker_password=PASSWORD)  # type: ignore[arg-type]
        assert read_server_info(url, timeout_s=5.0, access=broker_access(settings)).run_id


def test_settings_of_the_program_count_for_the_whole_process() -> None:
    first = Settings(redis_user="one", redis_password="x")  # type: ignore[arg-type]  # pydantic makes it a secret
    try:
        use_access(first)
        use_access(first)
        use_access(Settings())
        assert access_here().credentials("redis") == ("one", "x")
        assert "'x'" not in repr(access_here())
        with pytest.raises(Conflict, match="one Redis user"):
            use_access(Settings(redis_user="two", redis_password="y"))  # type: ignore[arg-type]
    finally:
        forget_access()
    assert access_here() == NodeAccess()


def test_the_brokers_password_comes_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "broker"
    file.write_text("p@ss/w\n")
    settings = Settings(broker_url="redis://b:1/0", broker_user="celery", broker_password_file=str(file))  # type: ignore[arg-type]
    assert broker_url(settings) == "redis://celery:p%40ss%2Fw@b:1/0"
    assert "p%40ss" not in repr(settings)
    assert broker_url(Settings(broker_url="redis://u:p@b/0")) == "redis://u:p@b/0"  # type: ignore[arg-type]


URLS = {
    "redis://u:p%40ss@h:1/0": "redis://h:1/0",
    "redis://u:p@ss@h:1/0": "redis://h:1/0",
    "rediss://:p@h/2?socket_timeout=3": "rediss://h/2?socket_timeout=3",
    "redis://h/0?password=p&socket_timeout=3": "redis://h/0?socket_timeout=3",
    "redis://h/0?socket_timeout=3&username=u&password=p": "redis://h/0?socket_timeout=3",
    "redis://h/0?username=u&password=p": "redis://h/0",
    "sentinel://u:p@h1:1,h2:2/orders/0?sentinel_username=s&sentinel_password=p": "sentinel://h1:1,h2:2/orders/0",
    "redis://h:6379/0?a=1&password=p&b=2": "redis://h:6379/0?a=1&b=2",
    "redis://h:6379/0": "redis://h:6379/0",
}


def test_a_nodes_row_holds_no_credentials(database_dsn: str) -> None:
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        put = "INSERT INTO mqlayer.node (name, url) VALUES (%s, %s)"
        for number, (url, plain) in enumerate(URLS.items()):
            if url != plain:
                with pytest.raises(psycopg.errors.CheckViolation):
                    connection.execute(put, (f"n{number}", url))
            connection.execute(put, (f"n{number}", plain))


def test_no_program_can_write_credentials_into_a_nodes_row(database_dsn: str) -> None:
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        for url in ("redis://u:p@h/0", "redis://h/0?password=p", "sentinel://h/o/0?a=1&sentinel_password=p"):
            with pytest.raises(psycopg.errors.CheckViolation):
                connection.execute("INSERT INTO mqlayer.node (name, url) VALUES ('n1', %s)", (url,))
