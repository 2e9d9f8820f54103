"""Arguments of the SQL functions: each has bounds, and a value out of them is refused and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

import psycopg
import pytest

from mqlayer import outbox
from mqlayer.errors import InvalidInput, NotFound, OutOfRange
from mqlayer.postgres.database import connect, translate
from mqlayer.postgres.migrations import migrate
from mqlayer.postgres.queries import query
from tests.fixtures.functions import GOOD, call, signatures
from tests.fixtures.roles import grant_application
from tests.fixtures.servers import Postgres

ROLE: Final = "mqlayer_test_bounds"
TOO_LONG: Final = "x" * 1_000_001
SEQ_LIMIT: Final = 2**53 - 1
TYPE_LIMITS: Final = {"smallint": 2**15 - 1, "integer": 2**31 - 1, "bigint": 2**63 - 1}

# Every positive number of the type names something that may exist.
WHOLE_RANGE: Final = {"p_replay", "p_replays", "p_seek"}
# A source below 0 is of what a replay of the archive gave.
BELOW_ZERO: Final = {("fence_v1", "p_source_id"), ("fence_many_v1", "p_source_ids"), ("fence_many_v2", "p_source_ids")}
NULL_MEANS_NONE: Final = {
    ("publish_v1", "p_key"), ("publish_v1", "p_headers"), ("publish_v2", "p_key"), ("publish_v2", "p_headers"),
    ("publish_once_v1", "p_key"), ("publish_once_v1", "p_headers"),
    ("publish_at_v1", "p_key"), ("publish_at_v1", "p_headers"),
    ("publish_many_v1", "p_keys"), ("publish_many_v1", "p_headers"), ("publish_many_once_v1", "p_keys"),
    ("publish_many_once_v1", "p_headers"), ("publish_many_once_v1", "p_dedup_ids"),
    ("fence_v1", "p_key"), ("fence_many_v1", "p_keys"), ("fence_many_v2", "p_keys"),
    ("inbox_put_v1", "p_name"), ("inbox_put_v1", "p_replay"),
    ("version_take_v1", "p_version"), ("version_take_v1", "p_body"), ("version_take_v1", "p_headers"),
    ("version_take_v1", "p_origin"), ("version_set_v1", "p_version"), ("version_set_v1", "p_drop"),
    ("tags_v1", "p_tags"), ("large_body_put_v1", "p_bucket"), ("large_body_put_v1", "p_location"),
    ("large_body_put_v1", "p_data"),
}  # fmt: skip


class Argument(NamedTuple):
    """One argument of a function, by its signature."""

    function: str
    name: str
    type: str


def numbers(argument: Argument, element: str) -> Iterator[Any]:
    """Give numbers that no argument of the type may take."""
    if (argument.function, argument.name) not in BELOW_ZERO:
        yield -1
    yield -TYPE_LIMITS[element] - 1
    if argument.name not in WHOLE_RANGE or element == "smallint":
        yield TYPE_LIMITS[element]
    if element == "bigint":
        yield SEQ_LIMIT + 1
    if element == "smallint":
        yield 1025


def elements(argument: Argument, element: str) -> Iterator[Any]:
    """Give values of a scalar type that are out of all bounds."""
    if element in TYPE_LIMITS:
        yield from numbers(argument, element)
    elif element == "double precision":
        yield from (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300)
    elif element == "timestamp with time zone":
        yield from ("infinity", "-infinity", "294276-01-01", "4713-01-01 BC", "2100-01-01")
    elif element == "interval":
        yield from ("-1 second", "1 year -361 days -1 month", "178000000 years")
    elif element == "uuid":
        return
    elif element == "text":
        yield TOO_LONG
    elif element == "bytea":
        # The one that takes any body that a value of Postgres holds.
        if argument.function != "large_body_v1":
            yield TOO_LONG.encode()
    elif element == "jsonb":
        yield from (f'{{"a": "{TOO_LONG}"}}', "[]", "1", "{" + ",".join(f'"h{n}": ""' for n in range(33)) + "}")
    else:
        # Both of its values are fine.
        assert element == "boolean", f"no bad values are known of {argument}"


def bad_values(argument: Argument) -> Iterator[Any]:
    """Give values that the argument may not take."""
    if (argument.function, argument.name) not in NULL_MEANS_NONE:
        yield None
    if argument.type.endswith("[]"):
        good = GOOD[argument.function][argument.name][0]
        yield [good] * 10_001
        for element in elements(argument, argument.type.removesuffix("[]")):
            yield [element]
    else:
        yield from elements(argument, argument.type)


def refusal_of(
    connection: psycopg.Connection, function: str, arguments: dict[str, Any], types: dict[str, str]
) -> psycopg.Error | None:
    """Return how a call is refused, None for one that is not."""
    try:
        with connection.transaction():
            call(connection, function, arguments, types)
    except psycopg.Error as error:
        return error
    return None


@pytest.fixture(scope="module")
def dsn(postgres_server: Postgres) -> Iterator[str]:
    """A database with a topic, and a role with the rights to publish and to consume."""
    name = "mqlayer_test_bounds"
    postgres_server.drop_database(name)
    dsn = postgres_server.create_database(name)
    migrate(dsn)
    with connect(dsn) as owner:
        owner.execute(f"DROP ROLE IF EXISTS {ROLE}")
        owner.execute(f"CREATE ROLE {ROLE}")
        grant_application(dsn, ROLE)
        owner.execute(query("outbox_topic_put"), {"topic_id": 1, "name": "orders", "body_limit": 1_000_000})
        owner.execute(query("outbox_counters_put"), {"topic_id": 1})
    yield dsn
    postgres_server.drop_database(name)
    with connect(postgres_server.dsn("postgres")) as owner:
        owner.execute(f"DROP ROLE {ROLE}")


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        yield connection


def state_of(connection: psycopg.Connection) -> list[Any]:
    """Return what is in the tables that callers write to."""
    tables = ("outbox", "delayed", "fence_epoch", "fence_applied", "inbox", "entity_version", "held_version")
    return [connection.execute(f"SELECT count(*) FROM mqlayer_app.{table}").fetchone() for table in tables]


def test_every_argument_of_every_function_that_others_may_call_is_bounded(connection: psycopg.Connection) -> None:
    # These only say who calls, and answer yes or no.
    asked = {"caller_v1", "has_v1", "has_for_v1"}
    found = {name: types for name, types in signatures(connection, ROLE).items() if name not in asked}
    assert set(found) == set(GOOD), "a function that is granted needs a good call here, and bounds"
    for function, types in found.items():
        assert set(types) == set(GOOD[function]), function
        with connection.transaction(force_rollback=True):
            call(connection, function, GOOD[function], types)
    before = state_of(connection)
    for function, types in found.items():
        for name, type_ in types.items():
            for value in bad_values(Argument(function, name, type_)):
                shown = f"{function}({name} => {str(value)[:40]})"
                error = refusal_of(connection, function, GOOD[function] | {name: value}, types)
                assert error is not None, f"{shown} was taken"
                assert (error.sqlstate or "").startswith("MQ"), f"{shown}: {error}"
                assert error.diag.message_hint, shown
                assert len(str(error.diag.message_primary)) < 300, shown
                assert isinstance(translate(error), InvalidInput | NotFound), shown
    assert state_of(connection) == before


def test_a_call_can_not_add_a_fence_for_every_number_of_the_type(connection: psycopg.Connection) -> None:
    statement = "SELECT mqlayer_app.fence_raise_v1(1, (-32768)::smallint, 32767::smallint, 1)"
    with pytest.raises(psycopg.Error, match="p_lp_from is -32768, its bounds are 0 and 1023") as refused:
        connection.execute(statement)
    assert isinstance(translate(refused.value), OutOfRange)


def test_more_messages_than_a_call_takes_go_in_several_of_one_transaction(connection: psycopg.Connection) -> None:
    with outbox.transaction(connection) as tx:
        for number in range(20_500):
            tx.publish("orders", key=f"key-{number % 40}" if number % 3 else None, body=str(number))
    rows = connection.execute("SELECT key, convert_from(body, 'UTF8')::int FROM mqlayer_app.outbox ORDER BY lp, seq")
    by_key: dict[str | None, list[int]] = {}
    for key, number in rows.fetchall():
        by_key.setdefault(key, []).append(number)
    assert sum(map(len, by_key.values())) == 20_500
    assert all(numbers == sorted(numbers) for key, numbers in by_key.items() if key is not None)
    connection.execute("TRUNCATE mqlayer_app.outbox")
