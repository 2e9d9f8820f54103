"""Functions that run in an application's own session: whatever its role is set to, they answer the same or name it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from mqlayer import outbox
from mqlayer.domain.message import Identity
from mqlayer.errors import AlreadyApplied, InvalidInput, MqlayerError, StoreUnavailable
from mqlayer.idempotency.inbox import InboxEntry, record_effect
from mqlayer.idempotency.versions import Versions
from mqlayer.postgres.caller_connections import Statement, caller_errors, run_one
from mqlayer.postgres.database import connect
from mqlayer.postgres.queries import query
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.roles import grant_application

ROLE: Final = f"mqlayer_test_{uuid.uuid4().hex[:12]}"
SAME: Final = [
    ("IntervalStyle", "sql_standard"), ("IntervalStyle", "postgres_verbose"), ("IntervalStyle", "iso_8601"),
    ("DateStyle", "SQL, DMY"), ("DateStyle", "German, YMD"), ("TimeZone", "America/St_Johns"),
    ("TimeZone", "Pacific/Kiritimati"), ("bytea_output", "escape"), ("array_nulls", "off"),
    ("transform_null_equals", "on"), ("standard_conforming_strings", "off"), ("backslash_quote", "off"),
    ("escape_string_warning", "off"), ("client_encoding", "UTF8"),
    ("default_transaction_isolation", "serializable"), ("default_transaction_isolation", "repeatable read"),
    ("default_transaction_isolation", "read uncommitted"), ("default_transaction_deferrable", "on"),
    ("search_path", ""), ("search_path", "pg_temp"), ("search_path", "elsewhere"), ("row_security", "off"),
    ("statement_timeout", "20s"), ("lock_timeout", "1ms"), ("idle_in_transaction_session_timeout", "20s"),
    ("idle_in_transaction_session_timeout", "1d"), ("idle_in_transaction_session_timeout", "0"),
    ("plan_cache_mode", "force_generic_plan"), ("plan_cache_mode", "force_custom_plan"), ("jit_above_cost", "0"),
    ("enable_seqscan", "off"), ("enable_indexscan", "off"), ("enable_sort", "off"), ("work_mem", "64kB"),
    ("extra_float_digits", "-15"), ("synchronous_commit", "off"), ("default_tablespace", "nowhere"),
    ("temp_tablespaces", "nowhere"), ("default_table_access_method", "nothing"), ("check_function_bodies", "off"),
    ("client_min_messages", "error"), ("exit_on_error", "on"), ("quote_all_identifiers", "on"),
    ("xmloption", "document"), ("max_parallel_workers_per_gather", "0"), ("from_collapse_limit", "1"),
    ("join_collapse_limit", "1"), ("constraint_exclusion", "off"), ("enable_partition_pruning", "off"),
    ("default_statistics_target", "1"), ("gin_fuzzy_search_limit", "1"), ("vacuum_cost_delay", "100"),
]  # fmt: skip
REFUSED: Final = [
    ("client_encoding", "SQL_ASCII", InvalidInput),
    ("client_encoding", "LATIN1", InvalidInput),
    ("client_encoding", "EUC_JP", InvalidInput),
    ("default_transaction_read_only", "on", StoreUnavailable),
]


class Answers(NamedTuple):
    """What the functions answered, and what they wrote."""

    answers: list[Any]
    written: list[Any]


def run_all(connection: psycopg.Connection[Any]) -> list[Any]:
    """Call each function once through the library, in the application's session."""
    found: list[Any] = []
    with connection.transaction():
        outbox.publish(connection, "orders", key="café ☃", body="x", headers={"a": "ü\\'"}, tags=["eu"])
        outbox.publish(connection, "orders", body=b"\x00\\x5c")
        once = [outbox.publish_once(connection, "orders", key="k\\", body="x", dedup_id="d'\\") for _ in range(2)]
        # The message without a key may have got the same LP, and its first seq.
        found.append((once[1].seq - once[0].seq, [one.duplicate for one in once]))
        at = datetime(2030, 2, 1, 12, 30, 0, 123456, tzinfo=UTC)
        number = outbox.publish_delayed(connection, "orders", key="k", body="later", at=at)
        outbox.publish_delayed(connection, "orders", key="k", body="later", at=at)
        found.append(outbox.cancel_delayed(connection, number))
    with outbox.transaction(connection) as tx:
        for number in range(4):
            tx.publish("orders", key=None if number % 2 else "many", body=str(number), headers={"n": "ß"})
        tx.publish("orders", key="NULL", body="named so")
    with outbox.transaction(connection) as tx:
        tx.publish("orders", key="many", body="once", dedup_id="e")
        tx.publish("orders", key="many", body="once", dedup_id=None)
    entry = InboxEntry(1, "billing", "orders", Identity(1, 5, 1))
    with connection.transaction(), caller_errors(connection):
        facts = {"group_id": 1, "lp": 5, "source": 1, "key": "k\\", "seq": 3, "epoch": 7, "replay": 0}
        found += [run_one(connection, Statement(query("fence"), facts)) for _ in range(2)]
        found.append(run_one(connection, Statement(query("fence"), facts | {"epoch": 6})))
        many = {"lps": [5, 6], "sources": [1, 1], "keys": ["NULL", None], "seqs": [4, 5], "epochs": [7, 7]}
        found.append(run_one(connection, Statement(query("fence_many"), {"group_id": 1, "replays": [0, 0], **many})))
        alone = many | {"keys": None, "seqs": [6, 7]}
        found.append(run_one(connection, Statement(query("fence_many"), {"group_id": 1, "replays": [0, 0], **alone})))
        record_effect(connection, entry)
    with pytest.raises(AlreadyApplied), connection.transaction():
        record_effect(connection, entry)
    versions = Versions("state")
    for version in (2, 1):
        with connection.transaction():
            message = Event(b"\\x%d" % version, {"h": "ü"}, Identity(1, 5, version))
            found.append(versions.take(connection, message, entity="e\\", version=version))
    with connection.transaction():
        found.append(versions.take_released(connection))
        found.append(versions.set(connection, entity="e\\", version=9))
    return found


