"""Schemas of topics' bodies: stored at the first start, compared at each later one, shown and compared by command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import mqlayer
from mqlayer.domain.body_schemas import normalized, schema_of
from mqlayer.errors import IncompatibleSchema, NotFound, PermissionDenied
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.topics import load_schemas, set_schema_mode, store_schema
from tests.fixtures.commands import Commands
from tests.fixtures.kept_connections import ask_postgres, kept_session
from tests.fixtures.roles import Roles
from tests.fixtures.wait import wait_until
from tests.proof.world import World


class V1(msgspec.Struct):
    customer: str


class V2(msgspec.Struct):
    customer: str
    amount: int = 0


class Broken(msgspec.Struct):
    customer: int


def schema(body: Any) -> dict[str, Any]:
    return normalized(schema_of(body) or {})


def struct(fields: int) -> dict[str, Any]:
    """A schema with so many optional fields."""
    return {"type": "object", "properties": {f"f{number}": {"type": "string"} for number in range(fields)}}


def start(world: World, body: Any) -> None:
    """Run a consumer of a typed topic for a moment."""
    app = mqlayer.App(world.settings())
    app.consumer(mqlayer.Topic("orders", body=body), group="ledger")(lambda order: None)
    try:
        app.start()
    finally:
        app.stop()


def bodies(world: World) -> list[dict[str, Any]]:
    return [one.schema for one in load_schemas(world.database, "orders").versions]


def test_the_first_start_stores_a_schema_and_a_later_one_the_next(world: World) -> None:
    """Also in a rolling deployment: a process of the former version goes on starting."""
    for body in (V1, V1, V2, V1):
        start(world, body)
    first, second = load_schemas(world.database, "orders").versions
    assert (first.version, first.schema, first.mode) == (1, schema(V1), "backward")
    assert (second.version, second.schema) == (2, schema(V2))
    assert first.actor.startswith("group ledger on ")
    assert first.stored_at is not None
    assert second.stored_at is not None
    assert first.stored_at < second.stored_at


def test_a_start_that_would_break_readers_is_refused_and_joins_no_group(world: World) -> None:
    store_schema(world.database, "orders", schema(V2), actor="a test")
    with pytest.raises(IncompatibleSchema, match=r"version 1 at `\$\.customer`: readers take integer, not string"):
        start(world, Broken)
    assert bodies(world) == [schema(V2)]
    assert ask_postgres(world.dsn, "SELECT count(*) FROM mqlayer.consumer_group") == [(0,)]


def test_bytes_have_no_schema(world: World) -> None:
    start(world, bytes)
    assert bodies(world) == []


def test_after_a_break_that_was_allowed_the_former_version_is_judged_anew(world: World) -> None:
    runtime = world.runtime(actor="ann")

    def store(body: Any, *, anew: bool = False) -> int:
        return store_schema(world.database, "orders", schema(body), actor="a test", anew=anew)

    store(V1)
    assert set_schema_mode(runtime, "orders", "none")
    assert store(Broken) == 2
    # While both run, neither is stored again.
    assert (store(V1), store(Broken)) == (1, 2)
    assert set_schema_mode(runtime, "orders", "backward")
    assert not set_schema_mode(runtime, "orders", "backward")
    with pytest.raises(IncompatibleSchema, match="bodies of version 2"):
        store(V1)
    assert set_schema_mode(runtime, "orders", "none")
    assert store(V1, anew=True) == 3
    facts = ask_postgres(world.dsn, "SELECT actor, facts FROM mqlayer.audit WHERE act = 'topic set' ORDER BY at")
    assert facts[0] == ("ann", {"before": {"schema_mode": "backward"}, "schema_mode": "none"})
    with pytest.raises(NotFound, match="mqlayer topic create gone"):
        store_schema(world.database, "gone", schema(V1), actor="a test")


@pytest.mark.parametrize(("other", "expected"), [(V1, [V1]), (V2, None), (Broken, None)])
def test_of_two_that_start_at_once_one_stores_the_first_version(world: World, other: Any, expected: Any) -> None:
    """Both read that there is none, and wait for one another; who comes second compares again."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        "AND query LIKE '%mqlayer.topic_schema_put%'"
    )

    def store(body: Any) -> int | IncompatibleSchema:
        with closing(Database(world.dsn)) as database:
            try:
                return store_schema(database, "orders", schema(body), actor="a test")
            except IncompatibleSchema as error:
                return error

    with ThreadPoolExecutor(2) as pool:
        with kept_session(world.dsn) as holder:
            holder.execute("SELECT FROM mqlayer.topic FOR UPDATE")
            asked = [pool.submit(store, body) for body in (V1, other)]
            wait_until(lambda: ask_postgres(world.dsn, waiting) == [(2,)], what="both wait")
        answers = [one.result(10) for one in asked]
    refused = [one for one in answers if isinstance(one, IncompatibleSchema)]
    stored = bodies(world)
    assert min(one for one in answers if isinstance(one, int)) == 1
    assert len(refused) == (1 if other is Broken else 0)
    if expected:
        assert stored == [schema(one) for one in expected]
    elif other is Broken:
        assert stored in ([schema(V1)], [schema(Broken)])
    else:
        assert sorted(map(str, stored)) == sorted(map(str, (schema(V1), schema(V2))))


