"""Printed SQL means the same wherever a superuser runs it: nothing of a schema that others write to is called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from mqlayer.postgres.migrations import migrate
from mqlayer.postgres.rights import Right
from tests.fixtures.commands import Commands
from tests.fixtures.roles import Roles
from tests.fixtures.servers import DatabaseMaker

# Traps are set once, by one worker: hundreds of them, for each of which its server takes a while.
pytestmark = pytest.mark.xdist_group("printed_sql")

# In schema public: an operator for each pair of types that has one in Postgres, a function for each one that a script
# names, with the types of its parameters and with nearer ones, a table and a type for each that it names, and casts.
TRAPS: Final = r"""
    SET search_path = pg_catalog;
    CREATE FUNCTION public.trap() RETURNS boolean LANGUAGE plpgsql AS
        'BEGIN RAISE EXCEPTION ''trapped'' USING ERRCODE = ''XX001''; END';
    DO $do$
    DECLARE
        v_one record;
    BEGIN
        FOR v_one IN
            SELECT oprname AS name, format_type(oprleft, NULL) AS l, format_type(oprright, NULL) AS r
            FROM pg_operator JOIN pg_type lt ON lt.oid = oprleft JOIN pg_type rt ON rt.oid = oprright
            WHERE oprkind = 'b' AND oprresult = 'bool'::regtype AND lt.typtype = 'b' AND rt.typtype = 'b'
            UNION SELECT '=', l, r FROM unnest(ARRAY['regrole', 'name', 'text', 'oid', 'varchar']) AS l,
                                        unnest(ARRAY['regrole', 'name', 'text', 'regnamespace', 'varchar']) AS r
            WHERE NOT EXISTS (SELECT FROM pg_operator o WHERE o.oprname = '=' AND o.oprleft = l::regtype
                                                          AND o.oprright = r::regtype)
        LOOP
            EXECUTE format('CREATE OR REPLACE FUNCTION public.trap_of(l %s, r %s) RETURNS boolean LANGUAGE plpgsql AS
                            ''BEGIN RETURN public.trap(); END''', v_one.l, v_one.r);
            EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.trap_of)',
                           v_one.name, v_one.l, v_one.r);
        END LOOP;
        FOR v_one IN
            SELECT p.proname AS name, oidvectortypes(p.proargtypes) AS given FROM pg_proc p
            WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind = 'f' AND p.proname = ANY(%(words)s)
              AND p.provariadic = 0 AND p.proargmodes IS NULL
              AND NOT EXISTS (SELECT FROM unnest(p.proargtypes) AS a(oid) JOIN pg_type t USING (oid)
                              WHERE t.typtype = 'p')
            UNION SELECT 'format', given
            FROM unnest(ARRAY['text, name, text', 'text, text, text', 'text, text']) AS given
        LOOP
            EXECUTE format('CREATE OR REPLACE FUNCTION public.%I(%s) RETURNS text LANGUAGE plpgsql AS
                            ''BEGIN PERFORM public.trap(); END''', v_one.name, v_one.given);
        END LOOP;
        FOR v_one IN
            SELECT typname AS name FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b'
                AND typname = ANY(%(words)s)
        LOOP
            EXECUTE format('CREATE DOMAIN public.%1$I AS pg_catalog.%1$I CHECK (public.trap())', v_one.name);
        END LOOP;
        FOR v_one IN
            SELECT relname AS name FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace
                AND relkind IN ('r', 'v') AND relname = ANY(%(words)s)
        LOOP
            EXECUTE format('CREATE VIEW public.%1$I AS SELECT * FROM pg_catalog.%1$I WHERE public.trap()', v_one.name);
        END LOOP;
    END $do$;
"""
PATHS: Final = ['"$user", public', "public, pg_catalog"]
GIVEN: Final = [
    *((right,) for right in Right),
    (Right.PUBLISH, "--topic", "orders"),
    (Right.CONSUME, "--group", "orders/ledger"),
]
ALL_NAMES: Final = "SELECT proname FROM pg_proc UNION SELECT typname FROM pg_type UNION SELECT relname FROM pg_class"


def set_traps(dsn: str, scripts: list[str]) -> None:
    """Put a trap into schema public for each name of the scripts."""
    named = set(re.findall(r"\w+", " ".join(scripts)))
    with closing(psycopg.connect(dsn, autocommit=True)) as owner:
        known = sorted(named & {name for (name,) in owner.execute(ALL_NAMES)})
        words = "ARRAY[" + ", ".join(f"'{name}'" for name in known) + "]::name[]"
        owner.execute(TRAPS.replace("%(words)s", words).encode())


def run(dsn: str, path: str, *scripts: str) -> None:
    """Run scripts as a superuser with this path."""
    with closing(psycopg.connect(dsn, autocommit=True)) as superuser:
        superuser.execute(f"SET search_path = {path}".encode())
        for script in scripts:
            superuser.execute(script.encode())


@pytest.fixture(scope="module")
def trapped(database_maker: DatabaseMaker, migrated_template: str) -> Iterator[tuple[str, list[str]]]:
    """A database with traps for what is printed of rights, and that, for a role of its own."""
    with (
        database_maker.copy_of(migrated_template) as dsn,
        closing(Roles(dsn, database_maker.roles_of(dsn))) as roles,
    ):
        role = Roles.name_of(roles.login())
        scripts = [
            Commands().text(verb, right, role, *limits, "--sql")
            for right, *limits in GIVEN
            for verb in ("grant", "revoke")
        ]
        set_traps(dsn, scripts)
        yield dsn, scripts


@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_a_hostile_schema_public_is_called_by_what_is_printed_of_rights(
    trapped: tuple[str, list[str]], path: str
) -> None:
    dsn, scripts = trapped
    with pytest.raises(psycopg.errors.DataCorrupted, match="trapped"):
        run(dsn, path, "DO 'BEGIN PERFORM format(''%s%s'', ''a''::name, ''b''); END'")
    run(dsn, path, *scripts)


@pytest.fixture(scope="module")
def trapped_template(database_maker: DatabaseMaker) -> Iterator[str]:
    """The name of a database without our schemas, with traps for the printed migration; to be copied."""
    with database_maker.copy_of("template1") as dsn:
        set_traps(dsn, [Commands().text("migrate", "--sql")])
        yield str(conninfo_to_dict(dsn)["dbname"])


@pytest.mark.parametrize("path", PATHS)
def test_nothing_of_a_hostile_schema_public_is_called_by_printed_migrations(
    database_maker: DatabaseMaker, trapped_template: str, path: str
) -> None:
    with database_maker.copy_of(trapped_template) as dsn:
        run(dsn, path, Commands().text("migrate", "--sql"))
        assert migrate(dsn) == []
