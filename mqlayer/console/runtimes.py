"""Runtimes by level: each has the Postgres role of its users."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from mqlayer.console.users import Level, User
from mqlayer.errors import PermissionDenied
from mqlayer.postgres.audit import Actor
from mqlayer.postgres.database import Connection, Database, address_of, connect, driver_errors
from mqlayer.postgres.dsn import parse_dsn
from mqlayer.postgres.rights import Right, SchemaName, require
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Dsn, Settings, as_role

POOL: Final = 8
NAME: Final = "mqlayer console"
CONTROL: Final[SchemaName] = "control"
APPLICATION: Final[SchemaName] = "application"


@dataclass(slots=True)
class Runtimes:
    """Databases by Postgres role, opened at first use. `roles`: by level; without one, that of the login."""

    settings: Settings
    roles: Mapping[Level, str] = field(default_factory=dict)
    _databases: dict[str, tuple[Database, Database]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, user: User, reason: str = "") -> Runtime:
        """Return a runtime that acts as a user."""
        control, application = self._of_role(self.roles.get(user.level, ""))
        return Runtime(control, self.settings, application, Actor(f"{user.name}@console", reason))

    def check(self, level: Level) -> None:
        """Raise PermissionDenied unless a level's Postgres role has its right, and the login may take the role."""
        role, right = self.roles.get(level, ""), Right.OPERATE if level is Level.OPERATOR else Right.VIEW
        control, application = self.settings.control_dsn(), self.settings.application_dsn()
        for dsn, schema in ((control, CONTROL), (application, APPLICATION)):
            with _connected(dsn, role) as connection, driver_errors(address_of(dsn)):
                require(connection, schema, right, "", Right.OPERATE)

    def close(self) -> None:
        """Close all pools."""
        for control, application in self._databases.values():
            control.close()
            application.close()
        self._databases.clear()

    def _of_role(self, role: str) -> tuple[Database, Database]:
        # The first pages of a browser come at once.
        with self._lock:
            if role not in self._databases:
                dsns = self.settings.control_dsn(), self.settings.application_dsn()
                control, application = (Database(as_role(dsn, role), application=NAME, max_size=POOL) for dsn in dsns)
                self._databases[role] = control, application
            return self._databases[role]


@contextmanager
def _connected(dsn: Dsn, role: str) -> Iterator[Connection]:
    try:
        connection = connect(as_role(dsn, role), application=NAME)
    except PermissionDenied as error:
        login = parse_dsn(dsn).get("user") or "LOGIN"
        reason = f"{login!r} may not become {role!r}" if role else error.reason
        raise PermissionDenied(error.address, reason, f"GRANT {role} TO {login}" if role else error.fix) from error
    with closing(connection):
        yield connection
