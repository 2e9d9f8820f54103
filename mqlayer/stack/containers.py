"""Servers in Docker containers, each recorded in a directory. Stopping keeps their data."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from mqlayer.redis.acl import password_rule
from mqlayer.stack import processes
from mqlayer.stack.credentials import SUPERUSER, Login
from mqlayer.stack.databases import PostgresDatabases
from mqlayer.stack.errors import DirectoryRefused, ServerFailed
from mqlayer.stack.node_users import ALL_RIGHTS, DEFAULT_OFF, keeps_users
from mqlayer.stack.node_users import FILE_NAME as USERS
from mqlayer.stack.ports import free_port
from mqlayer.stack.postgres_server import DEFAULT_OPTIONS
from mqlayer.stack.private_files import closed_directory, write_closed
from mqlayer.stack.process_record import ProcessRecord
from mqlayer.stack.redis_server import DURABLE_OPTIONS, OPEN, answers_ping
from mqlayer.stack.wait import comes_true

REDIS_IMAGE: Final = "redis:8"
POSTGRES_IMAGE: Final = "postgres:18"
READY_WITHIN_S: Final = 120.0
LOGIN_VARIABLE: Final = "REDIS_PASSWORD"
WITH_PASSWORD: Final = f"""\
exec docker-entrypoint.sh redis-server - "$@" <<END
requirepass ${LOGIN_VARIABLE}
END
"""
"""By standard input: all accounts can read arguments."""
USER_VARIABLE: Final = "REDIS_USER"
HASH_VARIABLE: Final = "REDIS_PASSWORD_HASH"
WITH_USERS: Final = f"""\
umask 077
test -e /data/{USERS} || cat > /data/{USERS} <<END
{DEFAULT_OFF}
user ${USER_VARIABLE} on ${HASH_VARIABLE} {" ".join(ALL_RIGHTS)}
END
exec docker-entrypoint.sh redis-server "$@" --aclfile /data/{USERS}
"""


@cache
def docker_answers() -> bool:
    """Return whether testcontainers and an engine are available; cached."""
    return importlib.util.find_spec("testcontainers") is not None and engine_answers(_engine_socket())


def engine_answers(path: str) -> bool:
    """Return whether a Docker engine answers on a Unix socket."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(path)
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def _engine_socket() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")


