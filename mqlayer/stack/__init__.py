"""Real servers for development, demonstrations and tests, as child processes whose state is a directory."""

from mqlayer.stack.errors import DirectoryRefused, NoServerProgram, ServerFailed, StackError
from mqlayer.stack.postgres_server import PostgresDatabases, PostgresServer
from mqlayer.stack.programs import (
    PostgresPrograms,
    RedisProgram,
    best_postgres,
    best_redis,
    postgres_programs,
    redis_programs,
)
from mqlayer.stack.redis_server import RedisServer

__all__ = [
    "DirectoryRefused",
    "NoServerProgram",
    "PostgresDatabases",
    "PostgresPrograms",
    "PostgresServer",
    "RedisProgram",
    "RedisServer",
    "ServerFailed",
    "StackError",
    "best_postgres",
    "best_redis",
    "postgres_programs",
    "redis_programs",
]
