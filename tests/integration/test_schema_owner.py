"""The owner of the schemas: a role that nobody logs in as and that is no superuser, made and given all by `migrate`."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from mqlayer.errors import ConfigurationRefused
from mqlayer.postgres.database import connect
from mqlayer.postgres.migrations import DEFAULT_OWNER, SCHEMAS, migrate, migrations, script
from mqlayer.postgres.queries import query
from mqlayer.postgres.rights import Right, grant
from tests.fixtures.servers import Postgres

OWNERS = """
SELECT DISTINCT owner::regrole::text FROM (
    SELECT nspowner, nspname FROM pg_namespace
    UNION ALL SELECT c.relowner, n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    UNION ALL SELECT p.proowner, n.nspname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    UNION ALL SELECT t.typowner, n.nspname FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
) AS one(owner, schema) WHERE schema IN ('mqlayer', 'mqlayer_app', 'mqlayer_archive')
"""


def owners(dsn: str) -> list[str]:
    """Return the owners of all objects in our schemas."""
    with connect(dsn) as connection:
        return sorted(name for (name,) in connection.execute(OWNERS).fetchall())


class Roles:
    """Roles of one test; dropped after it with all that they own."""

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self._names: list[str] = []
        self.databases: list[str] = []

    def name(self) -> str:
        """Give a role's name that nobody has; it is dropped in the end, whoever made it."""
        self._names.append(f"mqlayer_test_{uuid.uuid4().hex[:12]}")
        return self._names[-1]

    def login(self, options: str = "") -> str:
        """Make a role that can log in."""
        name = self.name()
        self.run(f"CREATE ROLE {name} LOGIN PASSWORD 'secret' {options}")
        return name

    def run(self, statement: str, *, database: str = "postgres") -> None:
        """Run a statement as the server's superuser."""
        with closing(psycopg.connect(self._server.dsn(database), autocommit=True)) as connection:
            connection.execute(statement)

    def database(self, options: str = "") -> str:
        """Make an empty database."""
        name = f"mqlayer_test_{uuid.uuid4().hex[:12]}"
        self.run(f"CREATE DATABASE {name} {options}")
        self.databases.append(name)
        return name

    def dsn(self, database: str, user: str | None = None) -> str:
        """Return the address of a database for the superuser, or another role."""
        dsn = self._server.dsn(database)
        return make_conninfo(dsn, user=user, password="secret") if user else dsn

    def drop(self) -> None:
        """Drop all."""
        for name in self.databases:
            self._server.drop_database(name)
        for name in reversed(self._names):
            self.run(
                f"DO $$ BEGIN IF EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') THEN "
                f"DROP OWNED BY {name}; DROP ROLE {name}; END IF; END $$"
            )


@pytest.fixture
def roles(postgres_server: Postgres) -> Iterator[Roles]:
    with ExitStack() as cleanup:
        roles = Roles(postgres_server)
        cleanup.callback(roles.drop)
        yield roles


def test_all_that_is_ours_belongs_to_a_role_without_login_and_rights(database_dsn: str) -> None:
    assert owners(database_dsn) == [DEFAULT_OWNER]
    with connect(database_dsn) as connection:
        of_owner = "SELECT rolcanlogin, rolsuper, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = %s"
        assert connection.execute(of_owner, (DEFAULT_OWNER,)).fetchone() == (False, False, False, False)


@pytest.mark.full
def test_databases_of_one_server_are_migrated_at_once_though_they_share_the_role(roles: Roles) -> None:
    owner = roles.name()
    dsns = [roles.dsn(roles.database()) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda dsn: migrate(dsn, owner=owner), dsns))
    assert [owners(dsn) for dsn in dsns] == [[owner]] * 4


def test_an_installation_of_a_superuser_is_handed_over(roles: Roles) -> None:
    database, owner = roles.database(), roles.name()
    dsn = roles.dsn(database)
    migrate(dsn, owner=owner)
    with connect(dsn) as connection:
        connection.execute(f"REASSIGN OWNED BY {owner} TO CURRENT_USER")
        assert owner not in owners(dsn)
        connection.execute(query("outbox_topic_put"), {"topic_id": 1, "name": "orders", "body_limit": 100})
        connection.execute(query("outbox_counters_put"), {"topic_id": 1})
    assert migrate(dsn) == [], "no step is left, and the owner changes all the same"
    assert owners(dsn) == [DEFAULT_OWNER]
    with connect(dsn) as connection:
        assert connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'x')").fetchone() == (1,)


def test_an_owner_that_is_no_superuser_stays_until_another_is_named(roles: Roles) -> None:
    database, first, second = roles.database(), roles.name(), roles.name()
    dsn = roles.dsn(database)
    migrate(dsn, owner=first)
    migrate(dsn)
    assert owners(dsn) == [first]
    migrate(dsn, owner=second)
    assert owners(dsn) == [second]