class ServerContainer:
    """A container that belongs to a directory."""

    image: str
    inner_port: int

    def __init__(self, directory: Path, *, options: Mapping[str, str]) -> None:
        self.directory = directory
        self.options = options

    @property
    def name(self) -> str:
        """The container's name, from the directory's path."""
        path = hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:12]
        return f"mqlayer-{self.directory.name}-{path}"

    @property
    def port(self) -> int:
        """The port on 127.0.0.1, 0 before start."""
        return ProcessRecord.load(self.directory).port

    @property
    def pid(self) -> int | None:
        """None: only the engine knows the process."""
        return None

    @property
    def running(self) -> bool:
        """Whether the engine runs the container."""
        found = self._container()
        return found is not None and found.status == "running"

    @property
    def log(self) -> Path:
        """Output of a failed start."""
        return self.directory / "container.log"

    def start(self, *, within_s: float = READY_WITHIN_S) -> None:
        """Return when the server answers. Raises ServerFailed, DirectoryRefused."""
        closed_directory(self.directory)
        found = self._container()
        if found is None:
            self._create()
        elif not self._asks_for_login(found.attrs["Config"]["Env"]):
            raise DirectoryRefused(
                self.directory,
                f"container {self.name} asks for no password, or for another one: `mqlayer down --erase` removes the "
                "stack with its data; save first what you need",
            )
        elif found.status == "running":
            return
        else:
            found.start()
        comes_true(lambda: self._ready() or not self.running, within_s=within_s)
        if not self.running or not self._ready():
            self._give_up(within_s)

    def stop(self) -> None:
        """Stop the server; data stay."""
        if self.running:
            self._container().stop()

    def kill(self) -> None:
        """Kill the server."""
        if self.running:
            self._container().kill()

    def restart(self) -> None:
        """Restart: same port and data."""
        self.stop()
        self.start()

    def erase(self) -> None:
        """Remove the container with its data."""
        found = self._container()
        if found is not None:
            found.remove(force=True, v=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _create(self) -> None:
        from docker.errors import DockerException
        from testcontainers.core.config import testcontainers_config
        from testcontainers.core.container import DockerContainer

        # The reaper would remove the container at this process's end.
        testcontainers_config.ryuk_disabled = True
        port = free_port(self.port)
        container = DockerContainer(self.image, name=self.name, env=self._environment())
        # docker-py accepts (address, port); testcontainers' annotation lacks that.
        ports: dict[str, Any] = container.ports
        ports[f"{self.inner_port}/tcp"] = ("127.0.0.1", port)
        try:
            container.with_command(list(self._command())).start()
        except DockerException as error:
            write_closed(self.log, str(error).encode())
            raise ServerFailed(
                self.name,
                f"the engine has no image {self.image}, or can't start it: docker pull {self.image}",
                self.log,
            ) from error
        ProcessRecord(port, container=self.name).save(self.directory)

    def _container(self) -> Any:
        import docker

        client = docker.from_env()
        try:
            return client.containers.get(self.name)
        except docker.errors.NotFound:
            return None

    def _give_up(self, within_s: float) -> None:
        reason = f"was not ready within {within_s:g} s" if self.running else "ended at once"
        write_closed(self.log, self._container().logs(tail=200))
        raise ServerFailed(self.name, reason, self.log, processes.last_lines(self.log))

    def _ready(self) -> bool:
        raise NotImplementedError

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        raise NotImplementedError

    def _asks_for_login(self, environment: Sequence[str]) -> bool:
        return {f"{name}={value}" for name, value in self._environment().items()} <= set(environment)


class RedisContainer(ServerContainer):
    """A Redis in a container."""

    image = REDIS_IMAGE
    inner_port = 6379

    def __init__(self, directory: Path, *, options: Mapping[str, str] | None = None, login: Login = OPEN) -> None:
        super().__init__(directory, options={**DURABLE_OPTIONS, **(options or {})})
        self._login = login

    @property
    def url(self) -> str:
        """Address of database 0, password included."""
        return self._login.in_url(self.address)

    @property
    def address(self) -> str:
        """The address without the login."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _ready(self) -> bool:
        return answers_ping(self.port, self._login)

    def _command(self) -> Sequence[str]:
        pairs = ([f"--{name}", value] for name, value in self.options.items())
        options = [word for pair in pairs for word in pair]
        if keeps_users(self._login):
            return ["sh", "-c", WITH_USERS, "sh", *options]
        if not self._login.password:
            return ["redis-server", *options]
        return ["sh", "-c", WITH_PASSWORD, "sh", *options]

    def _environment(self) -> dict[str, str]:
        if keeps_users(self._login):
            return {USER_VARIABLE: self._login.user, HASH_VARIABLE: password_rule(self._login.password)}
        return {LOGIN_VARIABLE: self._login.password} if self._login.password else {}


class PostgresContainer(ServerContainer):
    """A Postgres in a container."""

    image = POSTGRES_IMAGE
    inner_port = 5432

    def __init__(self, directory: Path, *, options: Mapping[str, str] | None = None, password: str = "") -> None:
        super().__init__(directory, options={**DEFAULT_OPTIONS, "listen_addresses": "*", **(options or {})})
        self._login = Login(SUPERUSER, password)

    @property
    def databases(self) -> PostgresDatabases:
        """The server's databases."""
        return PostgresDatabases(self.dsn())

    def dsn(self, dbname: str = "postgres") -> str:
        """Return a database's DSN as superuser, password included."""
        password = f":{quote(self._login.password, safe='')}" if self._login.password else ""
        return f"postgresql://{SUPERUSER}{password}@127.0.0.1:{self.port}/{dbname}"

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database; return its DSN."""
        return self.databases.create_database(name, template=template)

    def drop_database(self, name: str) -> None:
        """Force-drop a database, if it exists."""
        self.databases.drop_database(name)

    def has_database(self, name: str) -> bool:
        """Return whether the database exists."""
        return self.databases.has_database(name)

    def _ready(self) -> bool:
        return self.databases.answers()

    def _command(self) -> Sequence[str]:
        pairs = (["-c", f"{name}={value}"] for name, value in self.options.items())
        return ["postgres", *(word for pair in pairs for word in pair)]

    def _environment(self) -> dict[str, str]:
        if not self._login.password:
            return {"POSTGRES_HOST_AUTH_METHOD": "trust"}
        return {"POSTGRES_PASSWORD": self._login.password, "POSTGRES_INITDB_ARGS": "--auth=scram-sha-256"}