class Event(NamedTuple):
    body: bytes
    headers: dict[str, str]
    identity: Identity


@pytest.fixture
def application(database_dsn: str, new_sessions: None) -> Iterator[str]:
    """The address of the database for a role with the rights to publish and to consume."""
    with connect(database_dsn) as owner:
        owner.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD 'secret'")
        grant_application(database_dsn, ROLE)
        owner.execute(query("outbox_topic_put"), {"topic_id": 1, "name": "orders", "body_limit": 1_000})
        owner.execute(query("outbox_counters_put"), {"topic_id": 1})
        yield make_conninfo(database_dsn, user=ROLE, password="secret")
        owner.execute(f"DROP OWNED BY {ROLE}")
        owner.execute(f"DROP ROLE {ROLE}")


def written(dsn: str) -> list[Any]:
    """Return what the tables hold, without times and what is by chance, and empty them."""
    statements = (
        "SELECT key, headers, body FROM mqlayer_app.outbox ORDER BY body, key, headers",
        "SELECT key, body, due_at FROM mqlayer_app.delayed ORDER BY delayed_id",
        "SELECT group_id, lp, source_id, key, replay, seq FROM mqlayer_app.fence_applied ORDER BY 2, 4",
        "SELECT id FROM mqlayer_app.inbox ORDER BY id",
        "SELECT name, entity, version FROM mqlayer_app.entity_version",
    )
    tables = "outbox, delayed, dedup, fence_applied, fence_epoch, inbox, entity_version, held_version, held_total"
    found = [ask_postgres(dsn, statement) for statement in statements]
    # Of a few rows it takes less than to truncate.
    deleted = [f"DELETE FROM mqlayer_app.{table.strip()}" for table in tables.split(",")]
    ask_postgres(dsn, "; ".join([*deleted, "UPDATE mqlayer_app.counter SET seq = 0 WHERE seq <> 0"]))
    return found


def answers_under(application: str, database_dsn: str, setting: str = "", value: str = "") -> Answers:
    """Run all functions in a new session of the role with one setting."""
    ask_postgres(database_dsn, f"ALTER ROLE {ROLE} RESET ALL")
    if setting == "search_path" or (setting and value == ""):
        ask_postgres(database_dsn, f"ALTER ROLE {ROLE} SET {setting} = {value or repr('')}")
    elif setting:
        shown = value if setting == "DateStyle" else f"'{value}'"
        ask_postgres(database_dsn, f"ALTER ROLE {ROLE} SET {setting} = {shown}")
    try:
        with closing(psycopg.connect(application, autocommit=True)) as connection:
            answers = run_all(connection)
    finally:
        found = written(database_dsn)
    return Answers(answers, found)


