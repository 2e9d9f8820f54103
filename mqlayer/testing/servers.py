"""Servers of one test process. They end with it, also where it is killed.

```text
mqlayer-pytest-XXXXXXXX/
  process.json        the test process
  postgres/ node-1/ node-2/
```

A small process beside the test process waits for its end, and removes its leftovers; so does the next test process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, LiteralString, Self

import psycopg
import redis
from psycopg import sql

from mqlayer.errors import InvalidInput
from mqlayer.postgres.migrations import migrate_for_tests
from mqlayer.stack import AnyPostgres, AnyRedis, GivenAddresses, PostgresDatabases, postgres_for, processes, redis_for
from mqlayer.stack.process_record import FILE_NAME as RECORD
from mqlayer.stack.process_record import ProcessRecord
from mqlayer.stack.shared_memory import release_shared_memory
from mqlayer.testing.databases import database_rights

DIRECTORY_PREFIX: Final = "mqlayer-pytest-"
DATABASE_PREFIX: Final = "mqlayer_test_"
# As with any place for temporary files, what is made there is ours alone.
MEMORY: Final = Path("/dev/shm")  # noqa: S108
MEMORY_NEEDED_BYTES: Final = 2 * 1024**3
NODES: Final = ("node-1", "node-2")
# Tests judge what Postgres does, not the disk; each of many sessions would load the functions' language.
FAST_POSTGRES: Final[Mapping[str, str]] = {
    "fsync": "off",
    "dynamic_shared_memory_type": "mmap",
    "shared_preload_libraries": "plpgsql",
}
LOCKS: Final = 0x6D71 << 32
"""Advisory locks of test processes, by run."""
GUARD: Final = """
import sys
from pathlib import Path
sys.stdin.read()
if Path(sys.argv[1]).exists():
    from mqlayer.testing.servers import end_servers
    end_servers(Path(sys.argv[1]))
"""


def best_place() -> Path:
    """Return where servers' data belong: in memory where there is enough, since tests cut no power."""
    with contextlib.suppress(OSError):
        if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED_BYTES:
            return MEMORY
    return Path(tempfile.gettempdir())


def end_left_servers(prefix: str, end: Callable[[Path], None]) -> None:
    """Call `end` with each directory of this account whose process is gone."""
    places = {MEMORY, Path(tempfile.gettempdir())}
    for directory in itertools.chain.from_iterable(place.glob(f"{prefix}*") for place in places):
        # Another process may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            ours = directory.stat().st_uid == os.getuid() and (directory / RECORD).exists()
            if ours and not ProcessRecord.load(directory).running:
                end(directory)


def remove_data(directory: Path) -> None:
    """Remove a directory, and the shared memory of killed servers in it."""
    for file in directory.rglob("postmaster.pid"):
        release_shared_memory(file.parent)
    shutil.rmtree(directory, ignore_errors=True)


def end_servers(directory: Path) -> None:
    """Kill a test process's servers and remove their data."""
    if (directory / "postgres").exists():
        postgres_for(directory / "postgres").erase()
    for name in NODES:
        if (directory / name).exists():
            redis_for(directory / name).erase()
    remove_data(directory)


