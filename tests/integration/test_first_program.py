"""The README's first program, run as it says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.fixtures.forked_programs import Process, ask_python, start_python
from tests.fixtures.wait import wait_until

ROOT = Path(__file__).parents[2]

Run = Callable[..., str]
Start = Callable[..., Process]


@pytest.fixture
def environment(database_dsn: str, key_prefix: str) -> dict[str, str]:
    """What `mqlayer up` tells to export."""
    return {**os.environ, "MQLAYER_DSN": database_dsn, "MQLAYER_KEY_PREFIX": key_prefix}


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """Run a Python module to its end and return what it prints."""

    def to_end(*arguments: str) -> str:
        done = ask_python(*arguments, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return to_end


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start a Python module; it is asked to stop after the test, and does."""
    with ExitStack() as cleanup:

        def begin(*arguments: str) -> Process:
            process = start_python(*arguments, cwd=ROOT, env=environment)
            cleanup.callback(end, process)
            return process

        yield begin


def end(process: Process) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.slow
def test_each_order_is_booked_once_and_in_order(run: Run, start: Start, database_dsn: str, redis_url: str) -> None:
    run("mqlayer", "node", "register", "node-1", redis_url)
    run("mqlayer", "topic", "create", "orders")
    run("examples.first.orders")
    start("mqlayer", "relay")
    start("mqlayer", "consume", "examples.first.orders:app")

    with psycopg.connect(database_dsn, autocommit=True) as connection:

        def booked() -> list[int]:
            return [amount for (amount,) in connection.execute("SELECT amount FROM ledger").fetchall()]

        wait_until(lambda: len(booked()) >= 3, timeout_s=30, what="three orders booked")
        assert booked() == [10, 20, 30]
