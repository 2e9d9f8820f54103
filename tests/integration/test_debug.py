"""`mqlayer debug`: a key's messages to a handler, what is recorded of them, and no effect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from mqlayer import App, Context
from mqlayer.postgres.rights import Right
from mqlayer.relay import relay_once
from tests.fixtures.commands import Commands
from tests.fixtures.roles import role_dsn
from tests.fixtures.wait import wait_until
from tests.proof.archive_update import archive_all
from tests.proof.world import QUICK, World

pytestmark = pytest.mark.world(partitions=0)

MODULE: Final = """
import os
from typing import Annotated
import psycopg
from psycopg_pool import ConnectionPool
import mqlayer

app = mqlayer.App()
seen = []

@app.consumer("orders", group="ledger")
def book(body: bytes, ctx: mqlayer.Context) -> None:
    seen.append((ctx.body, ctx.attempt))
    with psycopg.connect(os.environ["MQLAYER_TEST_OWNER"]) as connection:
        ctx.fence(connection)
        ctx.inbox(connection, name="again")
        connection.execute("INSERT INTO ledger VALUES (%s)", [body.decode()])
        rows = connection.execute("SELECT count(*) FROM ledger").fetchone()
    seen.append(("committed", rows))

async def abook(body: bytes, ctx: mqlayer.Context) -> None:
    async with await psycopg.AsyncConnection.connect(os.environ["MQLAYER_TEST_OWNER"]) as connection:
        await ctx.afence(connection)
        await connection.execute("INSERT INTO ledger VALUES (%s)", [body.decode()])

def in_block(body: bytes, ctx: mqlayer.Context) -> None:
    with psycopg.connect(os.environ["MQLAYER_TEST_OWNER"], autocommit=True) as connection, connection.transaction():
        ctx.inbox(connection)
        connection.execute("INSERT INTO ledger VALUES (%s)", [body.decode()])

def owner():
    with ConnectionPool(os.environ["MQLAYER_TEST_OWNER"], min_size=1, open=True) as pool:
        yield pool

def depends(body: bytes, ctx: mqlayer.Context, lent: Annotated[ConnectionPool, mqlayer.Depends(owner)]) -> None:
    with lent.connection() as connection:
        ctx.fence(connection)
        connection.execute("INSERT INTO ledger VALUES (%s)", [body.decode()])

def fails(body: bytes) -> None:
    amount = 7
    if body == b"m-1":
        raise ValueError("no such amount")

@app.consumer("orders", group="many", batch=mqlayer.BatchOf("key"))
def books(bodies: list[bytes]) -> None: ...

