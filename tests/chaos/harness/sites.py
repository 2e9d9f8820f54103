"""The servers of a run, each behind a proxy, so that its address stays whatever is done to it and to its lines."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import redis
from psycopg.conninfo import make_conninfo

from mqlayer.stack import PostgresServer, RedisServer
from tests.fixtures.power import PoweredRedis
from tests.proof.proxy import TcpProxy

NOTE_EVERY_S: Final = 0.1
POSTGRES_OPTIONS: Final = {"max_connections": "300", "max_wal_size": "256MB"}


class Site:
    """A server and the proxy in front of it."""

    name: str
    proxy: TcpProxy

    def kill(self) -> None:
        """End the server without warning, and start it again with what it has on disk."""
        raise NotImplementedError


class NodeSite(Site):
    """A Redis that is durable at once."""

    def __init__(self, directory: Path, name: str, cleanup: ExitStack, server: RedisServer | None = None) -> None:
        self.name = name
        self.server = server or RedisServer(directory / name)
        self.server.start()
        cleanup.callback(self.server.erase)
        self.proxy = cleanup.enter_context(TcpProxy("127.0.0.1", self.server.port))

    @property
    def url(self) -> str:
        """The address for everybody."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    def client(self) -> redis.Redis:
        """Return a client past the proxy."""
        return redis.Redis.from_url(self.server.url)

    def kill(self) -> None:
        """Crash it, and start it again."""
        self.server.kill()
        self.server.start()
        self.proxy.aim("127.0.0.1", self.server.port)


class PowerSite(NodeSite):
    """A Redis that syncs every second, whose power can be cut."""

    def __init__(self, directory: Path, name: str, cleanup: ExitStack, noter: Path) -> None:
        self._powered = PoweredRedis(directory / name, options={"appendfsync": "everysec"})
        self._powered.library = noter
        super().__init__(directory, name, cleanup, self._powered)

    def cut_power(self, rng: random.Random) -> None:
        """Crash it with what was not synced lost, or with a part of that, and start it again."""
        self._powered.cut_power(rng if rng.random() < 0.5 else None)
        self.server.start()
        self.proxy.aim("127.0.0.1", self.server.port)


class PairSite(NodeSite):
    """A primary with a replica that lags when it is made the primary; the old primary lives on for a moment."""

    def __init__(self, directory: Path, name: str, cleanup: ExitStack) -> None:
        super().__init__(directory, name, cleanup)
        self._other = RedisServer(directory / f"{name}-b")
        self._other.start()
        cleanup.callback(self._other.erase)
        self._links = {
            server.port: cleanup.enter_context(TcpProxy("127.0.0.1", server.port))
            for server in (self.server, self._other)
        }
        self._follow()

    def fail_over(self, *, lag_s: float, overlap_s: float, meanwhile: Callable[[], None]) -> bool:
        """Make the replica the primary though it lacks what came in the last moments; say whether it could be.

        For `overlap_s` those who have a connection to the old primary go on with it, and others are at work on the new
        one: what is settled then may come again, even before it is over. So `meanwhile` is called all the time.
        """
        if not self._is_synced():
            return False
        link = self._links[self.server.port]
        link.blackhole()
        time.sleep(lag_s)
        old, new = self.server, self._other
        redis.Redis.from_url(new.url).replicaof("NO", "ONE")
        self.server, self._other = new, old
        self.proxy.aim("127.0.0.1", new.port)
        until = time.monotonic() + overlap_s
        while (left_s := until - time.monotonic()) > 0:
            meanwhile()
            time.sleep(min(left_s, NOTE_EVERY_S))
        self.proxy.reset_all()
        link.reset_all()
        link.heal()
        self._follow()
        return True

    def _follow(self) -> None:
        link = self._links[self.server.port]
        client: Any = redis.Redis.from_url(self._other.url)
        client.replicaof(link.host, link.port)

    def _is_synced(self) -> bool:
        info: Any = redis.Redis.from_url(self._other.url).info("replication")
        return bool(info.get("master_link_status") == "up")


class DatabaseSite(Site):
    """The Postgres of everything."""

    def __init__(self, directory: Path, cleanup: ExitStack) -> None:
        self.name = "postgres"
        self.server = PostgresServer(directory / "postgres", options=POSTGRES_OPTIONS)
        self.server.start()
        cleanup.callback(self.server.erase)
        self.direct_dsn = self.server.create_database("chaos")
        self.proxy = cleanup.enter_context(TcpProxy("127.0.0.1", self.server.port))

    @property
    def dsn(self) -> str:
        """The address for everybody."""
        return make_conninfo(self.direct_dsn, host="127.0.0.1", port=self.proxy.port)

    def kill(self) -> None:
        """Crash the postmaster, and start it again."""
        self.server.kill()
        self.server.start()
        self.proxy.aim("127.0.0.1", self.server.port)
