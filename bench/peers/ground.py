"""The ground that systems stand on during a run: servers, ports, a temporary directory, clients' environments."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import redis

import mqlayer
from bench.peers.packages import NodePackages, PythonPackages, cache_place, ran, unpacked_debian
from bench.peers.peer import Peer, PeerMissing
from bench.stage import Stage, System
from mqlayer.stack import PostgresServer, RedisServer
from mqlayer.stack.ports import free_port
from mqlayer.topics import create_topic

START_WITHIN_S: Final = 60.0


class Ground:
    """Lends servers; all end with the block."""

    def __init__(self, *, cache: Path | None = None) -> None:
        self.cache = cache or cache_place()
        self._cleanup = ExitStack()
        self._stage = self._cleanup.enter_context(Stage())
        self._directory = Path(tempfile.mkdtemp(prefix="mqlayer-peers-"))
        self._cleanup.callback(shutil.rmtree, self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def redis(self) -> RedisServer:
        """Return the Redis, which syncs its file before it answers."""
        return self._stage.redis("always")

    def emptied_redis(self) -> RedisServer:
        """Return the same without its data."""
        redis.Redis.from_url(self.redis().url).flushall()
        return self.redis()

    def postgres(self) -> PostgresServer:
        """Return the Postgres, whose commits wait for the disk."""
        return self._stage.postgres

    def new_database(self) -> str:
        """Return the address of a new database."""
        return self.postgres().create_database(f"peer_{uuid.uuid4().hex[:8]}")

    def mqlayer_system(self, topics: Sequence[str], partitions: int) -> System:
        """Return a system of mqlayer with these topics."""
        system = self._stage.system(partitions=partitions)
        for topic in topics:
            create_topic(system.runtime, topic, partitions=partitions)
        return system

    def pids(self, server: RedisServer | PostgresServer) -> tuple[int, ...]:
        """Return a server's main process."""
        return () if server.pid is None else (server.pid,)

    def directory(self, name: str) -> Path:
        """Return a new directory."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._directory))

    def free_port(self) -> int:
        """Return a free port."""
        return free_port()

    @contextmanager
    def running(
        self,
        command: Sequence[str | Path],
        port: int,
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a server that listens on a port, to the end of the block. Raises PeerMissing where it does not start."""
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                await_port(server, port)
                yield server
            finally:
                server.terminate()
                end(server)

    def packages(self, peer: Peer) -> PythonPackages:
        """Return the environment of a system's clients."""
        return PythonPackages(peer.name, peer.packages, self.cache)

    def node_packages(self, peer: Peer, packages: tuple[str, ...]) -> NodePackages:
        """Return the folder of npm's packages of a system's clients."""
        return NodePackages(peer.name, packages, self.cache)

    def python(self, peer: Peer) -> str | Path:
        """Return the interpreter of a system's clients."""
        return self.packages(peer).python if peer.packages else sys.executable

    def unpacked(self, peer: Peer, packages: tuple[str, ...]) -> Path:
        """Return the folder of Debian's packages of a system. Raises PeerMissing."""
        root = self.cache / peer.name / "debian"
        unpacked_debian(packages, root)
        return root

    def program(self, peer: Peer, name: str) -> Path | None:
        """Return a program that is in PATH or among a system's packages."""
        beside = self.packages(peer).programs / name
        if beside.exists():
            return beside
        found = shutil.which(name)
        return Path(found) if found else None

    def client_version(self, peer: Peer, package: str) -> str:
        """Return a package's name and version in a system's environment."""
        program = f"import importlib.metadata as m; print(m.version({package!r}))"
        return f"{package} {self.packages(peer).answer(program)}"

    def client_path(self, peer: Peer, program: str) -> Path:
        """Return the path that a short program prints in a system's environment."""
        return Path(self.packages(peer).answer(program))

    def version_of(self, program: Path, option: str) -> str:
        """Return what a program says of its version."""
        return ran([program, option]).splitlines()[0].strip()

    def mqlayer_version(self) -> str:
        """Return mqlayer's version."""
        return f"mqlayer {mqlayer.__version__}"

    def redis_version(self) -> str:
        """Return the version of the Redis."""
        return f"Redis {redis.Redis.from_url(self._stage.redis('always').url).info('server')['redis_version']}"

    def postgres_version(self) -> str:
        """Return the version of the Postgres."""
        import psycopg

        with psycopg.connect(self.postgres().dsn()) as connection:
            version = connection.info.server_version
        return f"Postgres {version // 10_000}.{version % 10_000}"


def await_port(server: subprocess.Popen[bytes], port: int) -> None:
    """Return once the server listens. Raises PeerMissing."""
    until = time.monotonic() + START_WITHIN_S
    while time.monotonic() < until and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise PeerMissing(f"its server did not start (exit code {server.poll()})")


def end(server: subprocess.Popen[bytes]) -> None:
    """Wait for a server that was told to end, then kill it."""
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