count = 3
"""


@pytest.fixture
def debugged(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Iterator[str]:
    """A key with two archived messages and one in Redis, the second of which failed in the group ledger."""
    world.add_topic("orders", partitions=1, archived=True)
    world.rows("CREATE TABLE ledger (body text)")
    world.publish(2, keys=1)
    relay_once(world.settings(), limits=QUICK)
    archive_all(world.database, prefix=world.key_prefix)
    app = App(world.settings(lease_s=2.0))

    @app.consumer("orders", group="ledger", attempt_limit=1)
    def failing(body: bytes, ctx: Context) -> None:
        if body == b"m-1":
            raise ValueError("out of stock")

    app.start()
    wait_until(lambda: world.rows("SELECT 1 FROM mqlayer.failed_attempt"), what="the failure is recorded")
    app.stop()
    world.publish(1, keys=1, tag="n")
    relay_once(world.settings(), limits=QUICK)
    (tmp_path / "debugged.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MQLAYER_DSN", role_dsn(world.dsn, Right.OPERATE))
    monkeypatch.setenv("MQLAYER_TEST_OWNER", world.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", world.key_prefix)
    monkeypatch.delenv("MQLAYER_APP_DSN", raising=False)
    yield "debugged"
    sys.modules.pop("debugged", None)
    sys.path.remove(str(tmp_path))


def test_a_handler_gets_a_keys_messages_in_order_and_nothing_commits(debugged: str, world: World) -> None:
    before = world.rows("SELECT count(*) FROM mqlayer_app.fence_applied"), world.rows("SELECT * FROM mqlayer.audit")
    said = Commands().text("debug", "orders", "key-0", "--handler", "debugged:book", "--yes")
    seen = sys.modules["debugged"].seen
    assert seen == [one for given in ((b"m-0", 1), (b"m-1", 2), (b"n-0", 1)) for one in (given, ("committed", (1,)))]
    assert "Nothing else is" in said
    assert "attempt 1 failed at" in said
    assert "ValueError: out of stock" in said
    assert said.count("handled, rolled back") == 3
    assert world.rows("SELECT * FROM ledger") == []
    after = world.rows("SELECT count(*) FROM mqlayer_app.fence_applied"), world.rows("SELECT * FROM mqlayer.audit")
    assert before == after


@pytest.mark.full
def test_async_handlers_blocks_and_what_handlers_depend_on_are_rolled_back_too(debugged: str, world: World) -> None:
    said = Commands().text("debug", "orders", "key-0", "--handler", "debugged:abook", "--last", "1", "--yes")
    assert "1 message of key" in said
    assert "handled, rolled back" in said
    said = Commands().text("debug", "orders", "key-0", "--handler", "debugged:in_block", "--yes")
    assert said.count("handled up to its commit, rolled back") == 3
    said = Commands().text("debug", "orders", "key-0", "--handler", "debugged:depends", "--yes")
    assert said.count("handled, rolled back") == 3
    assert world.rows("SELECT * FROM ledger") == []


def test_a_failure_opens_the_debugger_and_ends_it_as_it_ends_the_key(debugged: str) -> None:
    words = ["debug", "orders", "key-0", "--handler", "debugged:fails", "--group", "ledger", "--yes", "--pdb"]
    result = Commands()(*words, typed="p 'the amount', amount\nq\n")
    assert result.exit_code == 1
    assert "('the amount', 7)" in result.stdout
    assert "failed: ValueError: no such amount" in result.stdout
    assert "handled; it gave no connection to roll back" in result.stdout
    assert "n-0" not in result.stdout


def test_it_stops_before_a_message(debugged: str, world: World) -> None:
    ((lp,),) = world.rows("SELECT DISTINCT lp FROM mqlayer_app.outbox")
    ((source,),) = world.rows("SELECT DISTINCT source FROM mqlayer_archive.record")
    words = ["debug", "orders", "key-0", "--handler", "debugged:fails", "--yes", "--no-pdb"]
    result = Commands()(*words, "--break-before", f"{source}:{lp}:2", typed="p 'now', body\nc\n")
    assert "('now', b'm-1')" in result.stdout


@pytest.mark.full
def test_it_says_what_it_cannot_do(debugged: str, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    run = Commands()
    assert "debugged:book would be called" in run.text("debug", "orders", "key-0", "--handler", "debugged:book")
    assert not sys.modules["debugged"].seen
    with_handler = ["debug", "orders", "key-0", "--yes", "--handler"]
    assert "takes batches" in run.failure(*with_handler, "debugged:books")
    assert "give the name of a handler" in run.failure(*with_handler, "debugged:count")
    assert "module 'debugged' has no 'nobody'" in run.failure(*with_handler, "debugged:nobody")
    assert "message of key" in run.failure("debug", "orders", "other", "--yes", "--handler", "debugged:fails")
    missing = run.failure(*with_handler, "debugged:fails", "--break-before", "1:2:3")
    assert "message 1:2:3 is not among the last 3" in missing
    monkeypatch.setenv("MQLAYER_DSN", role_dsn(world.dsn, Right.VIEW))
    assert "mqlayer grant" in run.failure(*with_handler, "debugged:fails")
