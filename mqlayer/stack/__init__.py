"""Local servers for development, demonstrations and tests."""

from mqlayer.stack.addresses import Addresses, GivenAddresses
from mqlayer.stack.databases import PostgresDatabases
from mqlayer.stack.errors import DirectoryRefused, NoServerProgram, ServerFailed, StackError
from mqlayer.stack.postgres_server import PostgresServer
from mqlayer.stack.redis_server import RedisServer
from mqlayer.stack.server_choice import AnyPostgres, AnyRedis, postgres_for, redis_for
from mqlayer.stack.server_programs import (
    PostgresPrograms,
    RedisProgram,
    best_postgres,
    best_redis,
    postgres_programs,
    redis_programs,
)
from mqlayer.stack.stack import ComponentStatus, Stack

__all__ = [
    "Addresses",
    "AnyPostgres",
    "AnyRedis",
    "ComponentStatus",
    "DirectoryRefused",
    "GivenAddresses",
    "NoServerProgram",
    "PostgresDatabases",
    "PostgresPrograms",
    "PostgresServer",
    "RedisProgram",
    "RedisServer",
    "ServerFailed",
    "Stack",
    "StackError",
    "best_postgres",
    "best_redis",
    "postgres_for",
    "postgres_programs",
    "redis_for",
    "redis_programs",
]
