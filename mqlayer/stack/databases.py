"""Databases of a running Postgres."""

from __future__ import annotations

from dataclasses import dataclass, field

from psycopg import sql
from psycopg.conninfo import make_conninfo

from mqlayer.errors import InvalidInput, StoreUnavailable
from mqlayer.postgres.database import Connection, connect
from mqlayer.postgres.dsn import parse_dsn


@dataclass(frozen=True, slots=True)
class PostgresDatabases:
    """A server's databases."""

    base_dsn: str = field(repr=False)

    def dsn(self, dbname: str = "postgres") -> str:
        """Return a database's DSN, password included."""
        return make_conninfo("", **parse_dsn(self.base_dsn) | {"dbname": dbname})

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database; return its DSN."""
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
        self._execute(statement)
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Force-drop a database, if it exists."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def has_database(self, name: str) -> bool:
        """Return whether the database exists."""
        with self._connection() as connection:
            row = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone()
        return row is not None

    def answers(self) -> bool:
        """Return whether the server accepts connections."""
        try:
            with self._connection():
                return True
        except (StoreUnavailable, InvalidInput):
            return False

    def _execute(self, statement: sql.Composed) -> None:
        with self._connection() as connection:
            connection.execute(statement)

    def _connection(self) -> Connection:
        return connect(self.dsn(), application="mqlayer stack")
