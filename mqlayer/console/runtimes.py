"""Runtimes by level: each has the Postgres role of its users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from mqlayer.console.users import Level, User
from mqlayer.postgres.audit import Actor
from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Dsn, Settings

POOL: Final = 8
NAME: Final = "mqlayer console"


@dataclass(slots=True)
class Runtimes:
    """Databases by Postgres role, opened at first use. `roles`: by level; without one, that of the login."""

    settings: Settings
    roles: Mapping[Level, str] = field(default_factory=dict)
    _databases: dict[str, tuple[Database, Database]] = field(default_factory=dict)

    def of(self, user: User, reason: str = "") -> Runtime:
        """Return a runtime that acts as a user."""
        role = self.roles.get(user.level, "")
        if role not in self._databases:
            dsns = self.settings.control_dsn(), self.settings.application_dsn()
            control, application = (Database(_as_role(dsn, role), application=NAME, max_size=POOL) for dsn in dsns)
            self._databases[role] = control, application
        control, application = self._databases[role]
        return Runtime(control, self.settings, application, Actor(f"{user.name}@console", reason))

    def close(self) -> None:
        """Close all pools."""
        for control, application in self._databases.values():
            control.close()
            application.close()
        self._databases.clear()


def _as_role(dsn: Dsn, role: str) -> Dsn:
    return Dsn(str(dsn), replace(dsn.options, role=role))