def test_each_setting_of_a_role_leaves_every_answer_as_it_is(application: str, database_dsn: str) -> None:
    wanted = answers_under(application, database_dsn)
    assert len(wanted.written[0]) == 10
    different = []
    for setting, value in SAME:
        try:
            found: object = answers_under(application, database_dsn, setting, value)
        except (MqlayerError, psycopg.Error) as error:
            found = error
        if found != wanted:
            different.append((setting, value, found))
    assert different == []


@pytest.mark.parametrize(("setting", "value", "error"), REFUSED)
def test_a_setting_under_which_an_answer_would_be_another_one_is_named(
    application: str, database_dsn: str, setting: str, value: str, error: type[MqlayerError]
) -> None:
    with pytest.raises(error, match=setting):
        answers_under(application, database_dsn, setting, value)


def test_an_impatient_session_is_told_which_limit_ended_its_statement(application: str, database_dsn: str) -> None:
    with closing(psycopg.connect(application)) as one, closing(psycopg.connect(application)) as two:
        outbox.publish(one, "orders", key="k", body="first")
        for setting in ("statement_timeout", "lock_timeout"):
            two.execute(f"SET {setting} = '20ms'")
            with pytest.raises(MqlayerError, match=setting.replace("_", " ")):
                outbox.publish(two, "orders", key="k", body="second")
            two.rollback()


FACTS: Final = {"group_id": 1, "lp": 5, "source": 1, "key": "k", "seq": 3, "epoch": 7, "replay": 0}
MANY: Final = {"lps": [5], "sources": [1], "keys": ["m"], "seqs": [4], "epochs": [7], "replays": [0], "group_id": 1}
CALLS: Final[dict[str, Callable[[psycopg.Connection[Any]], object]]] = {
    "publish": lambda connection: outbox.publish(connection, "orders", body="x"),
    "publish_once": lambda connection: outbox.publish_once(connection, "orders", key="k", body="x", dedup_id="d"),
    "publish_delayed": lambda connection: outbox.publish_delayed(
        connection, "orders", key="k", body="x", at=datetime(2030, 2, 1, tzinfo=UTC)
    ),
    "fence": lambda connection: run_one(connection, Statement(query("fence"), FACTS)),
    "fence_many": lambda connection: run_one(connection, Statement(query("fence_many"), MANY)),
    "inbox": lambda connection: record_effect(connection, InboxEntry(1, "billing", "orders", Identity(1, 5, 1))),
    "versions": lambda connection: Versions("state").set(connection, entity="e", version=9),
}
WRAPPED: Final = """
    CREATE FUNCTION pg_temp.wrapped() RETURNS void LANGUAGE plpgsql SET synchronous_commit = 'on' AS $$ BEGIN
        PERFORM mqlayer_app.publish_v1('orders', 'k', 'x');
        PERFORM mqlayer_app.fence_v1(1, 5::smallint, 1, 'k', 3, 7);
    END $$
"""


def waits_for_the_disk(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute("SELECT current_setting('synchronous_commit')").fetchone()
    return row == ("on",)


@pytest.mark.parametrize("name", CALLS)
def test_what_a_python_call_writes_is_on_the_disk_at_its_commit(name: str, application: str) -> None:
    """Its statement is in no function of the caller's, so nothing is restored behind it."""
    with closing(psycopg.connect(application, autocommit=True)) as connection:
        connection.execute("SET synchronous_commit = off")
        with connection.transaction():
            CALLS[name](connection)
            assert waits_for_the_disk(connection)


def test_behind_a_callers_function_with_a_setting_of_its_own_the_transaction_has_to_say_so(application: str) -> None:
    """SECURITY.md, "Synchronous commits": Postgres takes the session's value back where such a function returns."""
    with closing(psycopg.connect(application, autocommit=True)) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute(WRAPPED)
        with connection.transaction(force_rollback=True):
            connection.execute("SELECT pg_temp.wrapped()")
            assert not waits_for_the_disk(connection), "close the row in docs/limitations.md"
        with connection.transaction():
            connection.execute("SET LOCAL synchronous_commit = on")
            connection.execute("SELECT pg_temp.wrapped()")
            assert waits_for_the_disk(connection)
