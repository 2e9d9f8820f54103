"""Which server is taken where several could be: an address, a program, a container, a wheel, in this order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqlayer.stack import (
    NoServerProgram,
    PostgresServer,
    RedisServer,
    postgres_for,
    postgres_programs,
    redis_for,
    redis_programs,
    server_choice,
    server_programs,
)
from mqlayer.stack.accounts import Account
from mqlayer.stack.containers import PostgresContainer, RedisContainer, engine_answers
from mqlayer.stack.errors import DirectoryRefused
from mqlayer.stack.process_record import ProcessRecord
from mqlayer.stack.server_paths import data_place, program_place
from tests.fixtures.servers import StartPostgres

STRANGER = Account("stranger", 54_321, 54_321)


@pytest.fixture(autouse=True)
def fresh_look() -> Iterator[None]:
    """Forget what was found, before and after a test that hides some of it."""
    _forget()
    yield
    _forget()


def _forget() -> None:
    redis_programs.cache_clear()
    postgres_programs.cache_clear()


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without servers or Docker, except for what the test puts into the directory returned, its PATH."""
    monkeypatch.setattr(server_choice, "docker_answers", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_programs, "POSTGRES_PLACES", ())
    return tmp_path


@pytest.fixture
def docker(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a machine where a Docker engine answers."""
    monkeypatch.setattr(server_choice, "docker_answers", lambda: True)


def put(place: Path, name: str, version_line: str) -> None:
    program = place / name
    program.write_text(f"#!/bin/sh\necho '{version_line}'\n")
    program.chmod(0o755)


def put_postgres(place: Path, version: str, *names: str) -> None:
    place.mkdir(exist_ok=True)
    for name in names:
        put(place, name, f"{name} (PostgreSQL) {version}")


def test_programs_of_the_machine_come_before_those_of_wheels(nothing_installed: Path) -> None:
    put(nothing_installed, "redis-server", "Redis server v=7.2.4 sha=0 bits=64")
    put_postgres(nothing_installed, "16.2", "postgres", "initdb", "pg_ctl")
    assert [str(program) for program in redis_programs()] == ["redis-7.2.4", "redis-6.2.14"]
    assert str(postgres_programs()[0]) == "postgres-16.2"
    assert {found.origin for found in postgres_programs()[1:]} == {"wheel"}


def test_valkey_is_a_redis(nothing_installed: Path) -> None:
    put(nothing_installed, "valkey-server", "Valkey server v=8.0.1 sha=0 bits=64")
    put(nothing_installed, "redis-server", "Redis server v=7.2.4 sha=0 bits=64")
    assert [str(program) for program in redis_programs()][:2] == ["valkey-8.0.1", "redis-7.2.4"]


def test_a_program_with_two_names_is_one(nothing_installed: Path) -> None:
    put(nothing_installed, "valkey-server", "Valkey server v=8.0.1 sha=0 bits=64")
    (nothing_installed / "redis-server").symlink_to("valkey-server")
    assert [str(program) for program in redis_programs()] == ["valkey-8.0.1", "redis-6.2.14"]


def test_too_old_programs_are_not_taken(nothing_installed: Path) -> None:
    put(nothing_installed, "redis-server", "Redis server v=5.0.14 sha=0 bits=64")
    put_postgres(nothing_installed, "14.9", "postgres", "initdb", "pg_ctl")
    assert {program.origin for program in redis_programs()} == {"wheel"}
    assert {found.origin for found in postgres_programs()} == {"wheel"}


def test_a_stray_postgres_without_initdb_is_not_taken(nothing_installed: Path) -> None:
    put_postgres(nothing_installed, "16.2", "postgres", "pg_ctl")
    assert {found.origin for found in postgres_programs()} == {"wheel"}


def test_programs_of_different_versions_side_by_side_are_not_taken(nothing_installed: Path) -> None:
    put_postgres(nothing_installed, "16.2", "postgres", "pg_ctl")
    put_postgres(nothing_installed, "15.1", "initdb")
    assert {found.origin for found in postgres_programs()} == {"wheel"}


def test_a_link_on_path_leads_to_the_whole_installation(nothing_installed: Path) -> None:
    put_postgres(nothing_installed / "16", "16.2", "postgres", "initdb", "pg_ctl", "pgbench")
    (nothing_installed / "postgres").symlink_to("16/postgres")
    found = postgres_programs()[0]
    assert found.directory == (nothing_installed / "16").resolve()
    assert found.program("pgbench") == found.directory / "pgbench"
    assert found.program("psql") is None


def test_pg_config_and_usual_places_are_asked_newest_first(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("15.4", "16.2", "17.0"):
        put_postgres(nothing_installed / version, version, "postgres", "initdb", "pg_ctl")
    put(nothing_installed, "pg_config", str(nothing_installed / "15.4"))
    monkeypatch.setattr(server_programs, "POSTGRES_PLACES", (f"{str(nothing_installed)[1:]}/1*",))
    machine = [str(found) for found in postgres_programs() if found.origin == "machine"]
    assert machine == ["postgres-15.4", "postgres-17.0", "postgres-16.2"]


@pytest.mark.usefixtures("docker")
def test_a_program_of_the_machine_is_taken_before_a_container(nothing_installed: Path) -> None:
    put(nothing_installed, "redis-server", "Redis server v=7.2.4 sha=0 bits=64")
    put_postgres(nothing_installed, "16.2", "postgres", "initdb", "pg_ctl")
    assert isinstance(redis_for(nothing_installed / "r"), RedisServer)
    assert isinstance(postgres_for(nothing_installed / "p"), PostgresServer)


@pytest.mark.usefixtures("docker")
def test_a_container_is_taken_before_a_wheel(nothing_installed: Path) -> None:
    assert isinstance(redis_for(nothing_installed / "r"), RedisContainer)
    assert isinstance(postgres_for(nothing_installed / "p"), PostgresContainer)


@pytest.mark.usefixtures("docker")
def test_a_directory_keeps_the_kind_of_server_that_wrote_its_data(nothing_installed: Path) -> None:
    ProcessRecord(port=4711).save(nothing_installed)
    assert isinstance(redis_for(nothing_installed), RedisServer)


def test_wheels_serve_a_machine_with_nothing_else(nothing_installed: Path) -> None:
    server = redis_for(nothing_installed / "r")
    assert isinstance(server, RedisServer)
    assert server.program.origin == "wheel"


def test_without_any_program_the_error_says_what_to_install(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_programs, "_wheel_directory", lambda package: None)
    with pytest.raises(NoServerProgram, match=r"install redis-server or valkey-server, or pip install"):
        redis_for(nothing_installed / "r")
    with pytest.raises(NoServerProgram, match="install Postgres 15 or newer"):
        postgres_for(nothing_installed / "p")


@pytest.mark.parametrize(
    ("answer", "expected"), [(b"HTTP/1.1 200 OK\r\n\r\nOK", True), (b"HTTP/1.1 500 No\r\n", False)]
)
def test_a_docker_engine_is_one_that_answers(tmp_path: Path, answer: bytes, expected: bool) -> None:
    path = str(tmp_path / "docker.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        engine = threading.Thread(target=_answer_once, args=(listener, answer))
        engine.start()
        assert engine_answers(path) is expected
        engine.join()


def _answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1024).startswith(b"GET /_ping")
        connection.sendall(answer)


def test_no_docker_engine_is_no_error(tmp_path: Path) -> None:
    assert not engine_answers(str(tmp_path / "docker.sock"))


def test_data_move_where_the_account_of_postgres_can_enter(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    place = data_place(closed / "postgres", STRANGER)
    assert place.parent == Path("/var/tmp")
    assert data_place(closed / "postgres", STRANGER) == place
    assert data_place(closed / "postgres", None) == closed / "postgres" / "home"


@pytest.mark.full
def test_programs_of_a_wheel_are_copied_where_the_account_can_run_them(
    start_postgres: StartPostgres, server_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqlayer.stack.server_paths.OPEN_PLACE", server_directory)
    bundled = next(found for found in postgres_programs() if found.origin == "wheel")

    with monkeypatch.context() as patches:
        patches.setattr("mqlayer.stack.server_paths.can_enter", lambda directory, account: False)
        copied = program_place(bundled, STRANGER)

    assert copied.directory.is_relative_to(server_directory)
    assert copied.program("pgbench")
    assert start_postgres(programs=copied).has_database("postgres")


def test_programs_of_the_machine_that_the_account_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqlayer.stack.server_paths.can_enter", lambda directory, account: False)
    machine = next((found for found in postgres_programs() if found.origin == "machine"), None)
    if machine is None:
        pytest.skip("no Postgres on this machine")
    with pytest.raises(DirectoryRefused, match="user stranger can't run"):
        program_place(machine, STRANGER)
