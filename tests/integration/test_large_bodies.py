"""Bodies over a topic's limit: stored beside the outbox, fetched for the handler, removed once nothing names them."""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from mqlayer import (
    App,
    AsyncBodyStream,
    AsyncProducer,
    Batch,
    BatchOf,
    BodyStream,
    Context,
    Message,
    Producer,
    Receiver,
    outbox,
)
from mqlayer.archive import archive_pass
from mqlayer.domain.large_bodies import BODY_HEADER, CHUNK_BYTES
from mqlayer.domain.message import Record, records_of
from mqlayer.errors import BodyTooLarge, InvalidInput, MissingBody, ReservedHeader
from mqlayer.large_bodies import BodyReader, LargeBodyOptions
from mqlayer.large_bodies.object_store import object_store
from mqlayer.large_bodies.options import forget_options
from mqlayer.large_bodies.writing import PART_BYTES
from mqlayer.maintenance.large_bodies_cleanup import clean_large_bodies
from mqlayer.postgres.rights import Right
from mqlayer.receiving.pop_message import PopMessage
from mqlayer.redis.keys import partition_keys
from mqlayer.relay import relay_once
from mqlayer.runtime import open_runtime
from mqlayer.topics import set_archived
from tests.fixtures.commands import Commands
from tests.fixtures.console import OPERATOR, console_client
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.object_stores import ObjectServer
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.fixtures.worker_stores import UseStores
from tests.proof.world import World

pytestmark = [pytest.mark.world(partitions=1), pytest.mark.usefixtures("bodies_in_postgres")]
SIZE = 3 * CHUNK_BYTES + 5


@contextmanager
def running(app: App) -> Iterator[None]:
    app.start()
    try:
        yield
    finally:
        app.stop()


def received(receiver: Receiver, count: int) -> list[PopMessage]:
    found: list[PopMessage] = []
    for _ in range(count):
        messages = receiver.receive(1)
        receiver.ack(messages)
        found += messages
    return found


def publish_large(world: World, body: bytes, *, key: str = "k", rollback: bool = False) -> None:
    with psycopg.connect(world.dsn) as connection:
        outbox.publish(connection, "orders", key=key, body=body)
        if rollback:
            connection.rollback()


def stored(world: World) -> int:
    [(bodies,)] = world.rows("SELECT count(*) FROM mqlayer_app.large_body")
    [(chunks,)] = world.rows("SELECT count(DISTINCT body_id) FROM mqlayer_app.large_body_chunk")
    [(objects,)] = world.rows("SELECT count(*) FROM mqlayer_app.large_body WHERE bucket IS NOT NULL")
    assert chunks + objects == bodies
    return int(bodies)


def clean(world: World, *, passes: int = 4) -> int:
    """Let the job run some times without a hold; each pass brings a body one step on."""
    return sum(clean_large_bodies(world.runtime(), hold_s=0).removed for _ in range(passes))


def empty_outbox(world: World) -> None:
    """Relay all, and let rotation's time pass."""
    relay_once(world.settings())
    world.rows("TRUNCATE mqlayer_app.outbox")


def trim_all(world: World) -> None:
    for _, partition, _ in world.partitions():
        world.client().xtrim(partition_keys(world.key_prefix, partition).log.decode(), maxlen=0, approximate=False)


def test_a_large_body_reaches_its_handler_whole_and_in_its_keys_order(world: World) -> None:
    large = os.urandom(SIZE)
    got: list[tuple[bytes, int]] = []
    app = App(world.settings(lease_s=10))

    @app.consumer("orders", group="g", start="earliest")
    def handle(body: bytes, ctx: Context) -> None:
        assert BODY_HEADER not in ctx.headers
        assert ctx.headers == {"a": "b"}
        got.append((ctx.body, 0 if ctx.large_body is None else ctx.large_body.size))

    with psycopg.connect(world.dsn) as connection:
        for body in (b"first", large, b"last"):
            outbox.publish(connection, "orders", key="k", body=body, headers={"a": "b"})
    relay_once(world.settings())
    with running(app):
        wait_until(lambda: len(got) == 3, what="all messages")
    assert got == [(b"first", 0), (large, SIZE), (b"last", 0)]


def test_a_consumer_parks_it_and_a_worker_archives_it_by_their_own_rights_alone(world: World) -> None:
    set_archived(world.runtime(), "orders", archived=True)
    publish_large(world, os.urandom(SIZE))
    relay_once(world.settings())
    world.right = Right.CONSUME
    app = App(world.settings(lease_s=10.0))

    @app.consumer("orders", group="g", start="earliest", attempt_limit=1, policy="park")
    def handle(_: bytes) -> None:
        raise ValueError("never")

    with running(app):
        wait_until(lambda: world.rows("SELECT 1 FROM mqlayer.parked_message"), what="the parked message")
    world.right = Right.WORK
    with open_runtime(world.settings()) as runtime:
        assert archive_pass(runtime).archived == {"orders": 1}