def test_a_mode_that_changes_meanwhile_makes_a_process_compare_again(world: World) -> None:
    put = "SELECT mqlayer.topic_schema_put_v1('orders', %s, %s, '{}', 'a test')"
    assert ask_postgres(world.dsn, put, [1, "full"]) == [(False,)]
    assert ask_postgres(world.dsn, put, [2, "backward"]) == [(False,)]
    assert ask_postgres(world.dsn, put, [1, "backward"]) == [(True,)]
    assert ask_postgres(world.dsn, put, [1, "backward"]) == [(False,)]
    for version in (0, 1001, None):
        with pytest.raises(psycopg.Error, match="its bounds are 1 and 1000"):
            ask_postgres(world.dsn, put, [version, "backward"])


def test_who_publishes_or_consumes_a_topic_may_store_its_schema(world: World, roles: Roles) -> None:
    may = [(Right.CONSUME, "orders/ledger"), (Right.CONSUME, ""), (Right.PUBLISH, ""), (Right.OPERATE, "")]
    for version, (right, scope) in enumerate(may, start=1):
        made = struct(version)
        with closing(Database(roles.login(right, scopes=[scope]))) as database:
            assert store_schema(database, "orders", made, actor="a test") == version
            stored = load_schemas(database, "orders").versions[-1]
            assert (stored.actor, stored.role) == ("a test", Roles.name_of(database.dsn))
    for right, scope in ((Right.CONSUME, "mails/ledger"), (Right.VIEW, "")):
        with (
            closing(Database(roles.login(right, scopes=[scope]))) as database,
            pytest.raises(PermissionDenied, match="mqlayer grant"),
        ):
            store_schema(database, "orders", struct(len(may) + 1), actor="a test")


@pytest.fixture
def run(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Iterator[Commands]:
    """Commands in a directory with a module `shop_bodies`, on this world."""
    for name, value in (("MQLAYER_DSN", world.dsn), ("MQLAYER_KEY_PREFIX", world.key_prefix)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MQLAYER_APP_DSN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop_bodies.py").write_text(
        "import sys\nimport mqlayer\nV1, V2, Broken = sys.topic_schema_bodies\n"
        "one, two, broken = (mqlayer.Topic('orders', body=body) for body in (V1, V2, Broken))\n"
        "raw = mqlayer.Topic('orders', body=bytes)\nmails = mqlayer.Topic('mails', body=V1)\n"
    )
    monkeypatch.setattr(sys, "topic_schema_bodies", (V1, V2, Broken), raising=False)
    before = sys.path[:]
    yield Commands()
    sys.modules.pop("shop_bodies", None)
    sys.path[:] = before


def test_commands_store_show_and_compare(run: Commands) -> None:
    assert "no schema is stored" in run.text("topic", "schema", "orders")
    assert run.lines("topic", "schema", "orders") == []
    assert "no schema is stored" in run.failure("topic", "schema", "orders", "--version", "1")
    assert run.text("topic", "schema", "orders", "--store", "shop_bodies:one") == (
        "the schema of shop_bodies:one is version 1 of topic orders\n"
    )
    assert "version 2" in run.text("topic", "schema", "orders", "--store", "shop_bodies:two")
    shown = run.text("topic", "schema", "orders")
    assert shown.startswith("version 2 of 2, stored by ")
    assert '    "amount": {' in shown
    (facts,) = run.lines("topic", "schema", "orders", "--version", "1")
    assert (facts["schema"], facts["topic_mode"], facts["version"]) == (schema(V1), "backward", 1)
    assert [one["version"] for one in run.lines("topic", "schema", "orders", "--all")] == [1, 2]
    (change,) = run.lines("topic", "schema", "orders", "--diff", "1..2")
    assert (change["path"], change["change"], change["breaks_new_readers"]) == ("$.amount", "added", False)
    assert "added: integer, optional" in run.text("topic", "schema", "orders", "--diff", "1..2")
    assert run.text("topic", "schema", "orders", "--diff", "shop_bodies:two") == "no field differs\n"


def test_commands_refuse_what_breaks_readers_and_say_where(run: Commands) -> None:
    run.text("topic", "schema", "orders", "--store", "shop_bodies:one")
    compared = run("topic", "schema", "orders", "--diff", "shop_bodies:broken")
    assert compared.exit_code == 1
    assert "new readers of old bodies (readers take integer, not string)" in compared.stdout
    assert "is not compatible (mode backward)" in compared.stderr
    assert "`$.customer`" in run.failure("topic", "schema", "orders", "--store", "shop_bodies:broken")
    assert run.text("topic", "set", "orders", "--schema-mode", "none") == "the schema of topic orders has mode none\n"
    assert "version 2" in run.text("topic", "schema", "orders", "--store", "shop_bodies:broken")
    assert run.text("topic", "set", "orders", "--schema-mode", "none").endswith(", as before\n")


def test_commands_refuse_what_is_no_schema(run: Commands) -> None:
    refused = {
        "--store shop_bodies:mails": "is of topic 'mails', not of 'orders'",
        "--store shop_bodies:raw": "have no JSON Schema",
        "--store shop_bodies:V1": "give the name of a mqlayer.Topic",
        "--diff 1..2": "unknown version 1",
        "--diff 1..2 --version 1": "leave --version out",
    }
    for words, told in refused.items():
        assert told in run.failure("topic", "schema", "orders", *words.split())
