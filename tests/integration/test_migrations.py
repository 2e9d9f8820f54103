"""Migrations: forward, once, refused where the database is newer; and what a role may do after them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

import mqlayer
from mqlayer.domain.protocol import PROTOCOL
from mqlayer.errors import SchemaMismatch, StoreUnavailable, VersionRefused
from mqlayer.logs import event_of
from mqlayer.postgres.database import Database, connect
from mqlayer.postgres.migrations import SCHEMAS, SchemaName, check_schema, latest, migrate, migrations, script
from mqlayer.postgres.queries import queries, query
from tests.fixtures.failpoints import armed, broken_off_at
from tests.fixtures.forked_programs import run_python
from tests.fixtures.later_steps import LATER, WARNING, with_later_step
from tests.fixtures.roles import grant_application
from tests.fixtures.variants import some_of

ROLE = "mqlayer_test_application"
AFTER = PROTOCOL.most + 1


Steps = dict[SchemaName, list[int]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The numbers of all steps of each schema, with a later one that only the test has."""
    monkeypatch.setattr("mqlayer.postgres.migrations.migrations", with_later_step)
    return {schema: [step.number for step in with_later_step(schema)] for schema in SCHEMAS}


def numbers(dsn: str, schema: str) -> list[int]:
    with closing(psycopg.connect(dsn)) as connection:
        return [row[0] for row in connection.execute(f"SELECT number FROM {schema}.migration ORDER BY 1").fetchall()]


def test_migrating_runs_each_step_once(empty_database_dsn: str, steps: Steps) -> None:
    ran = [(m.schema, m.number) for m in migrate(empty_database_dsn)]
    assert ran == [(schema, number) for schema in SCHEMAS for number in steps[schema]]
    assert migrate(empty_database_dsn) == []


def test_two_at_once_run_each_step_once(empty_database_dsn: str, steps: Steps) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = [step for steps in pool.map(lambda _: migrate(empty_database_dsn), range(4)) for step in steps]
    # Whoever has the lock runs the next step, so that two may share them.
    assert sorted((m.schema, m.number) for m in done) == sorted(
        (schema, number) for schema in SCHEMAS for number in steps[schema]
    )


@pytest.mark.parametrize("nth", some_of([1, 2, 3], 3))
def test_a_migration_that_is_killed_leaves_whole_steps_and_the_next_goes_on(
    empty_database_dsn: str, steps: Steps, nth: int
) -> None:
    killed = {"MQLAYER_DSN": empty_database_dsn, **armed(f"migrate.before_record=kill@{nth}")}
    assert run_python("tests.fixtures.later_steps", env=os.environ | killed, timeout=60) == -9
    assert len(migrate(empty_database_dsn)) == sum(map(len, steps.values())) + 1 - nth
    assert {schema: numbers(empty_database_dsn, SCHEMAS[schema]) for schema in SCHEMAS} == steps


@pytest.mark.parametrize(
    ("schema", "there", "not_there"),
    [("control", "mqlayer", "mqlayer_app"), ("application", "mqlayer_app", "mqlayer")],
)
def test_each_schema_is_installed_on_its_own(
    empty_database_dsn: str, steps: Steps, schema: SchemaName, there: str, not_there: str
) -> None:
    migrate(empty_database_dsn, schema=schema)
    assert numbers(empty_database_dsn, there) == steps[schema]
    with pytest.raises(psycopg.errors.UndefinedTable):
        numbers(empty_database_dsn, not_there)


def test_a_step_that_breaks_leaves_nothing(empty_database_dsn: str, steps: Steps) -> None:
    with broken_off_at("migrate.before_record"):
        migrate(empty_database_dsn)
    assert len(migrate(empty_database_dsn)) == sum(map(len, steps.values()))