def test_async_handlers_batches_and_receivers_get_it(world: World) -> None:
    bodies = [os.urandom(SIZE), b"small", os.urandom(SIZE)]
    by_coroutine: list[bytes] = []
    by_batch: list[list[bytes]] = []
    app = App(world.settings(lease_s=10))

    @app.consumer("orders", group="coroutines", start="earliest", mode="shared")
    async def handle(body: bytes) -> None:
        by_coroutine.append(body)

    @app.consumer("orders", group="batches", start="earliest", batch=BatchOf("key", limit=10, linger_s=1.0))
    def handle_batch(batch: Batch[bytes]) -> None:
        by_batch.append([message.body for message in batch])

    for body in bodies:
        publish_large(world, body)
    relay_once(world.settings())
    with running(app), Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        messages = received(receiver, len(bodies))
        assert [message.body for message in messages] == [b"", b"small", b""]
        assert [receiver.fetch_body(message) for message in messages] == bodies
        wait_until(lambda: len(by_coroutine) == 3 and sum(map(len, by_batch)) == 3, what="all messages of all groups")
    assert sorted(by_coroutine) == sorted(bodies)
    assert [body for batch in by_batch for body in batch] == bodies
    assert all(len(batch) == 1 or sum(map(len, batch)) // 8 < CHUNK_BYTES for batch in by_batch)


def test_handlers_and_receivers_read_it_piece_by_piece(world: World) -> None:
    """As a file: no process has it whole, and a chunk that is gone fails the read, not what came before it."""
    bodies = [os.urandom(SIZE), b"small", os.urandom(SIZE)]
    by_thread: list[bytes] = []
    by_coroutine: list[list[bytes]] = []
    app = App(world.settings(lease_s=10))

    @app.consumer("orders", group="threads", start="earliest")
    def read(body: BodyStream) -> None:
        by_thread.append(body.read(5) + body.read())

    @app.consumer("orders", group="coroutines", start="earliest")
    async def aread(body: AsyncBodyStream, ctx: Context) -> None:
        assert body.size == (len(ctx.body) if ctx.large_body is None else ctx.large_body.size)
        by_coroutine.append([chunk async for chunk in body])

    for body in bodies:
        publish_large(world, body)
    relay_once(world.settings())
    with running(app), Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        messages = received(receiver, len(bodies))
        assert [receiver.open_body(message).read() for message in messages] == bodies
        wait_until(lambda: len(by_thread) == len(by_coroutine) == 3, what="all messages of both groups")
        assert by_thread == bodies
        assert list(map(b"".join, by_coroutine)) == bodies
        assert max(map(len, by_coroutine[0])) <= CHUNK_BYTES
        spoilt = messages[2].large_body
        assert spoilt is not None
        change = "UPDATE mqlayer_app.large_body_chunk SET data = %s WHERE number = 0 AND body_id = %s"
        world.rows(change, bytes(CHUNK_BYTES), spoilt.body_id)
        with pytest.raises(MissingBody, match="not those that were published"):
            receiver.open_body(messages[2]).read()
        world.rows("DELETE FROM mqlayer_app.large_body_chunk WHERE number = 3")
        begun = receiver.open_body(messages[0])
        assert begun.read(CHUNK_BYTES) == bodies[0][:CHUNK_BYTES]
        with pytest.raises(MissingBody, match="chunk 3 is gone"):
            begun.read()


def test_a_stream_has_what_it_asked_for_at_once_and_fails_where_its_body_goes_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqlayer.large_bodies.reading.READ_CHUNKS", 2)
    body = os.urandom(SIZE)
    publish_large(world, body)
    relay_once(world.settings())
    with Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        [message] = received(receiver, 1)
        assert receiver.fetch_body(message) == body
        for change, failure in (
            ("DELETE FROM mqlayer_app.large_body_chunk WHERE number = 2", "chunk 2 is gone"),
            ("UPDATE mqlayer_app.large_body SET removing = true", "no such body"),
        ):
            stream = receiver.open_body(message)
            assert stream.read(CHUNK_BYTES) == body[:CHUNK_BYTES]
            world.rows(change)
            assert stream.read(CHUNK_BYTES) == body[CHUNK_BYTES : 2 * CHUNK_BYTES], "it came with the first chunk"
            for _ in range(2):
                with pytest.raises(MissingBody, match=failure):
                    stream.read(1)


@pytest.mark.world(by_commands=True)
def test_a_command_writes_it_to_a_file_or_standard_output(
    world: World, run: Commands, use_stores: UseStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, file = os.urandom(SIZE), tmp_path / "body"
    publish_large(world, body)
    publish_large(world, "käse".encode())
    relay_once(world.settings())
    large, small = (record.identity for record in streamed(world))
    assert f"{SIZE} bytes written" in run("message", "body", str(large), "--to", str(file)).stderr
    assert file.read_bytes() == body
    assert run("message", "body", str(large)).stdout_bytes == body
    assert run("message", "show", str(large), "--raw").stdout_bytes == body
    assert "body: large, 786 kB; --raw writes it" in run.text("message", "show", str(large))
    world.right = Right.VIEW
    use_stores(world.environment())
    assert "mqlayer grant operate" in run.failure("message", "body", str(large))
    world.right = Right.OPERATE
    use_stores(world.environment())
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    assert "this body is binary: --to FILE" in run.failure("message", "body", str(large))
    assert run("message", "body", str(large), "--to", "-").stdout_bytes == body
    assert run("message", "body", str(small)).stdout == "käse"
    world.rows("DELETE FROM mqlayer_app.large_body_chunk WHERE number = 3")
    assert "chunk 3 is gone" in run.failure("message", "body", str(large), "--to", str(file))
    assert file.read_bytes() == body, "a file is whole, or as it was"
    assert list(tmp_path.iterdir()) == [file]
    assert "can't be written" in run.failure("message", "body", str(small), "--to", str(tmp_path / "none" / "body"))


@pytest.mark.world(by_commands=True)
def test_its_size_is_shown_where_its_message_failed_and_the_console_sends_it(world: World, run: Commands) -> None:
    body = os.urandom(SIZE)
    publish_large(world, body)
    relay_once(world.settings())
    app = App(world.settings(lease_s=10))

    def fail(_: bytes) -> None:
        raise ValueError("never")

    for group, policy in (("dies", "dead_letter"), ("parks", "park")):
        rules: dict[str, Any] = {"attempt_limit": 1, "policy": policy}
        app.consumer("orders", group=group, start="earliest", body=bytes, **rules)(fail)
    with running(app):
        wait_until(lambda: world.rows("SELECT 1 FROM mqlayer.parked_message, mqlayer.dead_message"), what="both failed")
    (dead,), (parked,) = run.lines("dead", "list"), run.lines("parked", "show", "orders", "parks", "k")
    (waiting,) = parked["line"]
    assert [(one["bytes"], one["large"]) for one in (dead, waiting)] == [(SIZE, True)] * 2
    assert f"{SIZE} large" in run.text("dead", "list")
    assert f"{SIZE} large" in run.text("parked", "show", "orders", "parks", "k")
    (shown,) = run.lines("dead", "show", str(dead["dead_id"]))
    assert (shown["bytes"], shown["large_body"] is None) == (SIZE, False)
    assert run("dead", "show", str(dead["dead_id"]), "--raw").stdout_bytes == body
    assert run("parked", "show", "orders", "parks", "--message", waiting["message"], "--raw").stdout_bytes == body

    with console_client(world, OPERATOR) as client:
        for path in ("/parked?show=dead", "/parked/orders/parks?key=k", "/messages?topic=orders"):
            assert '786 kB <span class="badge quiet">large</span>' in client.get(path).text, path
        for path in (f"/dead/{dead['dead_id']}", "/parked/orders/parks?key=k", f"/messages/orders/{dead['message']}"):
            (link,) = re.findall(r'<a href="([^"]+)" download>', client.get(path).text)
            sent = client.get(link.replace("&amp;", "&"))
            assert (sent.content, sent.headers["content-length"]) == (body, str(SIZE)), path
            assert sent.headers["content-disposition"].startswith('attachment; filename="body-1-')
            assert sent.headers["content-type"] == "application/octet-stream"
        world.rows("DELETE FROM mqlayer_app.large_body_chunk WHERE number = 0")
        assert "chunk 0 is gone" in client.get(f"/dead/{dead['dead_id']}/body").text


def chunks_of(body: bytes, size: int = 100_000) -> Iterator[bytes]:
    return (body[at : at + size] for at in range(0, len(body), size))


@pytest.mark.world(by_commands=True)
def test_files_and_iterators_are_stored_as_they_are_read(world: World, run: Commands, tmp_path: Path) -> None:
    """Each size comes, also one that ends with a chunk; a body below the threshold goes in its message."""
    sizes = (SIZE, 2 * CHUNK_BYTES, CHUNK_BYTES + 1, 0, 5, CHUNK_BYTES, SIZE + 1, SIZE + 2, SIZE + 3)
    bodies = [os.urandom(size) for size in sizes]
    file = tmp_path / "body"
    file.write_bytes(bodies[6])
    with psycopg.connect(world.dsn) as connection:
        for body in bodies[:3]:
            outbox.publish(connection, "orders", key="k", body=io.BytesIO(body), headers={"a": "b"})
        with outbox.transaction(connection) as tx:
            for body in bodies[3:6]:
                tx.publish("orders", key="k", body=chunks_of(body))
    run.text("publish", "orders", "--key", "k", "--file", str(file))

    async def send() -> None:
        async with await psycopg.AsyncConnection.connect(world.dsn) as connection:
            await outbox.apublish(connection, "orders", key="k", body=io.BytesIO(bodies[7]))

    asyncio.run(send())
    relay_once(world.settings())
    with Producer(world.settings(), name="direct") as producer:
        producer.send("orders", key="k", body=io.BytesIO(bodies[8]))
        producer.send("orders", key="k", body=io.BytesIO(b"small"))
    assert stored(world) == 6
    with Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        messages = received(receiver, len(bodies) + 1)
        assert [receiver.fetch_body(message) for message in messages] == [*bodies, b"small"]
        assert messages[0].headers == {"a": "b"}


def test_a_source_that_fails_leaves_nothing_that_a_message_can_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction may even commit: the job removes what was written."""

    def broken(body: bytes) -> Iterator[bytes]:
        yield from chunks_of(body)
        raise OSError("the disk is gone")

    monkeypatch.setenv("MQLAYER_LARGE_BODY_LIMIT", "1000000")
    forget_options()
    with psycopg.connect(world.dsn) as connection:
        with pytest.raises(OSError, match="the disk is gone"):
            outbox.publish(connection, "orders", key="k", body=broken(os.urandom(SIZE)))
        with pytest.raises(BodyTooLarge, match="takes 1000000"):
            outbox.publish(connection, "orders", key="k", body=chunks_of(os.urandom(1_200_000)))
        connection.commit()
        rows = connection.execute("SELECT body_id, size, encode(sha256, 'hex') FROM mqlayer_app.large_body").fetchall()
        assert [(size, digest) for _, size, digest in rows] == [(0, "00" * 32)] * 2
        publish = "SELECT mqlayer_app.publish_v1('orders', 'k', '', jsonb_build_object('mq-body', %s::text))"
        with pytest.raises(psycopg.Error, match="names no stored body"):
            connection.execute(publish, [f"{rows[0][0]}:0:{'00' * 32}"])
        connection.rollback()
        outbox.publish(connection, "orders", key="k", body=io.BytesIO(os.urandom(SIZE)))
        connection.rollback()
    assert stored(world) == 2
    assert clean(world, passes=5) == 2
    assert world.published() == {}


def publish_and_fail(connection: psycopg.Connection) -> None:
    with outbox.transaction(connection) as inner:
        inner.publish("orders", key="k", body=os.urandom(SIZE))
        connection.execute("SELECT 1 / 0")


def test_a_transaction_that_rolls_back_leaves_nothing(world: World) -> None:
    publish_large(world, os.urandom(SIZE), rollback=True)
    with psycopg.connect(world.dsn) as connection, outbox.transaction(connection):
        outbox.publish(connection, "orders", key="k", body=b"kept")
        with pytest.raises(psycopg.errors.DivisionByZero):
            publish_and_fail(connection)
    assert stored(world) == 0
    assert [body for chain in world.published().values() for _, _, body in chain] == ["kept"]


def test_sessions_collect_it_and_autocommit_refuses_it(world: World) -> None:
    engine = create_engine(world.dsn.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine) as session, session.begin():
        outbox.publish(session, "orders", key="k", body=os.urandom(SIZE))
    engine.dispose()
    assert stored(world) == 1
    with psycopg.connect(world.dsn, autocommit=True) as connection:
        with pytest.raises(InvalidInput, match="no transaction is open"):
            outbox.publish(connection, "orders", key="k", body=os.urandom(SIZE))
        with connection.transaction():
            outbox.publish_delayed(connection, "orders", delay_s=3600, key="k", body=os.urandom(SIZE))
            assert outbox.publish_once(connection, "orders", dedup_id="d", key="k", body=os.urandom(SIZE)).seq == 2
    assert stored(world) == 3


def test_sql_can_store_a_body_and_no_header_names_another(world: World) -> None:
    body = os.urandom(SIZE)
    world.rows("SELECT mqlayer_app.publish_v1('orders', 'k', '', mqlayer_app.large_body_v1('orders', %s))", body)
    relay_once(world.settings())
    with Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        [message] = receiver.receive(1)
        assert receiver.fetch_body(message) == body
    reference = f"{uuid.uuid4()}:5:{'0' * 64}"
    for forged in (reference, "nothing"):
        with psycopg.connect(world.dsn) as connection, pytest.raises(psycopg.Error, match="names no stored body"):
            connection.execute(
                "SELECT mqlayer_app.publish_v1('orders', 'k', '', jsonb_build_object('mq-body', %s::text))", [forged]
            )
    with psycopg.connect(world.dsn) as connection, pytest.raises(ReservedHeader):
        outbox.publish(connection, "orders", key="k", headers={BODY_HEADER: reference})


def test_direct_producers_store_it_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [os.urandom(SIZE) for _ in range(4)]
    with Producer(world.settings(), name="direct") as producer:
        producer.send("orders", key="k", body=bodies[0])
        producer.send_many("orders", [Message("k", b"small"), Message("k", bodies[1])])
        producer.send_async("orders", key="k", body=bodies[2], tags=["eu"]).result(10)

    async def send() -> None:
        async with AsyncProducer(world.settings(), name="async") as sender:
            await sender.send("orders", key="other", body=bodies[3])

    asyncio.run(send())
    assert stored(world) == 4
    with Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        messages = received(receiver, 5)
        got = [receiver.fetch_body(message) for message in messages]
    assert sorted(got) == sorted([*bodies, b"small"])
    assert clean(world) == 0, "they are in the stream"
    trim_all(world)
    assert clean(world) == 4
    monkeypatch.setenv("MQLAYER_LARGE_BODIES", "off")
    with (
        Producer(world.settings(), name="direct") as producer,
        pytest.raises(BodyTooLarge, match="MQLAYER_LARGE_BODIES"),
    ):
        producer.send("orders", key="k", body=bodies[0])


def test_a_body_over_the_limit_is_refused_and_without_the_feature_any_large_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQLAYER_LARGE_BODY_LIMIT", "1000000")
    forget_options()
    with pytest.raises(BodyTooLarge, match="takes 1000000"):
        publish_large(world, bytes(1_000_001))
    monkeypatch.setenv("MQLAYER_LARGE_BODIES", "off")
    forget_options()
    with pytest.raises(BodyTooLarge, match="large bodies"):
        publish_large(world, bytes(300_000))
    assert stored(world) == 0


def test_a_missing_body_fails_its_message_by_the_groups_policy(world: World) -> None:
    publish_large(world, os.urandom(SIZE))
    relay_once(world.settings())
    world.rows("DELETE FROM mqlayer_app.large_body_chunk WHERE number = 1")
    handled = list[bytes]()
    app = App(world.settings(lease_s=10))

    def handle(body: bytes) -> None:
        handled.append(body)

    rules: dict[str, Any] = {"backoff_s": [0.05], "attempt_limit": 2, "policy": "dead_letter"}
    app.consumer("orders", group="g", start="earliest", body=bytes, **rules)(handle)
    with running(app):
        wait_until(lambda: world.rows("SELECT 1 FROM mqlayer.dead_message") != [], what="the message is dead")
    assert handled == []
    [(reason,)] = world.rows("SELECT reason FROM mqlayer.dead_message")
    assert "MissingBody" in reason
    assert clean(world) == 0, "an operator may put the body back, and redrive"


def test_a_body_goes_once_no_place_needs_its_message(world: World) -> None:
    publish_large(world, os.urandom(SIZE))
    publish_large(world, os.urandom(SIZE), rollback=True)
    assert clean(world) == 0, "its row is in the outbox"
    relay_once(world.settings())
    assert clean(world) == 0, "a node that falls back would get the row again"
    world.rows("TRUNCATE mqlayer_app.outbox")
    assert clean(world) == 0, "it is in the stream"
    trim_all(world)
    assert clean_large_bodies(world.runtime(), hold_s=3600).removed == 0, "first it waits"
    assert stored(world) == 1
    assert clean(world) == 1
    assert stored(world) == 0
    assert clean(world) == 0
    assert world.rows("SELECT * FROM mqlayer_app.large_body_cut") == []


NAMED = """
    SELECT mqlayer_app.body_named_v1(headers) FROM mqlayer_app.outbox
    UNION SELECT mqlayer_app.body_named_v1(headers) FROM mqlayer_app.delayed
    UNION SELECT mqlayer_app.body_named_v1(headers) FROM mqlayer_app.voided WHERE ended IS NULL
    UNION SELECT mqlayer.body_named_v1(headers) FROM mqlayer_archive.record
    UNION SELECT mqlayer.body_named_v1(encode(m, 'escape')) FROM mqlayer.dead_message
"""
DIE = """
    INSERT INTO mqlayer.dead_message
        (group_id, lp, source, seq, partition_id, log_offset, key, m, body, cause, reason, attempts, actor)
    VALUES (1, %s, %s, %s, %s, %s, %s, %s, '', 'exhausted', 'r', 1, 'm') ON CONFLICT DO NOTHING
"""
ARCHIVE = """
    INSERT INTO mqlayer_archive.record
        (topic_id, batch, version, partition_id, log_offset, source, lp, seq, published_at, archived_at, headers, body)
    VALUES (1, 1, 1, %s, %s, %s, %s, %s, now(), now(), %s, '')
"""
GROUP = """
    INSERT INTO mqlayer.consumer_group (topic_id, name, start, state, backoff_s)
    VALUES (1, 'g', 'earliest', 'live', '{1}')
"""
CHUNKS = "SELECT data FROM mqlayer_app.large_body_chunk WHERE body_id = %s ORDER BY number"
KEPT = "SELECT 1 FROM mqlayer_app.large_body WHERE body_id = %s AND NOT removing"
WALK_SIZE = 20_000


class Walk:
    """Messages with large bodies on all their ways, by chance, and the job between the steps."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng, self.expected = world, random.Random(seed), dict[str, bytes]()
        world.rows(GROUP)
        world.rows("SELECT mqlayer_archive.day_make_v1(current_date)")
        self.steps: list[Callable[[], object]] = [
            self.publish, self.publish, self.trim, self.die, self.archive, self.clean, self.clean, self.relay,
            lambda: empty_outbox(world), lambda: outbox.release_delayed(world.database), self.forget,
        ]  # fmt: skip

    def publish(self) -> None:
        body = self.rng.randbytes(WALK_SIZE)
        with psycopg.connect(self.world.dsn) as connection:
            if self.rng.random() < 0.3:
                outbox.publish_delayed(connection, "orders", delay_s=self.rng.choice([0, 3600]), key="k", body=body)
            else:
                outbox.publish(connection, "orders", key=str(self.rng.random()), body=body)
            if self.rng.random() < 0.2:
                connection.rollback()

    def trim(self) -> None:
        for _, partition, _ in self.world.partitions():
            log = partition_keys(self.world.key_prefix, partition).log.decode()
            self.world.client().xtrim(log, maxlen=self.rng.randrange(3), approximate=False)

    def die(self) -> None:
        """A record becomes a dead message, as when its handler fails."""
        for record in streamed(self.world)[:1]:
            source, lp, seq = record.identity
            place = self.world.partitions()[0][1], record.offset
            self.world.rows(DIE, lp, source, seq, *place, record.key, record.m)

    def archive(self) -> None:
        for record in streamed(self.world)[:1]:
            source, lp, seq = record.identity
            headers = record.m.split(b":", 4)[4].decode()
            self.world.rows(ARCHIVE, self.world.partitions()[0][1], record.offset, source, lp, seq, headers)

    def clean(self) -> None:
        clean_large_bodies(self.world.runtime(), hold_s=0)

    def relay(self) -> None:
        relay_once(self.world.settings())

    def forget(self) -> None:
        self.world.rows("DELETE FROM mqlayer.dead_message WHERE mod(dead_id, 2) = 0")
        self.world.rows("DELETE FROM mqlayer_archive.record WHERE mod(seq, 2) = 0")

    def check(self) -> None:
        """Nothing that a message names is gone, or going."""
        records = {record.large_body.body_id for record in streamed(self.world) if record.large_body}
        for body_id in records | {body_id for (body_id,) in self.world.rows(NAMED) if body_id}:
            if body_id not in self.expected:
                self.expected[body_id] = b"".join(bytes(data) for (data,) in self.world.rows(CHUNKS, body_id))
            assert len(self.expected[body_id]) == WALK_SIZE
            assert self.world.rows(KEPT, body_id), body_id

    def end(self) -> None:
        """What is left can be fetched; what no message names any more goes."""
        reader = BodyReader(self.world.runtime())
        for record in streamed(self.world):
            assert record.large_body is not None
            assert reader.fetch(record.large_body) == self.expected[record.large_body.body_id]
        self.world.rows("TRUNCATE mqlayer.dead_message, mqlayer_archive.record, mqlayer_app.delayed CASCADE")
        empty_outbox(self.world)
        trim_all(self.world)
        clean(self.world, passes=5)
        assert stored(self.world) == 0


@pytest.mark.parametrize("seed", some_of(range(8), 8))
def test_no_walk_removes_a_body_that_a_message_names(world: World, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every step all that is named is there, and at the end all the rest is gone."""
    monkeypatch.setenv("MQLAYER_LARGE_BODY_THRESHOLD", "16384")
    forget_options()
    walk = Walk(world, seed)
    for _ in range(60):
        walk.rng.choice(walk.steps)()
        walk.check()
    walk.end()


def streamed(world: World) -> list[Record]:
    found: list[Record] = []
    client: Any = world.client()
    for _, partition, _ in world.partitions():
        entries = client.xrange(partition_keys(world.key_prefix, partition).log.decode())
        found += records_of(
            [[entry, [b"m", fields[b"m"], b"k", fields[b"k"], b"b", fields[b"b"]]] for entry, fields in entries]
        )
    return found


@pytest.mark.full
def test_bodies_go_to_s3_and_objects_of_rolled_back_transactions_go_by_age(
    world: World, bodies_in_s3: ObjectServer
) -> None:
    relay_once(world.settings())
    body, before = os.urandom(SIZE), set(bodies_in_s3.objects())

    def objects() -> set[str]:
        return set(bodies_in_s3.objects()) - before

    publish_large(world, body)
    publish_large(world, body, rollback=True)
    assert stored(world) == 1
    assert len(objects()) == 2
    assert clean_large_bodies(world.runtime(), hold_s=3600).strays == 0, "its transaction may be open"
    assert clean_large_bodies(world.runtime(), hold_s=0).strays == 1
    relay_once(world.settings())
    with Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        [message] = receiver.receive(1)
        assert receiver.fetch_body(message) == body
        next(bodies_in_s3.folder.rglob(objects().pop())).unlink()
        with pytest.raises(MissingBody, match="has no object"):
            receiver.fetch_body(message)
    empty_outbox(world)
    trim_all(world)
    assert clean(world) == 1, "an object that is gone is no hindrance"
    assert objects() == set()


@pytest.mark.full
def test_a_copy_of_the_database_removes_no_object_of_its_original(world: World, bodies_in_s3: ObjectServer) -> None:
    relay_once(world.settings())
    before = set(bodies_in_s3.objects())
    publish_large(world, os.urandom(SIZE))
    empty_outbox(world)
    trim_all(world)
    world.rows("UPDATE mqlayer_app.identity SET outbox_uuid = gen_random_uuid()")
    assert clean(world) == 1
    assert len(set(bodies_in_s3.objects()) - before) == 1


@pytest.mark.full
def test_an_upload_in_parts_is_whole_and_an_unfinished_one_goes(world: World, bodies_in_s3: ObjectServer) -> None:
    relay_once(world.settings())
    body, before = os.urandom(2 * PART_BYTES + 5), set(bodies_in_s3.objects())
    with psycopg.connect(world.dsn) as connection:
        outbox.publish(connection, "orders", key="k", body=chunks_of(body, 1_000_000))
        outbox.publish(connection, "orders", key="k", body=io.BytesIO(body[:SIZE]))
    relay_once(world.settings())
    with Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        large, small = received(receiver, 2)
        with receiver.open_body(large) as stream:
            assert b"".join(iter(lambda: stream.read(1_000_000), b"")) == body
        assert receiver.fetch_body(small) == body[:SIZE]
    assert len(set(bodies_in_s3.objects()) - before) == 2
    options = LargeBodyOptions.of(world.settings())
    store = object_store(options)
    with psycopg.connect(world.dsn) as connection, pytest.raises(OSError, match="gone"):
        outbox.publish(connection, "orders", key="k", body=chain(chunks_of(body), failing("gone")))
    assert list(store.uploads(options.bucket, options.prefix)) == [], "a caller's error ends its upload"
    killed = ask_python(
        "-c",
        SOURCE_PUBLISHER,
        world.dsn,
        env=os.environ | armed("large_body.in_upload=kill") | {"MQLAYER_DSN": world.dsn},
    )
    assert killed.returncode == -9, killed.stderr
    assert len(list(store.uploads(options.bucket, options.prefix))) == 1
    assert clean_large_bodies(world.runtime(), hold_s=3600).strays == 0, "it may go on"
    assert clean_large_bodies(world.runtime(), hold_s=0).strays == 1
    store.check(options.bucket)


def failing(text: str) -> Iterator[bytes]:
    if text:
        raise OSError(text)
    yield b""


SOURCE_PUBLISHER = (
    "import io, sys; import psycopg; from mqlayer import outbox; "
    "c = psycopg.connect(sys.argv[1]); outbox.publish(c, 'orders', key='k', body=io.BytesIO(bytes(20_000_000)))"
)
PROGRAM = (
    "import sys; from mqlayer.postgres.database import Database; from mqlayer.runtime import Runtime; "
    "from mqlayer.settings import Settings; from mqlayer.maintenance.large_bodies_cleanup import clean_large_bodies; "
    "d = Database(sys.argv[1]); r = Runtime(d, Settings(key_prefix=sys.argv[2]), d); "
    "[clean_large_bodies(r, hold_s=0) for _ in range(5)]"
)


@pytest.mark.parametrize(
    "place",
    some_of(
        [
            "large_body.after_look", "large_body.before_ends", "large_body.after_trimmed", "large_body.after_remove",
            "large_body.after_objects",
        ],
        9,
    ),
)  # fmt: skip
def test_a_job_that_is_killed_is_done_by_the_next_and_takes_nothing_that_is_named(world: World, place: str) -> None:
    relay_once(world.settings())
    publish_large(world, os.urandom(SIZE))
    empty_outbox(world)
    trim_all(world)
    world.rows("SELECT mqlayer_app.large_body_cut_v1(100, 0)")
    kept = os.urandom(SIZE)
    publish_large(world, kept)
    killed = ask_python("-c", PROGRAM, world.dsn, world.key_prefix, env=os.environ | armed(f"{place}=kill"))
    assert killed.returncode == -9, killed.stderr
    clean(world, passes=5)
    assert stored(world) == 1
    relay_once(world.settings())
    with Receiver("orders", group="pop", settings=world.settings(), start="earliest") as receiver:
        assert receiver.fetch_body(receiver.receive(1)[0]) == kept


PUBLISHER = (
    "import sys; import psycopg; from mqlayer import outbox, Producer, Settings; "
    "c = psycopg.connect(sys.argv[1]); outbox.publish(c, 'orders', key='k', body=bytes(800_000)); c.commit(); "
    "Producer(Settings(key_prefix=sys.argv[2]), name='direct').send('orders', key='k', body=bytes(800_000))"
)


@pytest.mark.parametrize(("place", "left"), some_of([("large_body.after_chunks", 0), ("large_body.before_send", 2)], 9))
def test_a_publisher_that_is_killed_leaves_nothing_for_long(world: World, place: str, left: int) -> None:
    relay_once(world.settings())
    env = os.environ | armed(f"{place}=kill") | {"MQLAYER_DSN": world.dsn}
    killed = ask_python("-c", PUBLISHER, world.dsn, world.key_prefix, env=env)
    assert killed.returncode == -9, killed.stderr
    assert stored(world) == left
    empty_outbox(world)
    trim_all(world)
    clean(world, passes=5)
    assert stored(world) == 0


@pytest.mark.full
def test_a_publisher_that_is_killed_behind_an_upload_leaves_an_object_that_goes(
    world: World, bodies_in_s3: ObjectServer
) -> None:
    relay_once(world.settings())
    before = set(bodies_in_s3.objects())
    env = os.environ | armed("large_body.after_upload=kill") | {"MQLAYER_DSN": world.dsn}
    killed = ask_python("-c", PUBLISHER, world.dsn, world.key_prefix, env=env)
    assert killed.returncode == -9, killed.stderr
    assert stored(world) == 0
    assert len(set(bodies_in_s3.objects()) - before) == 1
    clean(world, passes=1)
    assert set(bodies_in_s3.objects()) - before == set()


def test_who_may_consume_another_topic_may_not_read_its_bodies(world: World) -> None:
    publish_large(world, os.urandom(SIZE))
    [(body_id,)] = world.rows("SELECT body_id::text FROM mqlayer_app.large_body")
    for scope, expected in (("orders/g", True), ("payments/g", False)):
        with psycopg.connect(world.dsn) as connection:
            connection.execute("CREATE ROLE mq_reader_of_bodies")
            connection.execute("GRANT USAGE ON SCHEMA mqlayer_app TO mq_reader_of_bodies")
            connection.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer_app TO mq_reader_of_bodies")
            connection.execute(
                "INSERT INTO mqlayer_app.granted VALUES ('mq_reader_of_bodies'::regrole, 'consume', %s)", [scope]
            )
            connection.execute("SET LOCAL ROLE mq_reader_of_bodies")
            read = "SELECT data FROM mqlayer_app.large_body_read_v1(%s, 0)"
            if expected:
                assert connection.execute(read, [body_id]).fetchone()
            else:
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match="lacks the right to consume orders"):
                    connection.execute(read, [body_id])
            connection.rollback()