class TestServers:
    """A test process's Postgres and nodes, and its databases; `prepare` makes the application's tables."""

    __test__ = False

    def __init__(self, prepare: Callable[[str], None] = lambda _: None, *, given: GivenAddresses | None = None) -> None:
        given = given or GivenAddresses.from_environment()
        self._prepare, self._urls = prepare, given.redis_urls
        self._given_postgres = PostgresDatabases(given.dsn) if given.dsn else None
        self._postgres: AnyPostgres | PostgresDatabases | None = None
        self._nodes: dict[str, AnyRedis] = {}
        self._directory: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._run, self._numbers, self._template = secrets.token_hex(4), itertools.count(1), ""
        self._session: psycopg.Connection[tuple[object, ...]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def urls(self) -> dict[str, str]:
        """The nodes' addresses by name; stopped ones start."""
        if self._urls:
            return {f"node-{number}": url for number, url in enumerate(self._urls, start=1)}
        for name in NODES:
            if name not in self._nodes:
                self._nodes[name] = redis_for(self.directory / name)
            self._nodes[name].start()
        return {name: node.url for name, node in self._nodes.items()}

    @property
    def own_nodes(self) -> bool:
        """Whether tests may stop the nodes."""
        return not self._urls

    def node(self, name: str) -> AnyRedis:
        """Return a node's server. Raises InvalidInput where it is given, or unknown."""
        if not self.own_nodes:
            raise InvalidInput("a node of MQLAYER_REDIS_URL is not ours to stop: leave that variable out")
        if name not in self.urls:
            raise InvalidInput(f"no node is called {name!r}: there are {', '.join(NODES)}")
        return self._nodes[name]

    @property
    def directory(self) -> Path:
        """The servers' directory, made at first use."""
        if self._directory is None:
            end_left_servers(DIRECTORY_PREFIX, end_servers)
            self._directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=best_place()))
            # Postgres may run under another account.
            self._directory.chmod(0o755)
            ProcessRecord(process=processes.identify(os.getpid())).save(self._directory)
            self._guard = _start_guard(self._directory)
        return self._directory

    @contextlib.contextmanager
    def database(self) -> Iterator[tuple[str, str]]:
        """Lend a new migrated database and a key prefix; both are removed."""
        if not self._template:
            self._template = self._make_template()
        name = f"{DATABASE_PREFIX}{self._run}_{next(self._numbers)}"
        self._execute("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy", name, self._template)
        try:
            yield self._server.dsn(name), _key_prefix(name)
        finally:
            self._remove(name)

    def close(self) -> None:
        """Remove databases and own servers."""
        if self._session is not None:
            if self._template and self._given_postgres:
                self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", self._template)
            self._session.close()
        if self._directory is not None:
            end_servers(self._directory)
        if self._guard is not None:
            self._guard.communicate()

    @property
    def _server(self) -> AnyPostgres | PostgresDatabases:
        if self._postgres is None:
            self._postgres = self._given_postgres or self._own_postgres()
        return self._postgres

    def _own_postgres(self) -> AnyPostgres:
        server = postgres_for(self.directory / "postgres", options=FAST_POSTGRES)
        server.start()
        return server

    def _make_template(self) -> str:
        if self._given_postgres:
            self._remove_left()
        name = f"{DATABASE_PREFIX}{self._run}_0"
        self._execute("CREATE DATABASE {}", name)
        migrate_for_tests(self._server.dsn(name))
        self._prepare(self._server.dsn(name))
        return name

    def _remove_left(self) -> None:
        """Remove the databases of test processes that were killed: their locks are free."""
        rows = self._connected().execute(
            "SELECT datname FROM pg_database WHERE datname ~ %s AND pg_has_role(datdba, 'USAGE')",
            [f"^{DATABASE_PREFIX}[0-9a-f]{{8}}_[0-9]+$"],
        )
        for (name,) in rows.fetchall():
            lock = _lock_of(str(name).removeprefix(DATABASE_PREFIX).split("_")[0])
            row = self._connected().execute("SELECT pg_try_advisory_lock(%s)", [lock]).fetchone()
            if row == (True,):
                self._remove(str(name))
                self._connected().execute("SELECT pg_advisory_unlock(%s)", [lock])

    def _remove(self, name: str) -> None:
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)
        for url in self.urls.values():
            with redis.Redis.from_url(url) as client:
                keys = [*client.scan_iter(f"{_key_prefix(name)}:*", count=1_000)]
                for at in range(0, len(keys), 500):
                    client.unlink(*keys[at : at + 500])

    def _execute(self, statement: LiteralString, *names: str) -> None:
        query = sql.SQL(statement).format(*map(sql.Identifier, names))
        with database_rights(self._server.dsn("postgres")):
            try:
                self._connected().execute(query)
            except psycopg.OperationalError:
                # A test ended every session of the server.
                self._connected().execute(query)

    def _connected(self) -> psycopg.Connection[tuple[object, ...]]:
        if self._session is None or self._session.closed:
            self._session = psycopg.connect(self._server.dsn("postgres"), autocommit=True)
            self._session.execute("SELECT pg_advisory_lock(%s)", [_lock_of(self._run)])
        return self._session


def _lock_of(run: str) -> int:
    return LOCKS + int(run, 16)


def _key_prefix(database: str) -> str:
    return database.replace(DATABASE_PREFIX, "t")


def _start_guard(directory: Path) -> subprocess.Popen[bytes]:
    """It hears of this process's end by the end of its input."""
    command: Sequence[str] = [sys.executable, "-c", GUARD, str(directory)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # In a session of its own: Ctrl+C in a terminal reaches all processes of one.
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=environment, cwd="/", start_new_session=True,
    )  # fmt: skip
