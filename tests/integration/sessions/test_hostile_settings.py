"""Whatever the server, the database or the role gives new sessions, a system does the same.

Each row of the table is a setting as somebody may have it; one system per row goes through all of its life.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql
from pydantic import SecretStr

from mqlayer import Settings
from mqlayer.postgres.migrations import migrate
from tests.fixtures.whole_system import WholeSystem
from tests.fixtures.worker_stores import UseStores

HOSTILE: Final[Mapping[str, Mapping[str, str]]] = {
    "ordinary": {},
    "serializable": {"default_transaction_isolation": "serializable"},
    "repeatable read": {"default_transaction_isolation": "repeatable read"},
    "read only": {"default_transaction_read_only": "on"},
    "deferrable": {"default_transaction_deferrable": "on", "default_transaction_isolation": "serializable"},
    "dates": {"DateStyle": "German, DMY", "IntervalStyle": "sql_standard", "TimeZone": "Asia/Kathmandu"},
    "other dates": {"DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601", "TimeZone": "America/St_Johns"},
    "latin": {"client_encoding": "LATIN1"},
    "ascii": {"client_encoding": "SQL_ASCII"},
    "literals": {"standard_conforming_strings": "off", "backslash_quote": "on", "escape_string_warning": "off"},
    "arrays and nulls": {"array_nulls": "off", "transform_null_equals": "on"},
    "output": {"bytea_output": "escape", "extra_float_digits": "-15", "quote_all_identifiers": "on"},
    "hasty statements": {"statement_timeout": "40ms"},
    "hasty locks": {"lock_timeout": "1ms"},
    "hasty idling": {"idle_in_transaction_session_timeout": "100ms", "idle_session_timeout": "150ms"},
    "no path": {"search_path": ""},
    "a path of others": {"search_path": "evil, pg_catalog, public"},
    "asynchronous": {"synchronous_commit": "off"},
    "rows": {"row_security": "off", "restrict_nonsystem_relation_kind": "view, foreign-table"},
    "compiled": {"jit": "on", "jit_above_cost": "100"},
    "generic plans": {"plan_cache_mode": "force_generic_plan", "from_collapse_limit": "1", "join_collapse_limit": "1"},
    "parallel": {"force_parallel_mode": "on", "parallel_setup_cost": "0", "min_parallel_table_scan_size": "0"},
    "no indexes": {"enable_indexscan": "off", "enable_bitmapscan": "off", "enable_indexonlyscan": "off"},
    "talkative": {"client_min_messages": "debug5"},
    "silent": {"client_min_messages": "error"},
    "ends on errors": {"exit_on_error": "on"},
    "strict functions": {"plpgsql.extra_errors": "all", "plpgsql.check_asserts": "off"},
}
"""Sets of settings by name; those that can be given to a database or role."""
EVIL: Final = """
CREATE SCHEMA evil;
GRANT USAGE ON SCHEMA evil TO public;
CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '2001-01-01'::timestamptz $$;
CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '2001-01-01'::timestamptz $$;
CREATE FUNCTION evil.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT $2 $$;
CREATE FUNCTION evil.pg_backend_pid() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION evil.to_regclass(text) RETURNS regclass LANGUAGE sql AS $$ SELECT NULL::regclass $$;
"""
PROVEN: Final[dict[str, Any]] = {}
"""What came of the row without any hostile setting."""


@pytest.fixture
def settings(
    empty_database_dsn: str, redis_url: str, key_prefix: str, use_stores: UseStores, request: pytest.FixtureRequest
) -> Settings:
    """A system whose database gives new sessions what the row says; both schemas are made under it too."""
    with psycopg.connect(empty_database_dsn, autocommit=True) as connection:
        connection.execute(EVIL)
        name = sql.Identifier(connection.info.dbname)
        for setting, value in HOSTILE[request.param].items():
            wanted = sql.SQL(value) if setting == "search_path" and value else sql.Literal(value)
            connection.execute(sql.SQL("ALTER DATABASE {} SET {} = {}").format(name, sql.SQL(setting), wanted))
    migrate(empty_database_dsn)
    use_stores({"MQLAYER_DSN": empty_database_dsn, "MQLAYER_KEY_PREFIX": key_prefix})
    return Settings(dsn=SecretStr(empty_database_dsn), key_prefix=key_prefix, lease_s=5.0)


def as_applications_do(connection: psycopg.Connection[Any]) -> None:
    """What an application has to say itself: it writes, though by default its sessions do not."""
    connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE NOT DEFERRABLE")


@pytest.mark.parametrize("settings", HOSTILE, indirect=True)
def test_a_system_does_the_same_whatever_its_sessions_begin_with(settings: Settings, redis_url: str) -> None:
    found = WholeSystem(settings, redis_url, as_applications_do).run()
    assert found == PROVEN.setdefault("ordinary", found)
