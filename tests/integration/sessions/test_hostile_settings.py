"""Whatever the server, the database or the role gives new sessions, a system does the same.

Each row of the table is a setting as somebody may have it; one system per row goes through all of its life.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql
from pydantic import SecretStr

from mqlayer import Settings
from mqlayer.postgres import session_setup
from mqlayer.postgres.database import Database, connect
from mqlayer.postgres.migrations import migrate
from tests.fixtures.variants import some_of
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
    "hasty statements": {"statement_timeout": "500ms"},
    "hasty locks": {"lock_timeout": "50ms"},
    "hasty idling": {"idle_in_transaction_session_timeout": "500ms", "idle_session_timeout": "1s"},
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
"""Sets of settings by name; those that can be given to a database or role. The hasty ones leave time for an
application's first statement, on a busy machine too."""
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
    """What an application has to say itself: it writes, takes its time, and sends text in an encoding that has a name,
    though by default its sessions do not."""
    if connection.info.parameter_status("client_encoding") == "SQL_ASCII":
        connection.execute("SET client_encoding = 'UTF8'")
    connection.execute(
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ WRITE NOT DEFERRABLE; "
        "SET LOCAL statement_timeout = '20s'; SET LOCAL idle_in_transaction_session_timeout = '20s'"
    )


@pytest.mark.xdist_group("hostile_settings")  # what one process has proven is compared
@pytest.mark.parametrize("settings", some_of(HOSTILE, 9), indirect=True)
def test_a_system_does_the_same_whatever_its_sessions_begin_with(settings: Settings, redis_url: str) -> None:
    found = WholeSystem(settings, redis_url, as_applications_do).run()
    assert found == PROVEN.setdefault("ordinary", found)


KINDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "mqlayer consumer": ("1min", "30s", "1min"),
    "mqlayer relay": ("5min", "30s", "10min"),
    "mqlayer worker": ("1h", "1min", "10min"),
    "mqlayer": ("0", "1min", "10min"),
    "mqlayer migrate": ("0", "0", "0"),
}
LIMITS: Final = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")


def in_force(connection: psycopg.Connection[Any], names: Iterable[str]) -> dict[str, str]:
    return {name: (connection.execute("SELECT current_setting(%s)", [name]).fetchone() or ("",))[0] for name in names}


@pytest.fixture
def worst_dsn(database_dsn: str, new_sessions: None) -> str:
    """A database that gives new sessions the worst of all rows at once."""
    left_out = ("lock_timeout", "statement_timeout", "exit_on_error")
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        rows = {setting: value for row in HOSTILE.values() for setting, value in row.items() if setting not in left_out}
        for setting, value in {**rows, "search_path": "public", "client_encoding": "LATIN1"}.items():
            connection.execute(sql.SQL("ALTER DATABASE {} SET {} = {}").format(name, sql.SQL(setting), value))
    return database_dsn


@pytest.mark.parametrize("kind", some_of(KINDS, 3))
def test_each_kind_of_session_has_its_settings_and_limits(worst_dsn: str, kind: str) -> None:
    wanted = {**session_setup.SETTINGS, **dict(zip(LIMITS, KINDS[kind], strict=True)), "DateStyle": "ISO, DMY"}
    with Database(worst_dsn, application=kind) as database, database.connection() as lent:
        assert in_force(lent, wanted) == wanted
    with connect(worst_dsn, application=kind) as connection:
        assert in_force(connection, wanted) == wanted
        assert connection.info.encoding == "utf-8"


def test_limits_that_are_set_take_the_place_of_the_kinds(worst_dsn: str) -> None:
    settings = Settings(dsn=SecretStr(worst_dsn), statement_timeout_s=7, lock_timeout_s=0.5)
    with connect(settings.control_dsn(), application="mqlayer relay") as connection:
        assert in_force(connection, LIMITS) == dict(zip(LIMITS, ("7s", "500ms", "10min"), strict=True))


@pytest.mark.usefixtures("new_sessions")
@pytest.mark.parametrize("stronger", ["local", "remote_write", "remote_apply"])
def test_a_session_that_waits_for_standbys_goes_on_waiting_for_them(database_dsn: str, stronger: str) -> None:
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = {}").format(name, stronger))
    with connect(database_dsn) as connection:
        assert in_force(connection, ["synchronous_commit"]) == {"synchronous_commit": stronger}


def test_the_list_of_settings_in_the_documents_is_the_one_in_force() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "settings.md").read_text("utf-8")
    for kind, words in (("members, receivers, producers", "mqlayer consumer"), ("relay", "mqlayer relay")):
        limits = session_setup.LIMITS[words]
        cells = [f"{seconds:g} s" for seconds in (limits.statement_s, limits.lock_s, limits.idle_in_transaction_s)]
        assert f"| {kind} | {' | '.join(cells)} |" in page
