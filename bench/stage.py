"""The servers of a bench run: real ones, durable, with the same settings for ours and for the baseline."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import redis
from pydantic import SecretStr

from mqlayer.domain.routing import PartitionId, Route
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.stack import PostgresServer, RedisServer
from mqlayer.topics import create_topic, register_node

Fsync = Literal["always", "everysec"]
FSYNCS: Final[tuple[Fsync, ...]] = ("always", "everysec")

BODY: Final = b"x" * 256
KEYS: Final = tuple(f"key-{number}" for number in range(1_000))
BATCH: Final = 500
CONNECTIONS: Final = os.environ.get("BENCH_CONNECTIONS", "200")


def line_name(name: str, fsync: Fsync) -> str:
    """Return the name of a result line: the bench's own for `always`, with the policy for others."""
    return name if fsync == "always" else f"{name}[{fsync}]"


@dataclass(frozen=True, slots=True)
class System:
    """A database with both schemas, one node, and the topic `bench`."""

    runtime: Runtime
    route: Route
    redis_url: str

    @property
    def settings(self) -> Settings:
        """Its settings."""
        return self.runtime.settings

    @property
    def database(self) -> Database:
        """The one database, as control."""
        return self.runtime.control

    @property
    def dsn(self) -> str:
        """The database, control and application in one."""
        return self.settings.control_dsn()

    def partition_of(self, lp: int) -> PartitionId:
        """Return the partition that an LP is in."""
        return next(one.partition for one in self.route.ranges if one.lp_from <= lp < one.lp_to)

    def client(self) -> redis.Redis:
        """Return a plain client of the node, for baselines."""
        return redis.Redis.from_url(self.redis_url, protocol=2)


class Stage:
    """Servers in a directory of their own, started when they are asked for, gone at the end."""

    def __init__(self) -> None:
        self._cleanup = ExitStack()
        self._directory = Path(tempfile.mkdtemp(prefix="mqlayer-bench-"))
        self._directory.chmod(0o755)
        self._cleanup.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._postgres: PostgresServer | None = None
        self._redis: dict[tuple[Fsync, int], RedisServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    @property
    def postgres(self) -> PostgresServer:
        """A Postgres that waits for the disk."""
        if self._postgres is None:
            self._postgres = PostgresServer(self._directory / "postgres", options={"max_connections": CONNECTIONS})
            self._cleanup.callback(self._postgres.erase)
            self._postgres.start()
        return self._postgres

    def redis(self, fsync: Fsync = "always", number: int = 1) -> RedisServer:
        """A Redis with an append-only file and this policy; the settings that the promise needs."""
        if (fsync, number) not in self._redis:
            server = RedisServer(self._directory / f"redis-{fsync}-{number}", options={"appendfsync": fsync})
            self._cleanup.callback(server.erase)
            server.start()
            self._redis[fsync, number] = server
        return self._redis[fsync, number]

    def system(self, *, fsync: Fsync = "always", partitions: int = 1, nodes: int = 1, url: str = "") -> System:
        """Return a new, empty system on the stage's servers, which are flushed, or on an empty node at `url`."""
        dsn = self.postgres.create_database(f"bench_{uuid.uuid4().hex[:8]}")
        migrate(dsn)
        servers = [] if url else [self.redis(fsync, number) for number in range(1, nodes + 1)]
        urls = [url] if url else [server.url for server in servers]
        settings = Settings(dsn=SecretStr(dsn))
        database = Database(dsn, application="mqlayer bench")
        self._cleanup.callback(database.close)
        runtime = Runtime(database, settings, database, "bench")
        for server in servers:
            redis.Redis.from_url(server.url).flushall()
        for number, one in enumerate(urls, start=1):
            register_node(runtime, name=f"n{number}", url=one)
        route = create_topic(runtime, "bench", partitions=partitions)
        return System(runtime, route, urls[0])
