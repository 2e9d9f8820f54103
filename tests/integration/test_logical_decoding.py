"""A publication of all tables, and logical slots, in a database of mqlayer: both work on, and nothing is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import psycopg
import pytest

from mqlayer.maintenance.topic_deletion import delete_topic
from mqlayer.outbox import adopt, rotate
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.relay import recover_now, relay_once
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.servers import StartPostgres
from tests.proof.lost_commits import expected, values
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

ONLY_INSERTED = {"outbox", "record", "outcome"}
"""Partitioned tables of which the partitions are changed, or none at all."""
SLOT, PUBLICATION = "warehouse", "everything"


def publish_all_tables(dsn: str) -> None:
    """Create the publication, as a user has it for a warehouse."""
    ask_postgres(dsn, f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")


@pytest.fixture
def published_world(world: World) -> Iterator[World]:
    """A world whose tables are all published."""
    publish_all_tables(world.dsn)
    yield world
    ask_postgres(world.dsn, f"DROP PUBLICATION {PUBLICATION}")


def recover(world: World) -> None:
    """Number an outbox anew that lacks commits."""
    world.rows("UPDATE mqlayer_app.identity SET timeline = -1")
    with Database(world.dsn) as database:
        assert recover_now(runtime_of(database, settings=world.settings(), application=database)) is not None


def test_each_table_that_is_changed_names_its_rows(database_dsn: str) -> None:
    """Of a published table, Postgres refuses to change or delete rows otherwise."""
    rows = ask_postgres(
        database_dsn,
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname LIKE 'mqlayer%%' AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT EXISTS ("
        "SELECT FROM pg_index i WHERE i.indrelid = c.oid AND CASE c.relreplident WHEN 'd' THEN i.indisprimary "
        "WHEN 'i' THEN i.indisreplident ELSE false END)",
        (),
    )
    assert {name for (name,) in rows} == ONLY_INSERTED


def test_an_outbox_that_is_published_is_numbered_anew(published_world: World) -> None:
    world = published_world
    world.publish(20, keys=4)
    assert relay_once(world.settings(), limits=QUICK) == 20
    world.publish(20, keys=4, tag="waiting")
    recover(world)
    assert relay_once(world.settings(), limits=QUICK) == 20
    world.publish(20, keys=4, tag="more")
    with Database(world.dsn) as database:
        world.rows("UPDATE mqlayer_app.relay SET lease_until = '-infinity'")
        world.rows("UPDATE mqlayer_app.lp_set SET lease_until = '-infinity'")
        assert adopt(database) == 20
    assert relay_once(world.settings(), limits=QUICK) == 20
    assert values(world) == expected(4, ("m", 20), ("waiting", 20), ("more", 20))


@pytest.mark.full
def test_a_slot_that_is_there_before_the_schemas_misses_nothing_of_the_user(
    start_postgres: StartPostgres, redis_url: str, key_prefix: str
) -> None:
    """Schemas, messages, emptied slots of the outbox, a deleted topic, a recovery: between the user's own rows."""
    dsn = start_postgres(options={"wal_level": "logical"}).create_database("shop")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE public.bill (number int PRIMARY KEY)")
        publish_all_tables(dsn)
        connection.execute(f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')".encode())
        numbers = iter(range(1, 100))

        def bill() -> None:
            connection.execute("INSERT INTO public.bill VALUES (%s)", (next(numbers),))

        bill()
        migrate(dsn)
        world = World(dsn, key_prefix, [redis_url])
        world.add_topic("orders", partitions=2)
        bill()
        with connection.transaction():
            bill()
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'key-0', 'bill')")
        assert relay_once(world.settings(), limits=QUICK) == 1
        world.rows("UPDATE mqlayer_app.outbox SET slot = (floor(date_part('epoch', now()) / 900)::bigint + 2) & 3")
        assert "emptied" in rotate(world.database).values()
        bill()
        world.publish(5)
        recover(world)
        bill()
        assert relay_once(world.settings(), limits=QUICK) == 5
        delete_topic(world.runtime(), "orders", force=True)
        migrate(dsn)
        bill()
        changes = [bytes(row[0]) for row in connection.execute(
            f"SELECT data FROM pg_logical_slot_get_binary_changes('{SLOT}', NULL, NULL, "
            f"'proto_version', '1', 'publication_names', '{PUBLICATION}')".encode()
        )]  # fmt: skip
        assert inserted(changes, "bill") == ["1", "2", "3", "4", "5", "6"]
        assert connection.execute("SELECT wal_status FROM pg_replication_slots").fetchall() == [("reserved",)]


def inserted(changes: list[bytes], table: str) -> list[str]:
    """Return the first columns of the rows that went into a table, in order, out of pgoutput's messages."""
    tables: dict[int, str] = {}
    found = []
    for change in changes:
        (oid,) = struct.unpack(">I", change[1:5]) if change[:1] in b"RI" else (0,)
        if change[:1] == b"R":
            tables[oid] = change[5:].split(b"\0")[1].decode()
        elif change[:1] == b"I" and tables[oid] == table:
            # 'N', a count of columns, 't', a length, the text.
            (length,) = struct.unpack(">I", change[9:13])
            found.append(change[13 : 13 + length].decode())
    return found
