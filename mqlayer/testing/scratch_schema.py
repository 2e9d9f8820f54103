"""Scratch schemas: empty tables like an application's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from psycopg import sql

from mqlayer.errors import InvalidInput, NotFound
from mqlayer.postgres.database import Connection
from mqlayer.randomness import RNG

PREFIX: Final = "mqlayer_shadow_"
_COLUMNS: Final = """
SELECT a.attname, pg_get_serial_sequence(c.oid::regclass::text, a.attname) IS NOT NULL AND a.attidentity = ''
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.oid = %s ORDER BY a.attnum
"""


@dataclass(frozen=True, slots=True)
class ShadowTable:
    """`columns`: the compared ones; `serials`: those with a sequence."""

    schema: str
    name: str
    columns: Sequence[str]
    serials: Sequence[str]

    @property
    def full_name(self) -> str:
        """For messages and privileges."""
        return f"{self.schema}.{self.name}"


class TableDifference(NamedTuple):
    """Rows of a table that only one handler made."""

    table: str
    only_old: int
    only_new: int


def shadow_tables(connection: Connection, names: Sequence[str], ignored: Sequence[str] = ()) -> list[ShadowTable]:
    """Look up tables. `ignored`: TABLE.COLUMN, not compared. Raises NotFound, InvalidInput."""
    left_out: dict[str, set[str]] = {}
    for one in ignored:
        table, dot, column = one.rpartition(".")
        if not dot:
            raise InvalidInput(f"{one!r} is no column of a table: say TABLE.COLUMN")
        left_out.setdefault(table, set()).add(column)
    if unknown := sorted(left_out.keys() - set(names)):
        raise InvalidInput(f"columns of {', '.join(unknown)} are ignored, but these tables are not compared")
    return [_table(connection, name, left_out.get(name, set())) for name in dict.fromkeys(names)]


def _table(connection: Connection, name: str, ignored: set[str]) -> ShadowTable:
    found = connection.execute(
        "SELECT c.oid, n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n "
        "ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s) AND c.relkind IN ('r', 'p')", [name],
    ).fetchone()  # fmt: skip
    if found is None:
        raise NotFound("table", name, "it is looked for in the application's database, by the session's search_path")
    oid, schema, relation = found
    columns = connection.execute(_COLUMNS, [oid]).fetchall()
    if unknown := sorted(ignored - {column for column, _ in columns}):
        raise NotFound("column", f"{name}.{unknown[0]}", "it can't be ignored")
    compared = [column for column, _ in columns if column not in ignored]
    if not compared:
        raise InvalidInput(f"each column of {name} is ignored: leave the table out")
    return ShadowTable(schema, relation, compared, [column for column, serial in columns if serial])


class ScratchSchema:
    """Without triggers and foreign keys."""

    def __init__(self, connection: Connection, name: str, tables: Sequence[ShadowTable]) -> None:
        self.name, self._connection, self._tables = name, connection, tables

    def create(self) -> None:
        """Create it."""
        run = self._connection.execute
        run(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self.name)))
        for one in self._tables:
            made = self._named(one)
            run(sql.SQL("CREATE TABLE {} (LIKE {} INCLUDING ALL)").format(made, sql.Identifier(one.schema, one.name)))
            for number, column in enumerate(one.serials):
                # Else the copied default would draw from the application's sequence.
                sequence = sql.Identifier(self.name, f"{one.name[:40]}_serial_{number}")
                run(sql.SQL("CREATE SEQUENCE {} OWNED BY {}.{}").format(sequence, made, sql.Identifier(column)))
                drawn = sql.Literal(f'"{self.name}"."{one.name[:40]}_serial_{number}"')
                run(
                    sql.SQL("ALTER TABLE {} ALTER COLUMN {} SET DEFAULT nextval({}::regclass)").format(
                        made, sql.Identifier(column), drawn
                    )
                )

    def clear(self) -> None:
        """Empty its tables; sequences begin anew."""
        if self._tables:
            names = sql.SQL(", ").join(self._named(one) for one in self._tables)
            self._connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(names))

    def drop(self) -> None:
        """Drop it."""
        self._connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(self.name)))

    def differences(self, other: ScratchSchema) -> list[TableDifference]:
        """Compare rows as texts; order does not count."""
        found = []
        for one in self._tables:
            columns = sql.SQL(", ").join(map(sql.Identifier, one.columns))
            rows = [
                sql.SQL("SELECT ROW({})::text FROM {}").format(columns, sql.Identifier(schema, one.name))
                for schema in (self.name, other.name)
            ]
            either = sql.SQL("SELECT (SELECT count(*) FROM ({0} EXCEPT ALL {1}) o), "
                             "(SELECT count(*) FROM ({1} EXCEPT ALL {0}) n)")  # fmt: skip
            row = self._connection.execute(either.format(*rows)).fetchone()
            if row is not None and any(row):
                found.append(TableDifference(one.full_name, *row))
        return found

    def _named(self, one: ShadowTable) -> sql.Identifier:
        return sql.Identifier(self.name, one.name)


@contextmanager
def scratch_schemas(connection: Connection, tables: Sequence[ShadowTable]) -> Iterator[Mapping[str, ScratchSchema]]:
    """Lend the schemas `old` and `new`; they are dropped at the end."""
    number = RNG.randrange(10**9)
    made = {side: ScratchSchema(connection, f"{PREFIX}{side}_{number}", tables) for side in ("old", "new")}
    try:
        for one in made.values():
            one.create()
        yield made
    finally:
        for one in made.values():
            one.drop()
