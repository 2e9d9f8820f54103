"""A local Redis or Valkey process with durable settings."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mqlayer.stack import processes
from mqlayer.stack.credentials import REDIS_DEFAULT_USER, Login
from mqlayer.stack.node_users import FILE_NAME as USERS
from mqlayer.stack.node_users import holds, keeps_users, write_first_users
from mqlayer.stack.ports import free_port, is_free
from mqlayer.stack.private_files import closed_tree, write_closed
from mqlayer.stack.process_record import ProcessRecord
from mqlayer.stack.server_process import ServerProcess
from mqlayer.stack.server_programs import RedisProgram, best_redis
from mqlayer.stack.wait import comes_true

START_TRIES: Final = 3
OPEN: Final = Login(REDIS_DEFAULT_USER)

# Answered writes are on disk, also during a rewrite; nothing is evicted.
DURABLE_OPTIONS: Final[Mapping[str, str]] = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
    "save": "",
}


class RedisServer(ServerProcess):
    """A Redis. A login as another user turns `default` off."""

    log_name = "redis.log"

    def __init__(
        self,
        directory: Path,
        *,
        program: RedisProgram | None = None,
        port: int = 0,
        options: Mapping[str, str] | None = None,
        login: Login = OPEN,
    ) -> None:
        self.program = program or best_redis()
        super().__init__(directory, self.program)
        self.options = {**DURABLE_OPTIONS, **(options or {})}
        self._wanted_port, self._login = port, login

    @property
    def url(self) -> str:
        """Address of database 0, password included."""
        return self._login.in_url(self.address)

    @property
    def address(self) -> str:
        """The address without the login."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *, within_s: float = 30.0) -> None:
        """Return when the server answers, on its last port if free. Raises ServerFailed."""
        if self.running and not self._asks_for_login():
            self.stop()
        if not self.running:
            closed_tree(self.directory)
            self._start(within_s)

    def stop(self) -> None:
        """Stop the server; data are on disk."""
        self._end(signal.SIGTERM)

    def erase(self) -> None:
        """Kill the server and remove its data."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, within_s: float) -> None:
        """Retry if another process takes the port."""
        wanted = self._record.port or self._wanted_port
        for _ in range(START_TRIES):
            self._launch(free_port(wanted))
            comes_true(lambda: self._answers() or not self.running, within_s=within_s)
            if self.running and self._answers():
                return
            if self.running or "Address already in use" not in processes.last_lines(self.log):
                break
            if is_free(self.port):
                # In cluster mode the bus port, 10,000 above, was taken: another pair is needed.
                wanted = 0
        self._give_up(within_s)

    def _launch(self, port: int) -> None:
        if keeps_users(self._login) and not holds(self._users_file, self._login):
            write_first_users(self._users_file, self._login)
        write_closed(self._configuration_file, self._configuration(port).encode())
        process = processes.spawn([self.program.path, self._configuration_file.resolve()], log=self.log)
        ProcessRecord(port, process).save(self.directory)

    def _configuration(self, port: int) -> str:
        fixed = {"bind": "127.0.0.1", "port": str(port), "dir": str(self.directory.resolve())}
        lines = (f"{name} {_quoted(value)}\n" for name, value in {**fixed, **self.options}.items())
        return "".join([*lines, *self._login_lines()])

    def _login_lines(self) -> list[str]:
        if keeps_users(self._login):
            return [f"aclfile {_quoted(str(self._users_file.resolve()))}\n"]
        return [f"requirepass {_quoted(self._login.password)}\n"] if self._login.password else []

    def _asks_for_login(self) -> bool:
        if keeps_users(self._login) and not holds(self._users_file, self._login):
            return False
        return not self._login.password or self._configuration_file.read_text().endswith("".join(self._login_lines()))

    @property
    def _configuration_file(self) -> Path:
        return self.directory / "redis.conf"

    @property
    def _users_file(self) -> Path:
        return self.directory / USERS

    def _answers(self) -> bool:
        return answers_ping(self.port, self._login)


def answers_ping(port: int, login: Login = OPEN) -> bool:
    """Return whether a Redis is ready. NOAUTH counts, so pass the password."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            if login.password:
                connection.sendall(_request("AUTH", login.user, login.password))
                if not connection.recv(256).startswith(b"+OK"):
                    return False
            connection.sendall(_request("PING"))
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def _request(*words: str) -> bytes:
    encoded = (word.encode() for word in words)
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)


def _quoted(value: str) -> str:
    if value and not set(value) & {'"', "'", "\\"} and not value.startswith("/"):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
