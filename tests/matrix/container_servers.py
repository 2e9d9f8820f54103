"""Servers in containers, by a real engine that the matrix starts: run by its row `containers`, and not by the suite."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import redis

from mqlayer.redis.access import forget_access
from mqlayer.stack import RedisServer, Stack, postgres_for, redis_for, server_choice
from mqlayer.stack.containers import PostgresContainer, RedisContainer, docker_answers
from mqlayer.stack.credentials import Login, StackCredentials
from mqlayer.stack.errors import DirectoryRefused, ServerFailed
from mqlayer.testing.servers import TestServers


@pytest.fixture(autouse=True)
def no_server_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without server programs, where a Docker engine answers."""
    for name in ("best_redis_origin", "best_postgres_origin"):
        monkeypatch.setattr(server_choice, name, lambda: None)
    assert docker_answers()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory whose name no other container's has."""
    return tmp_path / f"c-{uuid.uuid4().hex[:8]}"


@pytest.mark.parametrize(
    "login", [Login("default", ""), Login("default", "pass-word"), Login("owner", "pass")], ids=["open", "one", "own"]
)
def test_a_redis_keeps_what_it_answered_over_a_kill(directory: Path, login: Login) -> None:
    server = redis_for(directory, login=login)
    assert isinstance(server, RedisContainer)
    server.start()
    try:
        port = server.port
        with redis.Redis.from_url(server.url) as client:
            client.set("a", "1")
            assert client.config_get("appendfsync")["appendfsync"] == "always"
        server.kill()
        assert not server.running
        server.start()
        assert server.port == port
        with redis.Redis.from_url(server.url) as client:
            assert client.get("a") == b"1"
        if login.password:
            with redis.Redis.from_url(server.address) as client, pytest.raises(redis.AuthenticationError):
                client.get("a")
            with pytest.raises(DirectoryRefused, match="another one"):
                redis_for(directory, login=Login(login.user, "other")).start()
    finally:
        server.erase()
    assert not server.running


@pytest.mark.parametrize("password", ["", "pass/word'"], ids=["open", "password"])
def test_a_postgres_keeps_its_databases_over_a_kill(directory: Path, password: str) -> None:
    server = postgres_for(directory, password=password)
    assert isinstance(server, PostgresContainer)
    server.start()
    try:
        with psycopg.connect(server.create_database("shop")) as connection:
            connection.execute("CREATE TABLE t (n int)")
        server.kill()
        server.start()
        with psycopg.connect(server.dsn("shop")) as connection:
            assert connection.execute("SELECT * FROM t").fetchall() == []
    finally:
        server.erase()


def test_a_server_that_ends_at_once_is_told_with_its_last_words(directory: Path) -> None:
    server = redis_for(directory, options={"appendonly": "perhaps"})
    try:
        with pytest.raises(ServerFailed, match=r"ended at once[\s\S]*argument must be 'yes' or 'no'"):
            server.start(within_s=60.0)
    finally:
        server.erase()


def test_an_image_that_the_engine_lacks_is_told_with_what_to_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RedisContainer, "image", "localhost:1/none:1")
    server = redis_for(directory)
    with pytest.raises(ServerFailed, match=r"has no image localhost:1/none:1.*docker pull localhost:1/none:1"):
        server.start()
    assert not server.running


@pytest.mark.timeout(300)
def test_the_test_kit_gives_databases_and_nodes_in_containers() -> None:
    with TestServers() as servers:
        with servers.database() as (dsn, _), psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT count(*) FROM mqlayer.topic").fetchone() == (0,)
        assert {type(servers.node(name)) for name in servers.urls} == {RedisContainer}
        with redis.Redis.from_url(servers.urls["node-1"]) as client:
            assert client.ping()
        nodes = [servers.node(name) for name in servers.urls]
    assert [node.running for node in nodes] == [False, False]


@pytest.fixture
def stack(directory: Path) -> Iterator[Stack]:
    """A stack that is gone afterwards."""
    made = Stack(directory, node_count=1)
    yield made
    forget_access()
    made.erase()


@pytest.mark.timeout(300)
def test_a_stack_of_containers_serves_and_comes_back_after_each_is_killed(stack: Stack) -> None:
    addresses = stack.up()
    servers = {part.name for part in stack.status() if part.pid is None}
    assert servers == {"postgres", "node-1", "broker"}
    for name in sorted(servers):
        place = stack.directory / name
        (postgres_for(place) if name == "postgres" else redis_for(place)).kill()
        assert {part.name for part in stack.status() if part.state == "stopped"} >= {name}
        assert stack.up() == addresses
        assert {part.state for part in stack.status()} == {"running"}
    owner = StackCredentials.load(stack.directory).of("owner").node
    with redis.Redis.from_url(owner.in_url(addresses.nodes["node-1"])) as client:
        assert client.ping()
    with closing(psycopg.connect(addresses.dsn)) as connection:
        assert connection.execute("SELECT name FROM mqlayer.node").fetchall() == [("node-1",)]


def test_data_of_a_program_stay_with_programs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with RedisServer(directory) as server:
        assert server.running
    for name in ("best_redis_origin", "best_postgres_origin"):
        monkeypatch.setattr(server_choice, name, lambda: None)
    assert isinstance(redis_for(directory), RedisServer)
