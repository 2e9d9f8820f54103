"""Servers that are too old are refused by their names: run by the matrix, which unpacks them, and not by the suite."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from mqlayer.doctor.versions import postgres_finding, redis_finding
from mqlayer.errors import ConfigurationRefused
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.redis.server_info import read_server_info
from mqlayer.stack import PostgresPrograms, RedisProgram
from mqlayer.topics.nodes import register_node
from tests.fixtures.servers import StartPostgres, StartRedis
from tests.proof.runtimes import runtime_of


def found(name: str) -> tuple[Path, tuple[int, ...]]:
    """Return the first such program in PATH, and its version."""
    path = Path(shutil.which(name) or name)
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"(\d+)\.(\d+)", shown)
    assert match is not None
    return path, tuple(int(number) for number in match.groups())


def test_an_old_redis_is_refused(start_redis: StartRedis, database_dsn: str) -> None:
    path, version = found("redis-server")
    assert version < (6, 2)
    server = start_redis(program=RedisProgram(path, "redis", version, "machine"))
    database = Database(database_dsn)
    with pytest.raises(ConfigurationRefused, match=rf"this is Redis {version[0]}\.{version[1]}\.\d+: .*6\.2 or later"):
        register_node(runtime_of(database), name="old", url=server.url)
    database.close()
    assert redis_finding("node old", "redis", read_server_info(server.url, timeout_s=5.0).version).verdict == "broken"


def test_an_old_postgres_is_refused(start_postgres: StartPostgres) -> None:
    path, version = found("postgres")
    assert version < (15,)
    server = start_postgres(programs=PostgresPrograms(path.parent, version, "machine"))
    dsn = server.dsn()
    refused = rf"this is Postgres {version[0]}\.\d+: .*Postgres 15 or later"
    with pytest.raises(ConfigurationRefused, match=refused):
        migrate(dsn)
    with pytest.raises(ConfigurationRefused, match=refused), closing(Database(dsn)) as database:
        database.connection().__enter__()
    with psycopg.connect(dsn) as connection:
        assert postgres_finding("database", connection.info.server_version).verdict == "broken"
        assert connection.execute("SELECT FROM pg_namespace WHERE nspname LIKE 'mqlayer%'").fetchall() == []