def test_an_older_database_is_refused_until_it_is_migrated_and_keeps_its_rows(
    database_dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(database_dsn) as connection:
        connection.execute("INSERT INTO mqlayer.job (name) VALUES ('kept')")
        monkeypatch.setattr("mqlayer.postgres.migrations.migrations", with_later_step)
        before = latest("control") - 1
        with pytest.raises(SchemaMismatch, match=f"schema {before}, .*schema {before + 1}: .*mqlayer migrate"):
            check_schema(connection, "control", "postgres")
        with caplog.at_level(logging.WARNING):
            assert migrate(database_dsn) == list(LATER.values())
        check_schema(connection, "control", "postgres")
        assert connection.execute("SELECT name FROM mqlayer.job").fetchall() == [("kept",)]
    told = [record.__dict__.get("text") for record in caplog.records if event_of(record) == "migration_notice"]
    assert told == [WARNING] * 2


def test_a_function_of_a_later_step_looks_its_names_up_in_pg_temp_last(database_dsn: str, steps: Steps) -> None:
    migrate(database_dsn)
    with connect(database_dsn) as connection:
        found = connection.execute("SELECT proconfig FROM pg_proc WHERE proname = 'notes_v1'").fetchall()
    assert sorted(found) == [([f"search_path=pg_catalog, {name}, pg_temp"],) for name in sorted(SCHEMAS.values())]


def test_a_newer_database_serves_this_code_until_its_version_is_in_force(database_dsn: str) -> None:
    with connect(database_dsn) as connection:
        connection.execute("INSERT INTO mqlayer.migration (number, name) VALUES (9999, 'from_the_future')")
        connection.execute("UPDATE mqlayer.protocol SET serves_to = serves_to + 1")
        assert check_schema(connection, "control", "postgres").pending
    assert migrate(database_dsn) == [], "the step of another release's start"
    assert numbers(database_dsn, "mqlayer") == [*(step.number for step in migrations("control")), 9999]


def test_a_newer_database_is_refused_and_stays(database_dsn: str) -> None:
    with connect(database_dsn) as connection:
        connection.execute("INSERT INTO mqlayer.migration (number, name) VALUES (9999, 'from_the_future')")
        versions = f"serves_from = {AFTER}, in_force = {AFTER}, serves_to = {AFTER}"
        connection.execute(f"UPDATE mqlayer.protocol SET {versions}")
        with pytest.raises(SchemaMismatch, match="upgrade mqlayer"):
            check_schema(connection, "control", "postgres")
    with pytest.raises(VersionRefused, match=f"protocol {AFTER}, this code needs protocol {PROTOCOL}: upgrade mqlayer"):
        migrate(database_dsn)
    assert numbers(database_dsn, "mqlayer") == [*(step.number for step in migrations("control")), 9999]


def test_a_missing_schema_is_an_error_that_says_what_to_run(empty_database_dsn: str) -> None:
    with Database(empty_database_dsn) as database:
        with database.connection() as connection, pytest.raises(SchemaMismatch, match="mqlayer migrate"):
            check_schema(connection, "control", database.address)
        with pytest.raises(SchemaMismatch, match="mqlayer migrate"):
            database.transaction(lambda connection: connection.execute(query("node_list")))


def test_a_database_that_is_away_is_named_without_its_password() -> None:
    with pytest.raises(StoreUnavailable) as refused:
        migrate("postgresql://app:secret@127.0.0.1:1/shop")
    assert "127.0.0.1:1/shop" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_printed_script_does_what_the_runner_does(empty_database_dsn: str, steps: Steps) -> None:
    with closing(psycopg.connect(empty_database_dsn, autocommit=True)) as connection:
        connection.execute(script())
    assert numbers(empty_database_dsn, "mqlayer") == steps["control"]
    assert migrate(empty_database_dsn) == []


@pytest.mark.parametrize("schema", SCHEMAS)
def test_migrations_are_numbered_without_holes_and_named_by_kind(schema: SchemaName) -> None:
    found = migrations(schema)
    assert [step.number for step in found] == list(range(1, len(found) + 1))
    assert all(step.name.startswith(("expand_", "contract_")) for step in found)


@pytest.fixture
def as_application(database_dsn: str) -> Iterator[psycopg.Connection]:
    """A connection of a role that got the rights to publish and to consume, and nothing else."""
    with connect(database_dsn) as owner:
        owner.execute(f"DROP ROLE IF EXISTS {ROLE}")
        owner.execute(f"CREATE ROLE {ROLE}")
        grant_application(database_dsn, ROLE)
        owner.execute(query("outbox_topic_put"), {"topic_id": 1, "name": "orders", "body_limit": 100})
        owner.execute(query("outbox_counters_put"), {"topic_id": 1})
        with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
            connection.execute(f"SET ROLE {ROLE}")
            yield connection
        owner.execute(f"DROP OWNED BY {ROLE}")
        owner.execute(f"DROP ROLE {ROLE}")


def test_an_application_may_publish_and_fence(as_application: psycopg.Connection) -> None:
    row = as_application.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'x')").fetchone()
    assert row == (1,)
    row = as_application.execute("SELECT mqlayer_app.publish_many_v1('{orders,orders}', '{k,l}', '{x,y}')").fetchone()
    assert row == (2,)
    row = as_application.execute("SELECT * FROM mqlayer_app.fence_v1(1, 5::smallint, 1, 'k', 1, 7)").fetchone()
    assert row == ("current", 7)
    row = as_application.execute("SELECT mqlayer_app.fence_raise_v1(1, 0::smallint, 10::smallint, 99)").fetchone()
    assert row == (1,), "nine LPs are new under the epoch, one is raised to it"


