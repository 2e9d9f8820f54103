"""The local stack in one directory: servers, a relay, a Celery worker.

```text
.mqlayer/
  stack.json        addresses
  env               variables for an operator's shell
  publisher.env …   the same for publisher, consumer, viewer
  credentials.json  passwords per kind of process
  postgres/ node-1/ … broker/ relay/ worker/
```

Files have mode 0600, directories 0700.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from psycopg import sql

from mqlayer.domain.routing import NodeId
from mqlayer.errors import InvalidInput, StoreUnavailable
from mqlayer.postgres.database import Database, connect, driver_errors
from mqlayer.postgres.dsn import address_of
from mqlayer.postgres.migrations import migrate
from mqlayer.postgres.rights import SCHEMAS, Right, ensure_login, grant, grants
from mqlayer.redis.access import acting_as
from mqlayer.redis.acl import acl_rules, password_rule
from mqlayer.redis.addresses import display_broker_url, display_url
from mqlayer.redis.node_connection import Node, NodeConnection, raise_for_reply
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.stack.accounts import unprivileged_account
from mqlayer.stack.addresses import Addresses, GivenAddresses
from mqlayer.stack.background_process import BackgroundProcess
from mqlayer.stack.credentials import (
    BROKER_KINDS,
    NODE_ROLES,
    REDIS_DEFAULT_USER,
    Login,
    ProcessKind,
    StackCredentials,
)
from mqlayer.stack.credentials import FILE_NAME as CREDENTIALS
from mqlayer.stack.databases import PostgresDatabases
from mqlayer.stack.errors import StackError
from mqlayer.stack.node_users import CELERY_RIGHTS
from mqlayer.stack.private_files import open_closed, own_directory, write_closed
from mqlayer.stack.server_choice import AnyPostgres, AnyRedis, postgres_for, redis_for
from mqlayer.stack.stack_file import FILE_NAME as CONTENTS
from mqlayer.stack.stack_file import StackFile
from mqlayer.topics import list_nodes, rearm_node, register_node, set_node_address

DEFAULT_DIRECTORY: Final = Path(".mqlayer")
DEFAULT_NODE_COUNT: Final = 2
LOCK: Final = "lock"
ENVIRONMENT: Final = "env"
DATABASE: Final = "mqlayer"
DEFAULT_KEY_PREFIX: Final = "mq"

RIGHTS: Final[dict[ProcessKind, tuple[Right, ...]]] = {
    # As on the nodes: commands, and programs that use the addresses of `env`.
    "operator": tuple(right for right in Right if right is not Right.MIGRATE),
    "relay": (Right.RELAY,),
    "worker": (Right.WORK,),
    "consumer": (Right.CONSUME,),
    "publisher": (Right.PUBLISH,),
    "viewer": (Right.VIEW,),
}
USER_KINDS: Final[tuple[ProcessKind, ...]] = ("publisher", "consumer", "viewer")
"""Kinds that people start, each with a variables file."""
# Long enough for a debugger; a hanging transaction blocks an LP.
IDLE_LIMIT: Final = "ALTER ROLE {} SET idle_in_transaction_session_timeout = '10min'"
SEES_TRANSACTIONS: Final[tuple[ProcessKind, ...]] = ("operator", "worker", "viewer")
"""Kinds that look for open transactions of others: console, note_problems, exporter."""
TABLES_OF_ONES_OWN: Final = (
    "GRANT CREATE ON SCHEMA public TO {0}; GRANT ALL ON ALL TABLES IN SCHEMA public TO {0}; "
    "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {0}"
)
"""Programs create tables; those of earlier versions belong to the superuser."""

ComponentState = Literal["running", "stopped", "not reached"]
Component = AnyPostgres | AnyRedis | BackgroundProcess


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """State of one part; the address hides passwords."""

    name: str
    address: str
    state: ComponentState
    pid: int | None
    log: Path | None


class Stack:
    """The stack of one directory, usable from any process."""

    def __init__(
        self,
        directory: Path = DEFAULT_DIRECTORY,
        *,
        node_count: int | None = None,
        given: GivenAddresses | None = None,
        postgres_options: Mapping[str, str] | None = None,
        key_prefix: str = DEFAULT_KEY_PREFIX,
        allow_unsafe_redis: bool = False,
    ) -> None:
        self.directory = directory.resolve()
        self._key_prefix = key_prefix
        self._unsafe = allow_unsafe_redis
        self._node_count = node_count
        self._postgres_options = postgres_options
        self._given = given or GivenAddresses()
        self._loaded: StackCredentials | None = None

    def up(self, *, servers_only: bool = False) -> Addresses:
        """Start stopped parts, migrate, register and arm nodes; return the addresses.

        Raises InvalidInput for an impossible `node_count`, StackError during another `up` or `down`.
        """
        own_directory(self.directory, traversed_by=unprivileged_account())
        with _locked(self.directory):
            addresses = self._start_servers()
            migrate(self.owner_dsn())
            self._make_roles(self.owner_dsn())
            self._give_users(addresses)
            with acting_as(addresses.node_access):
                self._register_nodes(addresses)
            if not servers_only:
                self._start_processes()
            return addresses

    def down(self) -> None:
        """Stop worker, relay and own servers; data stay."""
        if not self.directory.exists():
            return
        with _locked(self.directory):
            for component in (*self._processes(), *self._own_servers()):
                component.stop()

    def erase(self) -> None:
        """Stop the stack and remove its data only."""
        if not self.directory.exists():
            return
        with _locked(self.directory):
            for component in (*self._processes(), *self._own_servers()):
                component.erase()
            for name in (CONTENTS, CREDENTIALS, ENVIRONMENT, LOCK, *map(_variables_of, USER_KINDS)):
                (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def addresses(self) -> Addresses | None:
        """Return the addresses; None before `up`."""
        contents = StackFile.load(self.directory)
        return contents.addresses if contents else None

    def status(self) -> list[ComponentStatus]:
        """Return the state of all parts; [] before `up`."""
        contents = StackFile.load(self.directory)
        if contents is None:
            return []
        servers = [self._server_status(name, contents) for name in contents.names()]
        processes = [_own_status(process, "") for process in self._processes() if process.directory.exists()]
        return servers + processes

    def owner_dsn(self) -> str:
        """Return the DSN for schema, role and right changes; "" before `up`."""
        contents = StackFile.load(self.directory)
        return contents.addresses_for(self._credentials.of("owner")).dsn if contents else ""

    @property
    def environment_file(self) -> Path:
        """Operator's shell variables, for `source`."""
        return self.directory / ENVIRONMENT

    @property
    def files_of_kinds(self) -> list[Path]:
        """Shell variables per kind, where the stack runs servers."""
        return [self.directory / _variables_of(kind) for kind in USER_KINDS]

    def _start_servers(self) -> Addresses:
        previous = StackFile.load(self.directory)
        given = previous.truly_given(self._given) if previous else self._given
        if not given.complete:
            self._loaded = StackCredentials.load_or_make(self.directory)
        nodes = self._start_nodes(given, len(previous.addresses.nodes) if previous else 0)
        addresses = Addresses(
            dsn=given.dsn or self._credentials.of("operator").postgres.in_dsn(self._start_postgres()),
            nodes=nodes,
            broker_url=given.broker_url
            or self._credentials.of("operator").broker.in_url(self._start_redis("broker").address),
            node_login=Login(REDIS_DEFAULT_USER) if given.redis_urls else self._credentials.of("operator").node,
        )
        contents = StackFile(addresses, given=given.names(nodes))
        contents.save(self.directory)
        write_closed(self.environment_file, addresses.exports().encode())
        for kind in () if given.complete else USER_KINDS:
            exports = _addresses_of(kind, contents, self._credentials).exports()
            write_closed(self.directory / _variables_of(kind), exports.encode())
        return addresses

    def _make_roles(self, dsn: str) -> None:
        contents = StackFile.load(self.directory)
        if contents is None or "postgres" in contents.given:
            return
        for kind in RIGHTS:
            login = self._credentials.of(kind).postgres
            # Tests of programs make databases of their own.
            ensure_login(dsn, login.user, login.password, makes_databases=kind == "operator")
        for schema in SCHEMAS:
            there = {(grant.role, grant.right) for grant in grants(dsn, schema)}
            wanted = {(self._credentials.of(kind).postgres.user, right) for kind in RIGHTS for right in RIGHTS[kind]}
            for role, right in sorted(wanted - there):
                grant(dsn, schema, role, right)
        with connect(dsn, application="mqlayer up") as connection, driver_errors(address_of(dsn)):
            connection.execute(sql.SQL(TABLES_OF_ONES_OWN).format(sql.Identifier(self._operator)))
            for kind in SEES_TRANSACTIONS:
                login = self._credentials.of(kind).postgres
                connection.execute(sql.SQL("GRANT pg_read_all_stats TO {}").format(sql.Identifier(login.user)))
            for kind in ("operator", "publisher"):
                login = self._credentials.of(kind).postgres
                connection.execute(sql.SQL(IDLE_LIMIT).format(sql.Identifier(login.user)))

    @property
    def _operator(self) -> str:
        return self._credentials.of("operator").postgres.user

    @property
    def _credentials(self) -> StackCredentials:
        if self._loaded is None:
            self._loaded = StackCredentials.load(self.directory)
        return self._loaded

    def _start_postgres(self) -> str:
        server = self._postgres()
        server.start()
        if not server.has_database(DATABASE):
            server.create_database(DATABASE)
        return server.dsn(DATABASE)

    def _start_nodes(self, given: GivenAddresses, known_count: int) -> dict[str, str]:
        wanted, count = self._node_count, len(given.redis_urls) or known_count
        if wanted is not None and (wanted < count or (given.redis_urls and wanted != count)):
            # A registered node may hold messages.
            why = "as MQLAYER_REDIS_URL says" if given.redis_urls else "and none of them goes"
            raise InvalidInput(f"the stack in {self.directory} has {count} nodes, {why}: leave --nodes {wanted} out")
        if given.redis_urls:
            return {f"node-{number}": url for number, url in enumerate(given.redis_urls, start=1)}
        names = [f"node-{number}" for number in range(1, (wanted or count or DEFAULT_NODE_COUNT) + 1)]
        return {name: self._start_redis(name).address for name in names}

    def _start_redis(self, name: str) -> AnyRedis:
        server = self._redis(name)
        server.start()
        return server

    def _register_nodes(self, addresses: Addresses) -> None:
        """A restart changes the run id."""
        contents = StackFile.load(self.directory)
        given = contents.given if contents else ()
        settings = Settings(key_prefix=self._key_prefix, allow_unsafe_redis=self._unsafe)
        with Database(addresses.dsn, application="mqlayer up") as database:
            runtime = Runtime(database, settings, actor="up")
            known = {node.name: node.url for node in list_nodes(database)}
            for name, url in addresses.nodes.items():
                if name in known and known[name] != url and name not in given:
                    # An own server, now on another port.
                    set_node_address(runtime, name, url)
                register_node(runtime, name=name, url=url)
                rearm_node(runtime, name)

    def _give_users(self, addresses: Addresses) -> None:
        contents, of = StackFile.load(self.directory), self._credentials.of
        if addresses.node_access is not None:
            for name, url in addresses.nodes.items():
                _set_users(
                    Node(NodeId(0), name, url, None),
                    of("owner").node,
                    lambda version: [
                        (of(kind).node, acl_rules(roles, prefix=self._key_prefix, version=version))
                        for kind, roles in NODE_ROLES.items()
                    ],
                )
        if contents is not None and "broker" not in contents.given:
            broker = Node(NodeId(0), "broker", self._redis("broker").address, None)
            users = [(of(kind).broker, CELERY_RIGHTS) for kind in BROKER_KINDS]
            _set_users(broker, of("owner").broker, lambda _: users)

    def environment(self, kind: ProcessKind) -> dict[str, str]:
        """Return a kind's environment variables; {} before `up`."""
        contents = StackFile.load(self.directory)
        return _addresses_of(kind, contents, self._credentials).environment() if contents else {}

    def _start_processes(self) -> None:
        """In parallel: imports take seconds."""
        with ThreadPoolExecutor() as pool:
            for started in [pool.submit(process.start) for process in self._processes()]:
                started.result()

    def _processes(self) -> tuple[BackgroundProcess, ...]:
        worker, relay = self.environment("worker"), self.environment("relay")
        return (_worker(self.directory, worker), _relay(self.directory, relay))

    def _own_servers(self) -> Iterator[Component]:
        """Also those of a failed `up`."""
        for place in sorted(path for path in self.directory.iterdir() if path.is_dir()):
            if place.name == "postgres":
                yield self._postgres()
            elif place.name == "broker" or place.name.startswith("node-"):
                yield self._redis(place.name)

    def _postgres(self) -> AnyPostgres:
        password = self._credentials.of("owner").postgres.password
        return postgres_for(self.directory / "postgres", options=self._postgres_options, password=password)

    def _redis(self, name: str) -> AnyRedis:
        logins = self._credentials.of("owner")
        return redis_for(self.directory / name, login=logins.broker if name == "broker" else logins.node)

    def _server_status(self, name: str, contents: StackFile) -> ComponentStatus:
        address = contents.address(name)
        if name in contents.given:
            state: ComponentState = "running" if _answers(name, address) else "not reached"
            return ComponentStatus(name, _display(name, address), state, None, None)
        server = self._postgres() if name == "postgres" else self._redis(name)
        return _own_status(server, _display(name, address))


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with open(directory / LOCK, "w", opener=open_closed) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"{directory}: another `up` or `down` is at work; wait for it to end") from None
        yield


