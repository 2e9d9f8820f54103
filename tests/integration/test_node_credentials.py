"""Postgres knows where nodes are; how to log in to them is a setting of each process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from mqlayer.domain.routing import NodeId
from mqlayer.errors import AccessDenied, Conflict, InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.redis.access import NodeAccess, access_here, broker_access, broker_url, forget_access, use_access
from mqlayer.redis.acl_check import RequiredAccess
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.roles import RedisRole
from mqlayer.redis.server_info import read_access, read_server_info
from mqlayer.settings import Settings
from mqlayer.stack import RedisServer
from mqlayer.topics import list_nodes, register_node, set_node_address
from tests.fixtures.commands import Commands
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.replicas import pair_of, sentinel_of
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
    with kept_session(database_dsn) as connection:
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
    with kept_session(database_dsn, autocommit=True) as connection:
        put = "INSERT INTO mqlayer.node (name, url) VALUES (%s, %s)"
        for number, (url, plain) in enumerate(URLS.items()):
            if url != plain:
                with pytest.raises(psycopg.errors.CheckViolation):
                    connection.execute(put, (f"n{number}", url))
            connection.execute(put, (f"n{number}", plain))


def test_no_program_can_write_credentials_into_a_nodes_row(database_dsn: str) -> None:
    with kept_session(database_dsn, autocommit=True) as connection:
        for url in ("redis://u:p@h/0", "redis://h/0?password=p", "sentinel://h/o/0?a=1&sentinel_password=p"):
            with pytest.raises(psycopg.errors.CheckViolation):
                connection.execute("INSERT INTO mqlayer.node (name, url) VALUES ('n1', %s)", (url,))


# -- servers that must not get the login -----------------------------------------------------------------------------

WAYS: dict[str, Callable[[Node], object]] = {
    "connection": lambda node: NodeConnection(node, any_run=True).connect(),
    "facts": lambda node: read_server_info(node.url, timeout_s=5.0, node=node.name),
    "rights": lambda node: read_access(node, RequiredAccess(RedisRole.RELAY, "mq"), timeout_s=5.0),
}
"""All that makes connections to nodes."""
ELSEWHERE = (
    "redis://127.0.0.1:{}/0", "redis://LOCALHOST:{}/0", "redis://[::1]:{}/0", "redis:///0?host=127.0.0.1&port={}",
    "rediss://127.0.0.1:{}/0", "sentinel://127.0.0.1:{}/orders/0", "sentinels://127.0.0.1:{}/orders/0",
    "redis+sentinel://127.0.0.1:{}/orders/0",
)  # fmt: skip


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server of somebody who may change the addresses of nodes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def nobody_came(listener: socket.socket) -> bool:
    """Whether no connection waits: one that was closed since would too."""
    try:
        listener.accept()
    except BlockingIOError:
        return True
    return False


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ELSEWHERE)
def test_a_server_that_is_not_among_the_hosts_is_not_connected_to(
    form: str, way: str, listener: socket.socket, password_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = listener.getsockname()[1]
    monkeypatch.setenv("MQLAYER_REDIS_HOSTS", f"redis-*.example.com, 127.0.0.1:{port + 1}")
    with pytest.raises(AccessDenied, match="MQLAYER_REDIS_HOSTS"):
        WAYS[way](Node(NodeId(1), "n1", form.format(port), None))
    assert nobody_came(listener)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", [form for form in ELSEWHERE if not form.startswith(("rediss:", "sentinels:"))])
@pytest.mark.parametrize("setting", ["MQLAYER_REDIS_CA_FILE", "MQLAYER_REDIS_CERT_FILE"])
def test_where_tls_is_set_up_an_address_without_it_is_not_connected_to(
    setting: str, form: str, way: str, listener: socket.socket, password_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, "/etc/ssl/any.pem")
    with pytest.raises(AccessDenied, match="rediss://"):
        WAYS[way](Node(NodeId(1), "n1", form.format(listener.getsockname()[1]), None))
    assert nobody_came(listener)


def test_a_primary_that_a_sentinel_names_is_among_the_hosts_too(
    start_redis: StartRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair_of(start_redis) as pair, sentinel_of(pair.primary, tmp_path / "sentinel") as port:
        primary = pair.primary
        node = Node(NodeId(1), "n1", f"sentinel://127.0.0.1:{port}/orders/0", None)
        monkeypatch.setenv("MQLAYER_REDIS_HOSTS", f"127.0.0.1:{port}")
        with pytest.raises(AccessDenied, match=f"127.0.0.1:{primary.port} is not among MQLAYER_REDIS_HOSTS"):
            WAYS["connection"](node)
        monkeypatch.setenv("MQLAYER_REDIS_HOSTS", f"127.0.0.1:{port},127.0.0.1:{primary.port}")
        WAYS["connection"](node)


@pytest.mark.parametrize(
    ("hosts", "host", "fits"),
    [
        ("", "anything", True),
        (" , ", "anything", True),
        ("redis-1.example.com", "REDIS-1.example.com", True),
        ("redis-*.example.com", "redis-12.example.com", True),
        ("redis-*.example.com", "redis-1.evil.example.com", False),
        ("redis-*.example.com", "redis-1.example.com.evil", False),
        ("redis-*.example.com", "redis-1xexample.com", False),
        ("10.0.0.*", "10.0.0.7", True),
        ("10.0.0.*", "10.0.0.7.evil", False),
        ("a:6379", "a", True),
        ("a:6380", "a", False),
        ("[::1]:6379", "::1", True),
        ("::1", "::1", True),
        ("::1", "::2", False),
        ("*", "10.0.0.7", False),
    ],
)
def test_hosts_are_compared_whole(hosts: str, host: str, fits: bool) -> None:
    access = NodeAccess(hosts=hosts)
    if fits:
        access.check_host(host, 6379)
    else:
        with pytest.raises(InvalidInput, match="MQLAYER_REDIS_HOSTS"):
            access.check_host(host, 6379)


def test_the_setting_of_a_program_counts_as_the_variable_does(listener: socket.socket) -> None:
    use_access(Settings(redis_hosts="elsewhere", redis_user="app", redis_password=PASSWORD))  # type: ignore[arg-type]
    try:
        with pytest.raises(AccessDenied, match="MQLAYER_REDIS_HOSTS"):
            WAYS["connection"](Node(NodeId(1), "n1", f"redis://127.0.0.1:{listener.getsockname()[1]}/0", None))
    finally:
        forget_access()
    assert nobody_came(listener)
