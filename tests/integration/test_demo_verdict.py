"""The demo's verdict must see what it claims to see: each kind of fault is planted and found."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from examples.bank import effects
from examples.bank.figures import Details, Figures, Progress, Verdict
from examples.bank.show import Show, show_verdict
from examples.bank.stage import PROCESS_ROLES, ROLE
from tests.fixtures.roles import grant_application

SCHEMA = Path(effects.__file__).with_name("schema.sql")

# pgbench's own tables, as far as its transaction needs them, and that transaction.
TABLES = """
CREATE TABLE pgbench_accounts (aid int PRIMARY KEY, bid int, abalance int NOT NULL DEFAULT 0);
CREATE TABLE pgbench_branches (bid int PRIMARY KEY, bbalance int NOT NULL DEFAULT 0);
CREATE TABLE pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp);
INSERT INTO pgbench_accounts (aid, bid) VALUES (1, 1), (2, 1);
INSERT INTO pgbench_branches VALUES (1);
INSERT INTO mqlayer_app.topic VALUES (1, 'bank.entries', 1000);
INSERT INTO mqlayer_app.counter SELECT 1, lp, 'bank.entries', 1000 FROM generate_series(0, 1023) AS lp;
"""

Connection = psycopg.Connection[Any]
Message = tuple[str, bytes]
Deliver = Callable[[list[Message]], Verdict]


@pytest.fixture
def bank(database_dsn: str) -> Iterator[Connection]:
    """A bank of two accounts and one branch with four transactions, three on the first account."""
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        # Roles belong to the whole server, which other tests may use at the same time.
        for role in (ROLE, *PROCESS_ROLES):
            with suppress(psycopg.errors.DuplicateObject):
                connection.execute(f"CREATE ROLE {role}")
        grant_application(database_dsn, ROLE)
        connection.execute(TABLES)
        connection.execute(SCHEMA.read_bytes())
        for account, delta in ((1, 50), (1, -20), (2, 7), (1, 5)):
            transfer(connection, account, delta)
        yield connection
        for role in (ROLE, *PROCESS_ROLES):
            connection.execute(f"DROP OWNED BY {role}")
            with suppress(psycopg.errors.DependentObjectsStillExist, psycopg.errors.UndefinedObject):
                connection.execute(f"DROP ROLE {role}")


@pytest.fixture
def deliver(bank: Connection, database_dsn: str) -> Deliver:
    """Apply messages in the order given, and judge."""

    def to_the_model(messages: list[Message]) -> Verdict:
        for key, body in messages:
            entry = msgspec.json.decode(body, type=effects.Entry)
            facts = (key, entry.delta, entry.balance, entry.at)
            bank.execute("SELECT bank.apply_entry(%s, %s, %s, %s)", facts)
        return Figures(database_dsn, database_dsn).verdict()

    return to_the_model


def transfer(connection: Connection, account: int, delta: int) -> None:
    with connection.transaction():
        connection.execute("UPDATE pgbench_accounts SET abalance = abalance + %s WHERE aid = %s", (delta, account))
        connection.execute("UPDATE pgbench_branches SET bbalance = bbalance + %s WHERE bid = 1", (delta,))
        connection.execute("INSERT INTO pgbench_history VALUES (1, 1, %s, %s, now())", (account, delta))


def published(connection: Connection) -> list[Message]:
    return connection.execute("SELECT key, body FROM mqlayer_app.outbox ORDER BY id").fetchall()


def positions(messages: list[Message], key: str) -> list[int]:
    return [place for place, message in enumerate(messages) if message[0] == key]


def test_each_transaction_publishes_one_message_per_account_and_branch(bank: Connection) -> None:
    keys = [key for key, _ in published(bank)]
    assert sorted(keys) == ["a:1"] * 3 + ["a:2"] + ["b:1"] * 4


def test_what_is_applied_once_and_in_order_is_good(bank: Connection, deliver: Deliver) -> None:
    verdict = deliver(published(bank))
    assert verdict.good
    assert (verdict.transactions, verdict.messages, verdict.violations, verdict.lost) == (4, 8, 0, 0)
    assert 0 < verdict.p50_ms <= verdict.p99_ms


def test_two_messages_of_a_key_in_the_wrong_order_are_a_violation(bank: Connection, deliver: Deliver) -> None:
    messages = published(bank)
    first, second, _ = positions(messages, "a:1")
    messages[first], messages[second] = messages[second], messages[first]
    verdict = deliver(messages)
    assert not verdict.good
    assert (verdict.violations, verdict.lost, verdict.model_equal) == (3, 0, True)


def test_a_missing_message_is_lost(bank: Connection, deliver: Deliver) -> None:
    messages = published(bank)
    del messages[positions(messages, "a:1")[-1]]
    verdict = deliver(messages)
    assert not verdict.good
    assert (verdict.violations, verdict.lost, verdict.model_equal) == (0, 1, False)


def test_a_missing_message_in_the_middle_is_lost_and_breaks_the_chain(bank: Connection, deliver: Deliver) -> None:
    messages = published(bank)
    del messages[positions(messages, "b:1")[1]]
    verdict = deliver(messages)
    assert not verdict.good
    assert (verdict.violations, verdict.lost, verdict.model_equal) == (1, 1, False)


def test_a_message_applied_twice_is_a_violation_and_an_unequal_model(bank: Connection, deliver: Deliver) -> None:
    messages = published(bank)
    verdict = deliver([*messages, messages[-1]])
    assert not verdict.good
    assert (verdict.violations, verdict.lost, verdict.model_equal) == (1, 0, False)


def test_an_effect_of_nothing_makes_the_model_unequal(bank: Connection, deliver: Deliver) -> None:
    verdict = deliver([*published(bank), ("a:99", b'{"delta":0,"balance":0,"at":0}')])
    assert not verdict.good
    assert not verdict.model_equal


def test_nothing_at_all_is_not_good(bank: Connection, deliver: Deliver) -> None:
    assert not deliver([]).good


def test_an_archive_that_is_not_whole_or_not_clean_is_not_good(bank: Connection, deliver: Deliver) -> None:
    verdict = deliver(published(bank))
    assert replace(verdict, archived=8, audit="clean").good
    assert replace(verdict, archived=8).good, "Spark was left out"
    assert not replace(verdict, archived=7, audit="clean").good
    assert not replace(verdict, archived=8, audit="not clean").good


def test_the_table_says_what_a_slow_percentile_means(capsys: pytest.CaptureFixture[str]) -> None:
    calm = Verdict(10, 20, 0, 0, 3, 398.2, 11.3, 40.0, model_equal=True, archived=20)
    details = Details(9.5, 31.0, 3904.0, 1)
    show_verdict(calm, details, pop=False, on_stderr=False)
    show_verdict(replace(calm, p99_ms=2103.4, lost=1), details, pop=True, on_stderr=False)
    held, broken = capsys.readouterr().out.split("THE PROMISE IS BROKEN")
    assert "fewer than 1 in 100 waited for a fault" in held
    said = " ".join(broken.split())
    assert "p99 2,103 ms keys of the killed and the stopped consumer waited until its visibility timeout of 3 s" in said
    assert max(map(len, (held + broken).splitlines())) <= 80


def read_to_the_end(terminal: int) -> str:
    """Read all that comes until the other end closes, which Linux tells as an error."""
    shown = b""
    with suppress(OSError):
        while more := os.read(terminal, 1 << 16):
            shown += more
    return shown.decode()


def test_on_a_terminal_a_bar_says_how_far_the_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ours, theirs = os.openpty()
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read_to_the_end, ours)
        with os.fdopen(theirs, "w", encoding="utf-8") as terminal, Show(terminal) as show:
            show.step("faults", "one consumer is killed, and " + "a long story " * 5)
            show.update(Progress(12_012, 12_000, 0, [12.0, 2345.0]), done=10, total=20)
            show.note("said above the bar")
        shown = reading.result(20)
    os.close(ours)
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 80
    bar = re.compile(r"3/6 faults +.+ 12,000 of 12,012 applied, p99 2345 ms, 0 out of order")
    assert any(map(bar.fullmatch, lines)), lines
    assert any(re.match(r" *\d+\.\d s +said above the bar", line) for line in lines)
