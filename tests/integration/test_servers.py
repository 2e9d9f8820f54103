"""The servers that everything else is tested on."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import redis

from mqlayer.errors import Conflict
from mqlayer.postgres.database import Database
from mqlayer.stack import PostgresServer, RedisProgram, RedisServer, ServerFailed, postgres_programs, redis_programs
from mqlayer.stack.shared_memory import segment_of
from tests.fixtures.servers import StartPostgres, StartRedis
from tests.fixtures.variants import some_of
from tests.proof.sockets import by_socket


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, decode_responses=True)


def test_a_shared_redis_has_the_settings_that_the_promise_needs(every_redis: RedisServer) -> None:
    with client(every_redis) as connection:
        settings = connection.config_get("*")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "always"
    assert settings["no-appendfsync-on-rewrite"] == "no"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["save"] == ""


@pytest.mark.parametrize("program", redis_programs(), ids=str)
@pytest.mark.parametrize("end", [RedisServer.stop, RedisServer.kill])
def test_redis_keeps_its_data_and_its_port(
    start_redis: StartRedis, program: RedisProgram, end: Callable[[RedisServer], None]
) -> None:
    server = start_redis(program=program)
    with client(server) as connection:
        connection.set("kept", "yes")
    url, pid = server.url, server.pid

    end(server)
    assert not server.running
    assert server.pid is None
    server.start()

    assert server.url == url
    assert server.pid != pid
    with client(server) as connection:
        assert connection.get("kept") == "yes"


def test_starting_a_running_redis_changes_nothing(start_redis: StartRedis) -> None:
    server = start_redis()
    pid = server.pid
    server.start()
    assert server.pid == pid


def test_another_object_on_the_directory_finds_the_running_redis(start_redis: StartRedis) -> None:
    server = start_redis()
    other = RedisServer(server.directory)
    assert other.pid == server.pid
    other.stop()
    assert not server.running


def test_a_redis_that_cannot_start_says_why(start_redis: StartRedis) -> None:
    with pytest.raises(ServerFailed, match="no-such-option"):
        start_redis(options={"no-such-option": "1"})


def test_a_cluster_node_whose_second_port_is_taken_starts_on_another(start_redis: StartRedis) -> None:
    server = start_redis(options={"cluster-enabled": "yes"})
    first = server.port
    server.stop()
    with socket.create_server(("127.0.0.1", first + 10_000)):
        server.start()
    assert server.port != first


def test_options_with_quotes_and_blanks_arrive(start_redis: StartRedis) -> None:
    server = start_redis(options={"requirepass": """a"b'c\\d""", "save": "3600 1"})
    with redis.Redis.from_url(server.url, password="""a"b'c\\d""", decode_responses=True) as connection:
        assert connection.config_get("save") == {"save": "3600 1"}


@pytest.mark.parametrize("programs", some_of(postgres_programs(), 9), ids=str)
def test_postgres_keeps_its_data_and_its_port(start_postgres: StartPostgres, programs: object) -> None:
    server = start_postgres(programs=programs)
    with psycopg.connect(server.create_database("one")) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    dsn = server.dsn("one")

    server.restart()

    assert server.dsn("one") == dsn
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_a_killed_postgres_recovers_what_was_committed(start_postgres: StartPostgres) -> None:
    server = start_postgres(options={"fsync": "on"})
    busy = psycopg.connect(server.dsn())
    busy.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    busy.commit()
    busy.execute("INSERT INTO kept VALUES (43)")

    server.kill()
    busy.close()
    server.start()

    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchall() == [(42,)]


def test_an_erased_postgres_leaves_no_shared_memory_even_if_it_was_killed(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    segment = segment_of(server.data)
    assert segment in segments_there()
    server.kill()
    assert segment in segments_there()
    server.erase()
    assert segment not in segments_there()


def segments_there() -> set[int]:
    """Ids of System V shared memory; Linux only."""
    return {int(line.split()[1]) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}


def test_postgres_listens_on_a_socket_too(start_postgres: StartPostgres) -> None:
    server = start_postgres()
    with psycopg.connect(by_socket(server.dsn())) as connection:
        assert connection.execute("SELECT inet_server_addr()").fetchone() == (None,)


def test_data_of_another_version_are_opened_with_that_version(start_postgres: StartPostgres) -> None:
    server = start_postgres(programs=postgres_programs()[-1])
    server.stop()
    assert PostgresServer(server.directory).programs == postgres_programs()[-1]


def test_a_database_of_a_test_has_both_schemas(database_dsn: str) -> None:
    with psycopg.connect(database_dsn) as connection:
        schemas = {name for (name,) in connection.execute("SELECT nspname FROM pg_namespace")}
    assert {"mqlayer", "mqlayer_app"} <= schemas


def test_databases_start_empty(empty_database_dsn: str) -> None:
    with psycopg.connect(empty_database_dsn) as connection:
        schemas = {name for (name,) in connection.execute("SELECT nspname FROM pg_namespace")}
    assert "mqlayer" not in schemas


def test_what_breaks_a_constraint_is_a_conflict_and_no_outage(database_dsn: str) -> None:
    """An outage would be tried again for ever."""
    insert = "INSERT INTO mqlayer.job (name, epoch, next_at) VALUES ('trim', 1, now())"
    with Database(database_dsn) as database:
        database.transaction(lambda connection: connection.execute(insert))
        with pytest.raises(Conflict, match="job_key"):
            database.transaction(lambda connection: connection.execute(insert))
        with pytest.raises(Conflict, match="null value"), database.connection() as connection:
            connection.execute("INSERT INTO mqlayer.job (name) VALUES (NULL)")