@pytest.mark.parametrize(("before", "after"), [("0", "1min"), ("2min", "1min"), ("5s", "5s")])
def test_a_fenced_transaction_ends_after_a_minute_of_idleness_at_the_latest(
    as_application: psycopg.Connection, before: str, after: str
) -> None:
    """A process that is stopped inside of it holds its LP's row until then."""
    as_application.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, false)", (before,))
    shown = "SELECT current_setting('idle_in_transaction_session_timeout')"
    with as_application.transaction():
        as_application.execute("SELECT * FROM mqlayer_app.fence_v1(1, 5::smallint, 1, 'k', 1, 7)")
        assert as_application.execute(shown).fetchone() == (after,)
    assert as_application.execute(shown).fetchone() == (before,)


TABLES = [
    "topic", "counter", "outbox", "relayed", "quarantined", "voided",
    "identity", "relay", "lp_set", "fence_epoch", "fence_applied",
]  # fmt: skip
INNER = [
    "SELECT mqlayer_app.fence_clean_v1('1 day', 10)",
    "SELECT mqlayer_app.outbox_rotate_v1(0::smallint)",
    "SELECT * FROM mqlayer.node",
]


def test_an_application_may_do_nothing_else(as_application: psycopg.Connection) -> None:
    reads = [f"SELECT * FROM mqlayer_app.{table}" for table in TABLES]
    deletes = [f"DELETE FROM mqlayer_app.{table}" for table in TABLES]
    for statement in (*reads, *deletes, *INNER):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            as_application.execute(statement)


def test_a_caller_can_not_lend_the_functions_other_objects(as_application: psycopg.Connection) -> None:
    """The functions run with their owner's rights: their search path is fixed."""
    rows = as_application.execute(
        "SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace "
        "WHERE nspname = 'mqlayer_app' AND prosecdef AND NOT coalesce(proconfig::text LIKE '%search_path%', false)"
    ).fetchall()
    assert rows == []


def test_every_named_query_can_be_prepared(database_dsn: str) -> None:
    with closing(psycopg.connect(database_dsn)) as connection:
        for name in queries():
            text = query(name).replace("%%", "%")
            for number, parameter in enumerate(sorted(set(re.findall(r"%\((\w+)\)[sb]", text))), 1):
                text = re.sub(rf"%\({parameter}\)[sb]", f"${number}", text)
            connection.execute(f"PREPARE {name} AS {text}".encode())


def test_every_named_query_is_used() -> None:
    root = Path(mqlayer.__file__).parent
    paths = [path for folder in (root, root / "workers", root / "spark") for path in folder.rglob("*.py")]
    code = "".join(path.read_text("utf-8") for path in paths)
    assert [name for name in queries() if f'"{name}"' not in code] == []
