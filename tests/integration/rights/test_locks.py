"""LOCK TABLE: no publisher, consumer or reader takes a lock on a whole table that others' work waits for."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Final

import psycopg
import pytest
from psycopg import sql

from mqlayer.postgres.rights import Right, privileges
from tests.fixtures.roles import Roles

RELATIONS: Final = """
    SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname IN ('mqlayer', 'mqlayer_app', 'mqlayer_archive') AND c.relkind IN ('r', 'p', 'v') ORDER BY 1"""
STRONG: Final = (
    "SHARE UPDATE EXCLUSIVE", "SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE", "ACCESS EXCLUSIVE"
)  # fmt: skip
UNTRUSTED: Final = [
    ([Right.PUBLISH], ""), ([Right.PUBLISH], "orders"), ([Right.CONSUME], ""), ([Right.CONSUME], "orders/ledger"),
    ([Right.VIEW], ""), ([Right.ANALYZE], ""), ([Right.PUBLISH, Right.CONSUME, Right.VIEW, Right.ANALYZE], ""),
]  # fmt: skip
TRUSTED: Final = (Right.RELAY, Right.WORK, Right.OPERATE)


def relations(dsn: str) -> list[str]:
    """Every table, partition and view of our schemas."""
    with closing(psycopg.connect(dsn, autocommit=True)) as owner:
        found = [row[0] for row in owner.execute(RELATIONS.encode())]
    assert len(found) > 60
    return found


# As the role that tries; what it was given is taken back with the transaction.
TRY: Final = """
    DO $do$
    DECLARE
        v_name text;
        v_mode text;
        v_given text[] := '{{}}';
    BEGIN
        FOREACH v_name IN ARRAY {names}::text[] LOOP
            FOREACH v_mode IN ARRAY {modes}::text[] LOOP
                BEGIN
                    EXECUTE format('LOCK TABLE %s IN %s MODE NOWAIT', v_name, v_mode);
                    v_given := v_given || (v_name || ' ' || v_mode);
                EXCEPTION WHEN insufficient_privilege THEN NULL;
                END;
            END LOOP;
        END LOOP;
        PERFORM set_config('test.given', array_to_string(v_given, ','), false);
    END $do$"""


def locked(dsn: str, names: list[str]) -> set[tuple[str, str]]:
    """Try each lock that is stronger than those of reading and writing; return which ones were given."""
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        connection.execute(sql.SQL(TRY).format(names=sql.Literal(names), modes=sql.Literal(list(STRONG))))
        ((given,),) = connection.execute("SELECT current_setting('test.given')").fetchall()
    pairs = (one.split(" ", maxsplit=1) for one in given.split(",") if one)
    return {(name, mode) for name, mode in pairs}


def deletes(right: Right) -> set[str]:
    """The tables that a right may delete from, by what is granted with it."""
    return {one.target for one in privileges(right) if re.search(r"\bDELETE\b", one.privileges)}


@pytest.mark.parametrize(("rights", "scope"), UNTRUSTED)
def test_who_publishes_consumes_or_looks_locks_no_table(
    database_dsn: str, roles: Roles, rights: list[Right], scope: str
) -> None:
    assert locked(roles.login(*rights, scopes=[scope]), relations(database_dsn)) == set()


@pytest.mark.parametrize("right", TRUSTED)
def test_who_is_trusted_with_all_groups_locks_the_tables_that_it_deletes_from_and_no_others(
    database_dsn: str, roles: Roles, right: Right
) -> None:
    found = locked(roles.login(right), relations(database_dsn))
    assert found == {(name, mode) for name in deletes(right) for mode in STRONG}
    assert not {"mqlayer.member", "mqlayer.parked_key"} & deletes(right)


def test_every_right_is_one_of_the_two_kinds() -> None:
    tried = {right for rights, _ in UNTRUSTED for right in rights}
    assert tried | set(TRUSTED) | {Right.MIGRATE} == set(Right)
    assert not any(deletes(right) for right in tried)
