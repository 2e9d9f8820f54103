"""The application of the row `compose`: the service `consume` runs its consumer, and the host changes its accounts."""

from __future__ import annotations

import msgspec
import psycopg

import mqlayer
from mqlayer import outbox

TABLES = """
CREATE TABLE account (name text PRIMARY KEY, number int NOT NULL, balance int NOT NULL);
CREATE TABLE ledger (place bigserial PRIMARY KEY, account text NOT NULL, number int NOT NULL, balance int NOT NULL);
GRANT SELECT, INSERT, UPDATE ON account, ledger TO mqlayer_client;
GRANT USAGE ON SEQUENCE ledger_place_seq TO mqlayer_client;
"""
NOT_IN_SEQUENCE = """
SELECT account, numbers FROM (SELECT account, array_agg(number ORDER BY place) AS numbers FROM ledger GROUP BY account)
    AS booked WHERE numbers <> ARRAY(SELECT generate_series(1, cardinality(numbers)))
"""
NOT_EQUAL = """
SELECT name, account.number, account.balance, last.number, last.balance FROM account
    LEFT JOIN LATERAL (SELECT number, balance FROM ledger WHERE account = name ORDER BY place DESC LIMIT 1) AS last
    ON true WHERE (account.number, account.balance) IS DISTINCT FROM (last.number, last.balance)
"""
CHANGED = """
INSERT INTO account VALUES (%(name)s, 1, %(amount)s) ON CONFLICT (name) DO UPDATE
    SET number = account.number + 1, balance = account.balance + %(amount)s RETURNING number, balance
"""

COUNTS = "SELECT (SELECT count(*) FROM ledger), (SELECT coalesce(sum(number), 0) FROM account)"

app = mqlayer.App()


class Change(msgspec.Struct):
    """What an account has now."""

    account: str
    number: int
    balance: int


def change(connection: psycopg.Connection, name: str, amount: int) -> Change:
    """Change an account and publish that, in the caller's transaction."""
    row = connection.execute(CHANGED, {"name": name, "amount": amount}).fetchone()
    assert row is not None
    made = Change(name, *row)
    outbox.publish(connection, "orders", key=name, body=made)
    return made


@app.consumer("orders", group="ledger")
def book(made: Change, ctx: mqlayer.Context) -> None:
    """Book a change once, by the fence."""
    with psycopg.connect(app.settings.application_dsn()) as connection:
        ctx.fence(connection)
        connection.execute(
            "INSERT INTO ledger (account, number, balance) VALUES (%s, %s, %s)",
            (made.account, made.number, made.balance),
        )


def counts(connection: psycopg.Connection) -> tuple[int, int]:
    """Return how many changes are booked, and how many were made."""
    row = connection.execute(COUNTS).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


def faults(connection: psycopg.Connection) -> list[tuple[object, ...]]:
    """Return accounts with a change that is missing, double or out of turn, and those whose last change differs."""
    return [*connection.execute(NOT_IN_SEQUENCE).fetchall(), *connection.execute(NOT_EQUAL).fetchall()]
