"""Password protection of a Postgres cluster."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mqlayer.stack.accounts import Account, run_as
from mqlayer.stack.credentials import SUPERUSER
from mqlayer.stack.errors import ServerFailed
from mqlayer.stack.private_files import write_closed

MARK: Final = "password.sha256"
"""Hash of the password in force."""
CLIENTS: Final = """\
# Written by mqlayer: every client gives a password, also on the socket.
local  all          all                 scram-sha-256
host   all          all  127.0.0.1/32   scram-sha-256
host   all          all  ::1/128        scram-sha-256
local  replication  all                 scram-sha-256
host   replication  all  127.0.0.1/32   scram-sha-256
host   replication  all  ::1/128        scram-sha-256
"""


@dataclass(frozen=True, slots=True)
class PasswordGuard:
    """Password of the cluster below `home`."""

    home: Path
    password: str = field(repr=False)
    account: Account | None

    @property
    def in_force(self) -> bool:
        """Whether the cluster asks for this password."""
        try:
            return not self.password or (self.home / MARK).read_text() == self._hash
        except FileNotFoundError:
            return False

    def put_in_force(self, postgres: Path, *, log: Path) -> None:
        """Require the password of a stopped cluster. Repeatable. Raises ServerFailed."""
        self._set_password(postgres, log)
        self._write(self.home / "data" / "pg_hba.conf", CLIENTS)
        self._write(self.home / MARK, self._hash)

    def _set_password(self, postgres: Path, log: Path) -> None:
        """Single-user mode shows the password nowhere."""
        command: list[str | Path] = [
            postgres,
            "--single",
            "-c",
            "password_encryption=scram-sha-256",
            "-D",
            self.home / "data",
        ]
        statement = f"ALTER ROLE {SUPERUSER} PASSWORD '{self.password}'\n"
        done = subprocess.run(
            [*command, "postgres"],
            cwd=self.home,
            input=statement,
            capture_output=True,
            text=True,
            check=False,
            **run_as(self.account),
        )
        if done.returncode != 0 or "ERROR:" in done.stderr:
            # Its error text contains the statement.
            raise ServerFailed("postgres --single", "could not set the password of the superuser", log)

    def _write(self, path: Path, text: str) -> None:
        write_closed(path, text.encode())
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)

    @property
    def _hash(self) -> str:
        return hashlib.sha256(self.password.encode()).hexdigest()
