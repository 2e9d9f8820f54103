"""Through a real pgbouncer: many clients on two server connections, and what needs a session of its own says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pydantic import SecretStr

from mqlayer import App, Receiver, Settings
from mqlayer.doctor import CheckStatus, diagnose
from mqlayer.errors import ConfigurationRefused
from mqlayer.postgres.arrow_reader import read_address
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.relay import relay_once
from mqlayer.topics import create_topic, register_node
from tests.fixtures.commands import Commands
from tests.fixtures.poolers import (
    Pooler,
    PoolerProgram,
    StartPooler,
    backend_pid,
    pooler_programs,
    some_pooler,
    tracking_pooler,
)
from tests.fixtures.variants import some_of
from tests.fixtures.whole_system import WholeSystem
from tests.fixtures.worker_stores import UseStores
from tests.proof.runtimes import runtime_of

MANY = 8
AGAIN = 40


@pytest.fixture(params=some_of(pooler_programs()[::-1] or (None,), 2), ids=str)
def program(request: pytest.FixtureRequest) -> PoolerProgram:
    """Each pgbouncer of this machine, the latest first."""
    return request.param or some_pooler()


@pytest.fixture
def pooler(start_pooler: StartPooler, database_dsn: str) -> Pooler:
    """Two server connections, each lent for a transaction."""
    return start_pooler(database_dsn, mode="transaction", size=2)


@pytest.fixture
def settings_of(key_prefix: str) -> Any:
    def make(dsn: str, **changes: Any) -> Settings:
        return Settings(dsn=SecretStr(dsn), key_prefix=key_prefix, lease_s=5.0, **changes)

    return make


def use(use_stores: UseStores, settings: Settings) -> None:
    """Let the worker's jobs go by the settings."""
    given = {"MQLAYER_DSN": settings.control_dsn(), "MQLAYER_KEY_PREFIX": settings.key_prefix}
    if settings.direct_dsn is not None:
        given["MQLAYER_DIRECT_DSN"] = settings.direct_dsn.get_secret_value()
    use_stores({**given, "MQLAYER_POOLER": settings.pooler})


def test_a_system_works_through_a_pooler_that_lends_sessions_by_transaction(
    start_pooler: StartPooler, program: PoolerProgram, database_dsn: str, redis_url: str, settings_of: Any,
    use_stores: UseStores,
) -> None:  # fmt: skip
    pooler = start_pooler(database_dsn, mode="transaction", size=2, program=program)
    settings = settings_of(pooler.dsn(database_dsn), direct_dsn=SecretStr(database_dsn))
    use(use_stores, settings)
    check_all_was_done(WholeSystem(settings, redis_url).run())


def test_a_system_works_through_a_pooler_that_lends_sessions_by_client(
    start_pooler: StartPooler, program: PoolerProgram, database_dsn: str, redis_url: str, settings_of: Any,
    use_stores: UseStores,
) -> None:  # fmt: skip
    """Also notifications are heard there, and statements prepared; only what Arrow reads is read directly."""
    pooler = start_pooler(database_dsn, mode="session", size=60, program=program)
    settings = settings_of(pooler.dsn(database_dsn), pooler="session")
    use(use_stores, settings)
    check_all_was_done(WholeSystem(settings, redis_url, reads_by=settings_of(database_dsn)).run())


def check_all_was_done(found: dict[str, Any]) -> None:
    """Every message came once to each group, in order, and is in the archive."""
    assert found["in order"]
    assert found["counts"]["redriven"] == found["counts"]["released"] == 1
    assert {len(bodies) for bodies in found["sinks"].values()} == {found["archived"]}
    assert len(found["read"]) == found["archived"]
    assert ("reachable", "broken") not in found["doctor"]


