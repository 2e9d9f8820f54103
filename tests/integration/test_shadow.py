"""`analytics shadow`: a new handler beside the old one over a snapshot, its effects in scratch schemas."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from psycopg.conninfo import conninfo_to_dict

from mqlayer.archive import create_snapshot
from mqlayer.domain.routing import lp_of
from mqlayer.postgres.rights import Right
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.commands import Commands
from tests.fixtures.roles import role_dsn
from tests.proof.runtimes import runtime_of

MODULE: Final = """
import os
import psycopg
import mqlayer

app = mqlayer.App()

def _booked(body, ctx, factor=1, schema=""):
    with psycopg.connect(os.environ["MQLAYER_TEST_ROLE"]) as connection:
        ctx.fence(connection)
        amount = int(body) * factor
        connection.execute(
            f"INSERT INTO {schema}account AS a (owner, total) VALUES (%s, %s) "
            "ON CONFLICT (owner) DO UPDATE SET total = a.total + excluded.total", [ctx.key, amount])
        connection.execute(f"INSERT INTO {schema}entry (owner, amount) VALUES (%s, %s)", [ctx.key, amount])

@app.consumer("orders", group="ledger")
def book(body: bytes, ctx: mqlayer.Context) -> None:
    _booked(body, ctx)

def same(body: bytes, ctx: mqlayer.Context) -> None:
    _booked(body, ctx)

def changed(body: bytes, ctx: mqlayer.Context) -> None:
    _booked(body, ctx, factor=2 if (ctx.key, body) == ("bob", b"3") else 1)

def fails(body: bytes, ctx: mqlayer.Context) -> None:
    if body == b"4":
        raise ValueError("no such amount")
    _booked(body, ctx)

def named(body: bytes, ctx: mqlayer.Context) -> None:
    _booked(body, ctx, schema="public.")

def unfenced(body: bytes, ctx: mqlayer.Context) -> None:
    pass

def plain(body: bytes) -> None:
    pass

async def later(body: bytes, ctx: mqlayer.Context) -> None:
    pass
"""
MADE: Final = """
CREATE TABLE account (owner text UNIQUE, total bigint NOT NULL);
CREATE TABLE entry (id serial PRIMARY KEY, owner text, amount bigint, booked_at timestamptz DEFAULT clock_timestamp());
INSERT INTO account VALUES ('ann', 1)
"""
WORDS: Final = ("analytics", "shadow", "orders", "--snapshot", "nightly", "--against", "handlers:book")
TABLES: Final = ("--table", "account", "--table", "entry", "--ignore", "entry.booked_at")


@pytest.fixture
def handlers(
    archived: ArchivedTopics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> Iterator[ArchivedTopics]:
    """The snapshot `nightly` of three keys and one message without, and tables that a role may only read."""
    for number in range(1, 6):
        for key in ("ann", "bob", "eve"):
            archived.put(key, body=b"%d" % number)
    archived.put(None, body=b"7")
    create_snapshot(runtime_of(archived.database), "nightly")
    role = role_dsn(archived.dsn, Right.ANALYZE)
    name, database = conninfo_to_dict(role)["user"], conninfo_to_dict(archived.dsn)["dbname"]
    archived.connection.execute(f"{MADE}; GRANT CREATE ON DATABASE {database} TO {name}; "
                                f"GRANT SELECT ON account, entry TO {name}".encode())  # fmt: skip
    (tmp_path / "handlers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MQLAYER_DSN", role)
    monkeypatch.setenv("MQLAYER_TEST_ROLE", role)
    monkeypatch.delenv("MQLAYER_APP_DSN", raising=False)
    yield archived
    sys.modules.pop("handlers", None)
    sys.path.remove(str(tmp_path))


def differences(said: Any) -> list[tuple[Any, ...]]:
    return [(one["key"], one["messages"], one["first"], one["old"], one["new"]) for one in said["differences"]]


def test_a_handler_that_does_the_same_differs_nowhere_and_leaves_nothing(handlers: ArchivedTopics) -> None:
    said = Commands().text(*WORDS, "--handler", "handlers:same", *TABLES)
    assert said.splitlines()[0] == ("16 messages of 4 keys; failed: 0 in the old handler, 0 in the new one")
    assert "no key differs" in said
    assert handlers.rows("SELECT owner, total FROM account") == [("ann", 1)]
    assert handlers.rows("SELECT count(*) FROM entry") == [(0,)]
    assert handlers.rows("SELECT nextval('entry_id_seq')") == [(1,)], "its sequence was not drawn from"
    assert handlers.rows("SELECT count(*) FROM mqlayer_app.fence_applied") == [(0,)]
    assert handlers.rows("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'mqlayer_shadow%%'") == []


def test_a_handler_changed_for_one_message_is_found_with_it(handlers: ArchivedTopics) -> None:
    result = Commands()(*WORDS, "--handler", "handlers:changed", *TABLES, "--json")
    assert result.exit_code == 1
    (said,) = map(json.loads, result.stdout.splitlines())
    assert differences(said) == [("bob", 5, f"1:{lp_of(b'bob')}:3", "handled", "handled")]
    assert said["differences"][0]["tables"] == (
        "public.account: 1 rows of the old, 1 of the new; public.entry: 1 rows of the old, 1 of the new"
    )
    one = Commands()(*WORDS, "--handler", "handlers:changed", *TABLES, "--key", "ann")
    assert one.exit_code == 0


def test_a_message_that_only_one_handler_fails_is_the_first_that_differs(handlers: ArchivedTopics) -> None:
    result = Commands()(*WORDS, "--handler", "handlers:fails", *TABLES, "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert differences(said) == [
        (key, 5, f"1:{lp_of(key.encode())}:4", "handled", "ValueError") for key in ("ann", "bob", "eve")
    ]
    assert (said["failed_old"], said["failed_new"], said["differing"]) == (0, 3, 3)


def test_effects_that_could_go_elsewhere_are_refused(handlers: ArchivedTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(handler: str, *words: str) -> str:
        return Commands().failure(*WORDS, "--handler", f"handlers:{handler}", *TABLES, *words)

    assert "takes no Context" in refused("plain")
    assert "is async: a shadow runs plain handlers" in refused("later")
    assert "gave no connection to ctx.fence or ctx.inbox for message" in refused("unfenced")
    assert Commands()(*WORDS, "--handler", "handlers:unfenced", *TABLES, "--allow-unfenced").exit_code == 1
    # A statement with the schema's name fails, as the role may only read: each message differs.
    named = Commands()(*WORDS, "--handler", "handlers:named", *TABLES, "--json")
    assert {one["new"] for one in json.loads(named.stdout)["differences"]} == {"InsufficientPrivilege"}
    assert "unknown table 'parcel'" in refused("same", "--table", "parcel")
    monkeypatch.setenv("MQLAYER_TEST_ROLE", handlers.dsn)
    assert "may change public.account" in refused("same")
    assert handlers.rows("SELECT owner, total FROM account") == [("ann", 1)]
    assert handlers.rows("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'mqlayer_shadow%%'") == []
