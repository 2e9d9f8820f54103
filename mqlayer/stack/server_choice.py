"""Choice of a directory's server: machine program, container, wheel. Existing data keep their kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mqlayer.stack.containers import PostgresContainer, RedisContainer, docker_answers
from mqlayer.stack.credentials import Login
from mqlayer.stack.errors import NoServerProgram
from mqlayer.stack.postgres_server import PostgresServer
from mqlayer.stack.process_record import ProcessRecord
from mqlayer.stack.redis_server import OPEN, RedisServer
from mqlayer.stack.server_programs import Origin, best_postgres, best_redis

AnyRedis = RedisServer | RedisContainer
AnyPostgres = PostgresServer | PostgresContainer


def redis_for(directory: Path, *, options: Mapping[str, str] | None = None, login: Login = OPEN) -> AnyRedis:
    """Return a directory's Redis, not started. Raises NoServerProgram."""
    if _in_container(directory, best_redis_origin()):
        return RedisContainer(directory, options=options, login=login)
    return RedisServer(directory, options=options, login=login)


def postgres_for(directory: Path, *, options: Mapping[str, str] | None = None, password: str = "") -> AnyPostgres:
    """Return a directory's Postgres, not started. Raises NoServerProgram."""
    if _in_container(directory, best_postgres_origin()):
        return PostgresContainer(directory, options=options, password=password)
    return PostgresServer(directory, options=options, password=password)


def best_redis_origin() -> Origin | None:
    """Return the best program's origin."""
    try:
        return best_redis().origin
    except NoServerProgram:
        return None


def best_postgres_origin() -> Origin | None:
    """Return the best programs' origin."""
    try:
        return best_postgres().origin
    except NoServerProgram:
        return None


def _in_container(directory: Path, origin: Origin | None) -> bool:
    record = ProcessRecord.load(directory)
    if record.container or record.port:
        return bool(record.container)
    return origin != "machine" and docker_answers()
