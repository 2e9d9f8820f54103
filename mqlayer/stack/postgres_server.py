"""A local Postgres server process."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from mqlayer.stack import processes
from mqlayer.stack.accounts import chown, run_as, unprivileged_account
from mqlayer.stack.credentials import SUPERUSER, Login
from mqlayer.stack.databases import PostgresDatabases
from mqlayer.stack.errors import DirectoryRefused, ServerFailed
from mqlayer.stack.password_guard import PasswordGuard
from mqlayer.stack.ports import free_port
from mqlayer.stack.private_files import closed_directory, write_closed
from mqlayer.stack.process_record import ProcessRecord
from mqlayer.stack.server_paths import data_place, program_place
from mqlayer.stack.server_process import ServerProcess
from mqlayer.stack.server_programs import PostgresPrograms, best_postgres, postgres_programs
from mqlayer.stack.shared_memory import release_shared_memory
from mqlayer.stack.wait import comes_true

START_TRIES: Final = 3
# A socket's path has to fit into sockaddr_un: 108 bytes on Linux, 104 elsewhere.
SOCKET_PATH_LIMIT: Final = 80

DEFAULT_OPTIONS: Final[Mapping[str, str]] = {
    "fsync": "on",
    "listen_addresses": "127.0.0.1",
    "log_timezone": "UTC",
    "max_connections": "200",
    "timezone": "UTC",
}


class PostgresServer(ServerProcess):
    """A Postgres. Without a password, all local clients are trusted."""

    log_name = "postgres.log"

    def __init__(
        self,
        directory: Path,
        *,
        programs: PostgresPrograms | None = None,
        port: int = 0,
        options: Mapping[str, str] | None = None,
        password: str = "",
    ) -> None:
        self.options = {**DEFAULT_OPTIONS, **(options or {})}
        self._account = unprivileged_account()
        self._home = data_place(directory, self._account)
        self.programs = programs or _programs_for(self._home / "data")
        super().__init__(directory, self.programs)
        self._wanted_port, self._login = port, Login(SUPERUSER, password)

    @property
    def data(self) -> Path:
        """The data directory (PGDATA)."""
        return self._home / "data"

    @property
    def databases(self) -> PostgresDatabases:
        """The server's databases, over TCP."""
        return PostgresDatabases(self.dsn())

    def dsn(self, dbname: str = "postgres") -> str:
        """Return a database's DSN as superuser, password included."""
        password = f":{quote(self._login.password, safe='')}" if self._login.password else ""
        return f"postgresql://{SUPERUSER}{password}@127.0.0.1:{self.port}/{dbname}"

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database; return its DSN."""
        self.databases.create_database(name, template=template)
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Force-drop a database, if it exists."""
        self.databases.drop_database(name)

    def has_database(self, name: str) -> bool:
        """Return whether the database exists."""
        return self.databases.has_database(name)

    def start(self, *, within_s: float = 60.0) -> None:
        """Return when the server accepts connections, on its last port if free.

        Raises ServerFailed, DirectoryRefused for data of another Postgres version.
        """
        if self.running and not self._guard.in_force:
            self.stop()
        if not self.running:
            self._prepare()
            self._start(within_s)

    def stop(self) -> None:
        """Stop the server; open transactions roll back."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kill the postmaster and its children."""
        process = self._record.process
        children = processes.children_of(process) if process else []
        self._end(signal.SIGKILL)
        for child in children:
            # A busy child notices late, and keeps the shared memory until then.
            processes.stop(child, by=signal.SIGCONT, within_s=2.0)

    def erase(self) -> None:
        """Kill the server and remove its data."""
        self.kill()
        release_shared_memory(self.data)
        shutil.rmtree(self._home, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _socket_directory(self) -> Path | None:
        path = self._home.resolve()
        return path if len(str(path)) <= SOCKET_PATH_LIMIT else None

    def _prepare(self) -> None:
        closed_directory(self.directory, traversed_by=self._account)
        self._home.mkdir(mode=0o700, exist_ok=True)
        chown(self._home, self._account)
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        if not self._guard.in_force:
            self._guard.put_in_force(self._program("postgres"), log=self.log)

    def _initialise(self) -> None:
        """Use a draft directory: an interrupted initdb never looks complete."""
        draft = self._home / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        answer = self._run_initdb(draft, "C.UTF-8")
        if answer.returncode != 0 and "locale" in answer.stderr:
            answer = self._run_initdb(draft, "C")
        if answer.returncode != 0:
            write_closed(self.log, (answer.stdout + answer.stderr).encode())
            raise ServerFailed("initdb", "failed", self.log, processes.last_lines(self.log))
        draft.rename(self.data)

    def _run_initdb(self, target: Path, locale: str) -> subprocess.CompletedProcess[str]:
        # Trust is safe here: nothing listens before the password guard is in force.
        command: list[str | Path] = [self._program("initdb"), "--no-sync", "--auth=trust"]
        command += [
            "--encoding=UTF8",
            f"--locale={locale}",
            f"--username={SUPERUSER}",
            "-D",
            target.resolve(),
        ]
        return subprocess.run(
            command,
            cwd=self._home,
            capture_output=True,
            text=True,
            check=False,
            **run_as(self._account),
        )

    @property
    def _guard(self) -> PasswordGuard:
        return PasswordGuard(self._home, self._login.password, self._account)

    def _program(self, name: str) -> Path:
        return program_place(self.programs, self._account).directory / name

    def _start(self, within_s: float) -> None:
        """Retry if another process takes the port."""
        for _ in range(START_TRIES):
            self._launch(free_port(self._record.port or self._wanted_port))
            comes_true(lambda: self._ready() or not self.running, within_s=within_s)
            if self.running and self._ready():
                return
            if self.running or "could not bind" not in self.log.read_text(errors="replace")[-4096:]:
                break
        self._give_up(within_s)

    def _launch(self, port: int) -> None:
        options = {
            # Shared memory in files of the data directory: a killed server leaves none behind elsewhere.
            "dynamic_shared_memory_type": "mmap",
            **self.options,
            "port": str(port),
            "unix_socket_directories": str(self._socket_directory or ""),
            "unix_socket_permissions": "0700",
        }
        command: list[str | Path] = [self._program("postgres"), "-D", self.data.resolve()]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        process = processes.spawn(command, log=self.log, account=self._account, directory=self._home)
        ProcessRecord(port, process).save(self.directory)

    def _ready(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"
        return False


def _programs_for(data: Path) -> PostgresPrograms:
    """Prefer the version that wrote the data."""
    try:
        major = int((data / "PG_VERSION").read_text())
    except FileNotFoundError:
        return best_postgres()
    for programs in postgres_programs():
        if programs.version[0] == major:
            return programs
    raise DirectoryRefused(data, f"holds data of Postgres {major}, and no Postgres {major} is on this machine")