def ask_at_once(databases: list[Database]) -> list[set[Any]]:
    """Have each ask its own question again and again, side by side; return what each was told."""
    told: list[set[Any]] = [set() for _ in databases]

    def ask(number: int) -> None:
        for _ in range(AGAIN):
            with databases[number].connection() as connection:
                # The same shape for none: a statement of another client's would answer otherwise, or not at all.
                columns = sql.SQL(", ").join(sql.Literal(number) for _ in range(number + 1))
                told[number].add(connection.execute(sql.SQL("SELECT {}, %s::int").format(columns), [7]).fetchone())

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(databases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_no_client_runs_another_ones_prepared_statement(
    start_pooler: StartPooler, program: PoolerProgram, database_dsn: str, settings_of: Any, opened: ExitStack
) -> None:
    """The driver calls its first statement the same in each process: bound by name, it would be any client's."""
    pooler = start_pooler(database_dsn, size=2, program=program)
    dsn = settings_of(pooler.dsn(database_dsn)).control_dsn()
    told = ask_at_once([opened.enter_context(Database(dsn, max_size=1)) for _ in range(MANY)])
    assert told == [{(*[number] * (number + 1), 7)} for number in range(MANY)]


def test_statements_are_prepared_where_the_pooler_keeps_them_apart(
    start_pooler: StartPooler, database_dsn: str, settings_of: Any, opened: ExitStack
) -> None:
    pooler = start_pooler(database_dsn, size=2, program=tracking_pooler(), options={"max_prepared_statements": "100"})
    dsn = settings_of(pooler.dsn(database_dsn), pooler_prepares=True).control_dsn()
    databases = [opened.enter_context(Database(dsn, max_size=1)) for _ in range(MANY)]
    assert ask_at_once(databases) == [{(*[number] * (number + 1), 7)} for number in range(MANY)]
    # Each client's statement is in one of the two server connections at least: two transactions have both.
    with ExitStack() as open_now:
        connections = [open_now.enter_context(database.connection()) for database in databases[:2]]
        for connection in connections:
            open_now.enter_context(connection.transaction())
        kept = [
            connection.execute("SELECT statement FROM pg_prepared_statements").fetchall() for connection in connections
        ]
    assert len({statement for found in kept for (statement,) in found}) >= MANY


def test_nothing_is_set_in_sessions_that_others_are_lent_too(
    pooler: Pooler, database_dsn: str, settings_of: Any, redis_url: str
) -> None:
    names = ("search_path", "statement_timeout", "jit", "TimeZone", "enable_sort")

    def shown(connection: psycopg.Connection[Any]) -> set[tuple[Any, ...]]:
        text = "SELECT array_agg(current_setting(name)) FROM unnest(%s::text[]) AS name"
        return {tuple((connection.execute(text, [list(names)]).fetchone() or [()])[0]) for _ in range(4)}

    settings = settings_of(pooler.dsn(database_dsn), direct_dsn=SecretStr(database_dsn))
    with psycopg.connect(pooler.dsn(database_dsn), autocommit=True, prepare_threshold=None) as other:
        before = shown(other)
        with Database(settings.control_dsn()) as database:
            register_node(runtime_of(database), name="node-1", url=redis_url)
            create_topic(runtime_of(database, settings.key_prefix, application=database), "orders", partitions=1)
        relay_once(settings, at_most_s=5.0)
        diagnose(settings)
        assert shown(other) == before
        assert len(before) == 1


# -- what needs a session of its own ---------------------------------------------------------------------------------


@pytest.fixture
def pooled(pooler: Pooler, database_dsn: str, settings_of: Any, redis_url: str) -> Settings:
    """Settings with nothing but the pooler's address, and a topic."""
    settings: Settings = settings_of(pooler.dsn(database_dsn))
    with Database(settings.control_dsn()) as database:
        register_node(runtime_of(database), name="node-1", url=redis_url)
        create_topic(runtime_of(database, settings.key_prefix, application=database), "orders", partitions=1)
    return settings


def test_members_that_can_not_hear_of_changes_say_at_the_start_which_setting_lacks(pooled: Settings) -> None:
    app = App(pooled)

    @app.consumer("orders", group="g")
    def handle(body: bytes) -> None: ...

    with pytest.raises(ConfigurationRefused, match=r"LISTEN.*set MQLAYER_DIRECT_DSN"):
        app.start()
    with (
        pytest.raises(ConfigurationRefused, match=r"LISTEN.*set MQLAYER_DIRECT_DSN"),
        Receiver("orders", group="h", settings=pooled),
    ):
        pass


def test_a_relay_that_can_not_hear_of_changes_says_so_at_the_start(pooled: Settings) -> None:
    with pytest.raises(ConfigurationRefused, match=r"LISTEN.*set MQLAYER_DIRECT_DSN"):
        relay_once(pooled, at_most_s=5.0)


def test_a_migration_and_reading_by_arrow_want_the_direct_way(pooled: Settings, database_dsn: str) -> None:
    with pytest.raises(ConfigurationRefused, match=r"migration.*set MQLAYER_DIRECT_DSN"):
        migrate(pooled.control_dsn())
    with pytest.raises(ConfigurationRefused, match=r"Arrow.*set MQLAYER_DIRECT_DSN"):
        read_address(pooled.control_dsn())
    direct = pooled.model_copy(update={"direct_dsn": SecretStr(database_dsn)})
    assert migrate(direct.control_dsn()) == []
    assert read_address(direct.control_dsn()).password == ""


def test_the_application_database_has_a_way_of_its_own(pooled: Settings) -> None:
    dsn = pooled.control_dsn()
    apart = pooled.model_copy(update={"app_dsn": SecretStr(dsn), "direct_dsn": SecretStr(dsn)})
    with pytest.raises(ConfigurationRefused, match="set MQLAYER_APP_DIRECT_DSN"):
        migrate(apart.application_dsn(), schema="application")


def test_a_direct_address_that_leads_through_a_pooler_is_refused(pooled: Settings) -> None:
    wrong = pooled.model_copy(update={"direct_dsn": pooled.dsn})
    with Database(wrong.control_dsn()) as database, pytest.raises(ConfigurationRefused, match="MQLAYER_DIRECT_DSN"):
        database.check_direct("a test")


def test_a_pooler_that_is_said_to_lend_by_client_and_does_not_is_found_out(
    pooler: Pooler, database_dsn: str, settings_of: Any, opened: ExitStack
) -> None:
    busy = opened.enter_context(psycopg.connect(pooler.dsn(database_dsn)))
    database = Database(settings_of(pooler.dsn(database_dsn), pooler="session").control_dsn())
    opened.enter_context(database)

    def lend_again_and_again() -> None:
        for _ in range(AGAIN):
            with database.connection() as connection:
                mine = backend_pid(connection)
            # Takes the free one of the two, so that ours has the other.
            if backend_pid(busy) != mine:
                busy.rollback()

    with pytest.raises(ConfigurationRefused, match="MQLAYER_POOLER"):
        lend_again_and_again()


@pytest.mark.parametrize(
    ("name", "value", "fit"),
    [
        ("default_transaction_isolation", "serializable", "read committed"),
        ("default_transaction_read_only", "on", "off"),
        ("synchronous_commit", "off", "on"),
        ("DateStyle", "German", "ISO"),
    ],
)
def test_defaults_that_nothing_can_be_done_about_are_refused_with_what_to_change(
    start_pooler: StartPooler, database_dsn: str, settings_of: Any, name: str, value: str, fit: str
) -> None:
    change = sql.SQL("ALTER DATABASE {} SET {} = {}")
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        database = sql.Identifier(connection.info.dbname)
        connection.execute(change.format(database, sql.SQL(name), sql.Literal(value)))
        pooler = start_pooler(database_dsn, size=1)
        dsn = settings_of(pooler.dsn(database_dsn)).control_dsn()
        with Database(dsn) as refused, pytest.raises(ConfigurationRefused, match=rf"{name}.*ALTER ROLE"):
            refused.connection().__enter__()
        connection.execute(change.format(database, sql.SQL(name), sql.Literal(fit)))
    mended = settings_of(start_pooler(database_dsn, size=1).dsn(database_dsn)).control_dsn()
    with Database(mended) as fine, fine.connection() as lent:
        assert lent.execute("SELECT 1").fetchone() == (1,)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_commands_work_through_a_pooler(
    pooled: Settings, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    for name, value in {"MQLAYER_DSN": pooled.control_dsn(), "MQLAYER_KEY_PREFIX": pooled.key_prefix}.items():
        monkeypatch.setenv(name, value)
    commands = Commands()
    assert "orders" in commands.text("topic", "list")
    assert "node-1" in commands.text("route", "show", "orders")
    assert commands.text("topic", "create", "invoices", "--partitions", "2")
    assert commands.text("verify", "orders")


def test_the_doctor_names_a_pooler_and_the_way_past_it(pooled: Settings, database_dsn: str) -> None:
    (found,) = [one for one in diagnose(pooled) if one.check == "pooler"]
    assert (found.verdict, "MQLAYER_DIRECT_DSN" in found.fix) == (CheckStatus.WARNING, True)
    direct = pooled.model_copy(update={"direct_dsn": SecretStr(database_dsn)})
    (found,) = [one for one in diagnose(direct) if one.check == "pooler"]
    assert found.verdict is CheckStatus.OK