def test_a_superuser_is_refused_as_the_owner(roles: Roles) -> None:
    database, owner = roles.database(), roles.login("SUPERUSER")
    with pytest.raises(ConfigurationRefused, match=f"the role {owner} is a superuser"):
        migrate(roles.dsn(database), owner=owner)


def test_a_role_that_may_make_roles_and_owns_the_database_needs_nobody_else(roles: Roles) -> None:
    deployer, owner = roles.login("CREATEROLE"), roles.name()
    database = roles.database(f"OWNER {deployer}")
    migrate(roles.dsn(database, deployer), owner=owner)
    assert owners(roles.dsn(database)) == [owner]
    assert migrate(roles.dsn(database, deployer)) == []


def test_a_role_that_may_make_none_is_told_what_an_administrator_has_to_run(roles: Roles) -> None:
    """Each refusal leaves the database alone and names one statement; after these statements it works."""
    deployer, owner = roles.login(), roles.name()
    database = roles.database()
    dsn, ran = roles.dsn(database, deployer), []
    for _ in range(3):
        try:
            migrate(dsn, owner=owner)
        except ConfigurationRefused as error:
            ran += re.findall(r"run: ([A-Z][^;]*(?:; GRANT [^;]*)?)", str(error))
            roles.run(ran[-1], database=database)
    assert ran == [
        f"CREATE ROLE {owner} NOLOGIN; GRANT {owner} TO {deployer}",
        f"GRANT CREATE ON DATABASE {database} TO {owner}",
    ]
    assert owners(roles.dsn(database)) == [owner]
    with connect(dsn) as connection:
        found_numbers = [connection.execute(f"SELECT max(number) FROM {name}.migration").fetchone()
                         for name in SCHEMAS.values()]  # fmt: skip
    assert found_numbers == [(len(migrations(name)),) for name in SCHEMAS]


def test_a_role_that_is_no_member_of_the_owner_is_told_so(roles: Roles) -> None:
    deployer, owner = roles.login("CREATEROLE"), roles.name()
    database = roles.database(f"OWNER {deployer}")
    roles.run(f"CREATE ROLE {owner} NOLOGIN")
    with pytest.raises(ConfigurationRefused, match=f"GRANT {owner} TO {deployer}"):
        migrate(roles.dsn(database, deployer), owner=owner)


def test_a_role_without_the_owner_finds_nothing_to_do_in_a_current_schema(roles: Roles) -> None:
    database, reader, stranger = roles.database(), roles.login(), roles.login()
    migrate(roles.dsn(database))
    with pytest.raises(ConfigurationRefused, match=f"{stranger} is no member of the role mqlayer_owner: have an admin"):
        migrate(roles.dsn(database, stranger))
    for schema in SCHEMAS:
        grant(roles.dsn(database), schema, reader, Right.PUBLISH)
    assert migrate(roles.dsn(database, reader)) == []
    with pytest.raises(ConfigurationRefused):
        migrate(roles.dsn(database, reader), owner=reader)
    roles.run("DELETE FROM mqlayer_app.migration", database=database)
    with pytest.raises(ConfigurationRefused, match=f"GRANT mqlayer_owner TO {reader}"):
        migrate(roles.dsn(database, reader))


def test_a_role_may_own_what_it_migrates_itself(roles: Roles) -> None:
    deployer = roles.login()
    database = roles.database(f"OWNER {deployer}")
    migrate(roles.dsn(database, deployer), owner=deployer)
    assert owners(roles.dsn(database)) == [deployer]


def test_the_printed_script_makes_the_owner_too(roles: Roles) -> None:
    administrator, owner = roles.login("CREATEROLE"), roles.name()
    database = roles.database(f"OWNER {administrator}")
    with closing(psycopg.connect(roles.dsn(database, administrator), autocommit=True)) as connection:
        connection.execute(script(owner=owner))
    assert owners(roles.dsn(database)) == [owner]
    assert migrate(roles.dsn(database)) == []


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_is_not_utf_8_is_refused_before_anything_is_made(roles: Roles, encoding: str) -> None:
    database = roles.database(f"ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    with pytest.raises(ConfigurationRefused, match=f"encoding is {encoding}.*UTF8"):
        migrate(roles.dsn(database))
    with closing(psycopg.connect(roles.dsn(database), autocommit=True, client_encoding="utf8")) as connection:
        with pytest.raises(psycopg.Error, match=encoding):
            connection.execute(script())
        connection.execute("ROLLBACK")
        assert connection.execute("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'mqlayer%'").fetchall() == []