def _set_users(
    node: Node, admin: Login, users: Callable[[tuple[int, int, int]], Sequence[tuple[Login, Sequence[str]]]]
) -> None:
    with acting_as(admin.access), NodeConnection(node, any_run=True, unsafe=True) as line:
        commands = [
            ("ACL", "SETUSER", login.user, "reset", "on", password_rule(login.password), *rules)
            for login, rules in users(line.connect().version)
        ]
        for reply in line.call([*commands, ("ACL", "SAVE")]):
            raise_for_reply(reply, node.url)


def _addresses_of(kind: ProcessKind, contents: StackFile, credentials: StackCredentials) -> Addresses:
    found = contents.addresses_for(credentials.of(kind))
    return found if kind in BROKER_KINDS else replace(found, broker_url="")


def _variables_of(kind: ProcessKind) -> str:
    return f"{kind}.env"


def _relay(directory: Path, environment: Mapping[str, str]) -> BackgroundProcess:
    return BackgroundProcess(directory / "relay", ("-m", "mqlayer", "relay"), environment, ready_line="relay_started")


def _worker(directory: Path, environment: Mapping[str, str]) -> BackgroundProcess:
    schedule = directory / "worker" / "schedule"
    arguments = ["-m", "celery", "-A", "mqlayer.workers.app", "worker", "--beat", "--schedule", str(schedule)]
    arguments += ["--loglevel", "INFO", "--concurrency", "2", "--without-gossip", "--without-mingle"]
    return BackgroundProcess(directory / "worker", arguments, environment, ready_line=" ready.")


def _display(name: str, address: str) -> str:
    show = {"postgres": address_of, "broker": display_broker_url}.get(name, display_url)
    return show(address)


def _answers(name: str, address: str) -> bool:
    if name == "postgres":
        return PostgresDatabases(address).answers()
    try:
        with NodeConnection(Node(NodeId(0), name, address, None), any_run=True, unsafe=True) as line:
            line.connect()
    except (StoreUnavailable, InvalidInput):
        return False
    return True


def _own_status(component: Component, address: str) -> ComponentStatus:
    state: ComponentState = "running" if component.running else "stopped"
    return ComponentStatus(component.directory.name, address, state, component.pid, component.log)
