"""The processes of a chaos run, each with a history: `python -m tests.chaos.actors ROLE NAME DIRECTORY`.

Writers publish a few keys in transactions of their own, some of which roll back, and pause as business code does.
Consumers write each message into a table through the fence. Drivers split, merge and move partitions. All end in order
at SIGTERM, or are ended without warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psycopg
from psycopg_pool import ConnectionPool

import mqlayer
from mqlayer.domain.routing import NodeId, Route, lp_of
from mqlayer.errors import AlreadyApplied, Conflict, NotFound, StaleOwner
from mqlayer.postgres.database import Connection, Database
from mqlayer.redelivery import reclaim_shared
from mqlayer.relay import Relay
from mqlayer.routes import (
    ChangePlan,
    apply_change,
    drop_change,
    finish_changes,
    plan_merge,
    plan_move,
    plan_split,
    retire_partitions,
)
from mqlayer.runtime.route_cache import load_nodes, load_route
from tests.proof.history import Ack, Deliver, Effect, History, Operation, Publish
from tests.proof.observer import MemberWitness, observe_parking, observe_retiring
from tests.proof.runtimes import runtime_of

log = logging.getLogger(__name__)

TOPIC: Final = "orders"
GROUP: Final = "ledger"
MIRROR: Final = "mirror"
"""A second group, whose effects no fence guards."""
KEYS: Final = int(os.environ.get("MQLAYER_TEST_KEYS", "60"))
PAUSE_S: Final = float(os.environ.get("MQLAYER_TEST_PAUSE_S", "0.02"))
"""How long a publisher waits between two transactions, on average."""
DRIVE_EVERY_S: Final = float(os.environ.get("MQLAYER_TEST_DRIVE_EVERY_S", "1.0"))
"""How long a driver waits between two changes, on average."""
FAILING: Final = int(os.environ.get("MQLAYER_TEST_FAILING", "0"))
"""Every so many messages fail at their first attempt; 0: none does."""
TAG_FILTER: Final = os.environ.get("MQLAYER_TEST_TAG_FILTER")
"""Which messages consumers want; None: all."""
BATCH: Final[Any] = os.environ.get("MQLAYER_TEST_BATCH")
"""Of what a handler takes batches; None: single messages."""
BATCHES: Final[Mapping[str, Any]] = json.loads(os.environ.get("MQLAYER_TEST_BATCHES", "{}"))
"""The same by process, where they differ within a group."""
BATCH_LIMIT: Final = int(os.environ.get("MQLAYER_TEST_BATCH_LIMIT", "10"))
HANDLERS: Final = int(os.environ.get("MQLAYER_TEST_HANDLERS", "6"))
"""How many single messages are written at a time."""
PART: Final = int(os.environ.get("MQLAYER_TEST_PART", "3"))
"""How many messages of a batch are written in one transaction."""
SINK: Final = """
CREATE TABLE sink (
    position bigserial PRIMARY KEY, key text, source int, lp int, seq bigint, epoch bigint, partition int, value text
)
"""
INTO_SINK: Final = """
INSERT INTO sink (key, source, lp, seq, epoch, partition, value)
VALUES (%(key)s, %(source)s, %(lp)s, %(seq)s, %(epoch)s, %(partition)s, %(value)s)
"""
FAULTS: Final = "faults.json"
DEADLY: Final = 9
"""With what a process ends whose handler was given a deadly message."""


def write(name: str, directory: Path, stopping: threading.Event) -> None:
    """Publish until told to stop; go on after the database was away."""
    rng, turn = random.Random(name), 0
    with History(directory, name) as history:
        while not stopping.is_set():
            try:
                with psycopg.connect(os.environ["MQLAYER_DSN"]) as connection:
                    while not stopping.is_set():
                        turn += 1
                        _publish(connection, history, rng, f"{name}/{os.getpid()}/{turn}")
            except psycopg.Error:
                stopping.wait(0.1)


def _publish(connection: Connection, history: History, rng: random.Random, value: str) -> None:
    key = f"key-{rng.randrange(KEYS)}"
    operation = history.begin(Publish(topic=TOPIC, key=key, value=value))
    try:
        row = connection.execute("SELECT mqlayer_app.publish_v2(%s, %s, %s)", (TOPIC, key, value.encode())).fetchone()
        connection.execute("SELECT pg_sleep(%s)", (rng.random() * 0.004,))
        identity = {"source": 1, "lp": lp_of(key.encode()), "seq": row[0] if row else 0}
        if rng.random() < 0.1:
            connection.rollback()
            operation.fail(**identity)
            return
        connection.commit()
    except psycopg.Error:
        # A lost connection at COMMIT: nobody can tell.
        operation.info()
        raise
    operation.ok(**identity)


def relay(name: str, directory: Path, stopping: threading.Event) -> None:
    """Move the outbox to the partitions."""
    observe_retiring(History(directory, name), TOPIC)
    work = Relay(mqlayer.Settings())

    def end() -> None:
        stopping.wait()
        work.stop()

    threading.Thread(target=end, daemon=True).start()
    work.run()


def consume(name: str, directory: Path, stopping: threading.Event) -> None:
    """Write what comes into the sink."""
    app = mqlayer.App()
    _book_into_sink(app, History(directory, f"{name}-{os.getpid()}"))
    _run(app, stopping)


def consume_twice(name: str, directory: Path, stopping: threading.Event) -> None:
    """Consume for two groups, one whose effects are fenced and one whose are not; note who owns what meanwhile."""
    app = mqlayer.App()
    history = History(directory, f"{name}-{os.getpid()}")
    MemberWitness(history, TOPIC).observe()
    observe_retiring(history, TOPIC)
    _book_into_sink(app, history, BATCHES.get(name, BATCH))

    @app.consumer(TOPIC, group=MIRROR, backoff_s=(0.1, 0.2), options=mqlayer.MemberOptions(concurrency=2))
    def mirror(body: bytes, ctx: mqlayer.Context) -> None:
        facts = _facts(body, ctx)
        operation = history.begin(Deliver(topic=TOPIC, group=MIRROR, attempt=ctx.attempt, **facts))
        history.note(Effect(topic=TOPIC, group=MIRROR, fenced=False, **facts))
        operation.ok()

    _run(app, stopping)


class Connections:
    """The connections of a handler, as many as are used at a time.

    Not psycopg's pool: after a failure it waits a second, then two, then four, which would count as our recovery.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn, self._idle = dsn, queue.SimpleQueue[Connection]()

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a connection; commit at the end, or roll back after an error."""
        connection = self._take()
        try:
            yield connection
            connection.commit()
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                connection.rollback()
            raise
        finally:
            if connection.closed:
                # Whatever ended it has ended the others, too.
                self._idle = queue.SimpleQueue()
            else:
                self._idle.put(connection)

    def _take(self) -> Connection:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return psycopg.connect(self._dsn)


class AsyncConnections:
    """The same for a handler that is a coroutine."""

    def __init__(self, dsn: str) -> None:
        self._dsn, self._idle = dsn, list[psycopg.AsyncConnection[Any]]()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Lend a connection; commit at the end, or roll back after an error."""
        connection = self._idle.pop() if self._idle else await psycopg.AsyncConnection.connect(self._dsn)
        try:
            yield connection
            await connection.commit()
        except BaseException:
            with contextlib.suppress(psycopg.Error):
                await connection.rollback()
            raise
        finally:
            if not connection.closed:
                self._idle.append(connection)


def _book_into_sink(app: mqlayer.App, history: History, kind: Any = BATCH) -> None:
    pool = Connections(os.environ["MQLAYER_DSN"])
    if kind is not None:

        @app.consumer(TOPIC, group=GROUP, backoff_s=(0.1, 0.2), batch=mqlayer.BatchOf(kind, limit=BATCH_LIMIT))
        def book_batch(batch: mqlayer.Batch[bytes]) -> None:
            _book_in_parts(batch, pool, history)

        return

    options = mqlayer.MemberOptions(concurrency=HANDLERS)

    @app.consumer(TOPIC, group=GROUP, backoff_s=(0.1, 0.2), tag_filter=TAG_FILTER, options=options)
    def book(body: bytes, ctx: mqlayer.Context) -> None:
        facts = _facts(body, ctx)
        with _delivery(history, facts, ctx), pool.connection() as connection:
            if FAILING and ctx.attempt == 1 and facts["seq"] % FAILING == 0:
                raise RuntimeError("planted")
            ctx.fence(connection)
            connection.execute(INTO_SINK, facts)


def sell(name: str, directory: Path, stopping: threading.Event) -> None:
    """Write what comes into the sink, by the rules that MQLAYER_TEST_RULES gives, unless a fault of the run forbids it.

    A consumer of the name that MQLAYER_TEST_MEMBER says, a new one without it; its handler is a coroutine if
    MQLAYER_TEST_ASYNC is there, or takes batches of the kind in MQLAYER_TEST_BATCH.
    """
    app, history, faults = mqlayer.App(), History(directory, f"{name}-{os.getpid()}"), Faults(directory)
    if "MQLAYER_TEST_MEMBER" not in os.environ:
        # Who comes again under the id of one that was killed need not wait for its lease.
        MemberWitness(history, TOPIC).observe()
    observe_parking(history, TOPIC, GROUP)
    rules: dict[str, Any] = json.loads(os.environ.get("MQLAYER_TEST_RULES", "{}"))
    options = mqlayer.MemberOptions(concurrency=HANDLERS, member_id=os.environ.get("MQLAYER_TEST_MEMBER", ""))
    batch = mqlayer.BatchOf(BATCH, limit=BATCH_LIMIT) if BATCH is not None else None
    register = app.consumer(TOPIC, group=GROUP, start="earliest", batch=batch, options=options, **rules)
    pool, async_pool = Connections(os.environ["MQLAYER_DSN"]), AsyncConnections(os.environ["MQLAYER_DSN"])

    def handle(body: bytes, ctx: mqlayer.Context) -> None:
        facts = _facts(body, ctx)
        with _delivery(history, facts, ctx):
            faults.strike(facts)
            with pool.connection() as connection:
                ctx.fence(connection)
                connection.execute(INTO_SINK, facts)

    async def handle_in_loop(body: bytes, ctx: mqlayer.Context) -> None:
        facts = _facts(body, ctx)
        with _delivery(history, facts, ctx):
            faults.strike(facts)
            async with async_pool.connection() as connection:
                await ctx.afence(connection)
                await connection.execute(INTO_SINK, facts)

    def handle_batch(batch: mqlayer.Batch[bytes]) -> None:
        _book_in_parts(batch, pool, history, faults)

    if BATCH is not None:
        register(handle_batch)
    else:
        register(handle_in_loop if "MQLAYER_TEST_ASYNC" in os.environ else handle)
    _run(app, stopping)


def _book_in_parts(
    batch: mqlayer.Batch[bytes], pool: Connections, history: History, faults: Faults | None = None
) -> None:
    """Write a batch into the sink, some messages in a transaction; those that fail are left out before."""
    for message in batch:
        facts = _facts(message.body, message)
        if FAILING and message.attempt == 1 and facts["seq"] % FAILING == 0:
            batch.fail(message, RuntimeError("planted"))
            if batch.kind == "key":
                break
    todo = (
        batch.unmarked if batch.kind == "distinct" else batch[: min((m.index for m in batch if m.error), default=500)]
    )
    for at in range(0, len(todo), PART):
        part = todo[at : at + PART]
        with pool.connection() as connection:
            to_apply = batch.fence(connection, part)
            for message in part:
                facts = _facts(message.body, message)
                # What was applied before is handled by that, too: who applied it may have died before it said so.
                with _delivery(history, facts, message):
                    if message not in to_apply:
                        continue
                    if faults is not None:
                        faults.strike(facts)
                    connection.execute(INTO_SINK, facts)


class Faults:
    """What goes wrong at present: a file that the test replaces, `put_faults`.

    Messages of keys in `always` fail, of keys in `half` every other time; those whose body is in `deadly` end the
    process.
    """

    def __init__(self, directory: Path) -> None:
        self._file, self._read_at, self._rng = directory / FAULTS, 0, random.Random()
        self._always, self._half, self._deadly = set[str](), set[str](), set[str]()

    def strike(self, facts: Mapping[str, Any]) -> None:
        """Raise, or end the process, if a fault hits this message."""
        changed_at = self._file.stat().st_mtime_ns
        if changed_at != self._read_at:
            faults = json.loads(self._file.read_text("utf-8"))
            self._always, self._half, self._deadly = (
                set(faults.get(kind, ())) for kind in ("always", "half", "deadly")
            )
            self._read_at = changed_at
        if facts["value"] in self._deadly:
            os._exit(DEADLY)
        if facts["key"] in self._always or (facts["key"] in self._half and self._rng.random() < 0.5):
            raise RuntimeError("planted")


def put_faults(directory: Path, **faults: Iterable[str]) -> None:
    """Have these faults from now on: `always`, `half`, `deadly`."""
    new = directory / f"{FAULTS}.new"
    new.write_text(json.dumps({kind: list(names) for kind, names in faults.items()}), "utf-8")
    new.replace(directory / FAULTS)


@contextlib.contextmanager
def _delivery(
    history: History, facts: dict[str, Any], ctx: mqlayer.Context | mqlayer.BatchMessage[bytes]
) -> Iterator[None]:
    """Note a run of the handler, and how it ended."""
    operation = history.begin(Deliver(topic=TOPIC, group=GROUP, attempt=ctx.attempt, **facts))
    try:
        yield
    except AlreadyApplied:
        operation.ok()
        raise
    except StaleOwner:
        operation.fail()
        raise
    except Exception:
        operation.info()
        raise
    operation.ok()


def pop(name: str, directory: Path, stopping: threading.Event) -> None:
    """Receive by ordered pop, and write what comes into the sink; fail and give back at times."""
    history = History(directory, f"{name}-{os.getpid()}")
    scope: Any = os.environ.get("MQLAYER_TEST_SCOPE", "key")
    with psycopg.connect(os.environ["MQLAYER_DSN"], autocommit=True) as connection:
        while not stopping.is_set():
            try:
                with mqlayer.Receiver(TOPIC, group=GROUP, scope=scope) as receiver:
                    while not stopping.is_set():
                        _book_batch(
                            receiver, connection, history, receiver.receive(8, visibility_timeout_s=2.0, wait_s=0.5)
                        )
            except mqlayer.MqlayerError as error:
                log.warning("%s: %s", type(error).__name__, error)
                stopping.wait(0.1)


def pop_async(name: str, directory: Path, stopping: threading.Event) -> None:
    """As `pop`, by three tasks of one AsyncReceiver, whose calls are cancelled at times."""
    asyncio.run(_pop_in_tasks(History(directory, f"{name}-{os.getpid()}"), stopping))


async def _pop_in_tasks(history: History, stopping: threading.Event) -> None:
    scope: Any = os.environ.get("MQLAYER_TEST_SCOPE", "key")
    while not stopping.is_set():
        try:
            async with mqlayer.AsyncReceiver(TOPIC, group=GROUP, scope=scope) as receiver, asyncio.TaskGroup() as tasks:
                for _ in range(3):
                    tasks.create_task(_pop_in_task(receiver, history, stopping))
        except* mqlayer.MqlayerError as errors:
            log.warning("%s", errors.exceptions)
            await asyncio.to_thread(stopping.wait, 0.1)


async def _pop_in_task(receiver: mqlayer.AsyncReceiver, history: History, stopping: threading.Event) -> None:
    async with await psycopg.AsyncConnection.connect(os.environ["MQLAYER_DSN"], autocommit=True) as connection:
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(random.random() * 0.3):
                    batch = await receiver.receive(8, visibility_timeout_s=2.0)
                await _book_batch_async(receiver, connection, history, batch)


async def _book_batch_async(
    receiver: mqlayer.AsyncReceiver,
    connection: psycopg.AsyncConnection[Any],
    history: History,
    batch: Sequence[mqlayer.PopMessage],
) -> None:
    done: list[tuple[mqlayer.PopMessage, Operation]] = []
    for message in batch:
        facts = _pop_facts(message)
        operation = history.begin(Deliver(topic=TOPIC, group=GROUP, attempt=message.attempt, **facts))
        if _fails(message):
            operation.info()
            await receiver.nack(message, delay_s=0.02)
            break
        try:
            async with connection.transaction():
                await receiver.fence(connection, message)
                await connection.execute(INTO_SINK, facts)
        except AlreadyApplied:
            pass
        except BaseException:
            operation.info()
            raise
        operation.ok()
        done.append((message, history.begin(Ack(topic=TOPIC, group=GROUP, **facts))))
    with _settling(done):
        await receiver.ack(message for message, _ in done)


def share(name: str, directory: Path, stopping: threading.Event) -> None:
    """Consume as a member of a shared group, through the fence, until asked to stop.

    "fatal" ends the process each time, "bad" fails each time; both have a fenced effect never. "late" and "late-bad"
    wait until they are let go, then do what their names say. Till then "repaired" and "cursed" fail for good; later
    "cursed" is another "fatal". With key classes, a member has few messages in hand.
    """
    settings = mqlayer.Settings()
    app = mqlayer.App(settings)
    key_class = os.environ.get("MQLAYER_TEST_KEY_CLASS")
    pool = ConnectionPool(settings.application_dsn(), min_size=1, max_size=4, open=True)
    begun = (directory / f"{name}.begun").open("a", buffering=1)

    @app.consumer(
        TOPIC, group=GROUP, mode="shared", visibility_timeout_s=1.0, backoff_s=(0.05,), attempt_limit=3,
        options=mqlayer.MemberOptions(concurrency=4, prefetch_count=12 if key_class else 4_000), key_class=key_class,
    )  # fmt: skip
    def book(body: bytes, ctx: mqlayer.Context) -> None:
        begun.write(f"{body.decode()} {ctx.attempt}\n")
        while body.startswith(b"late") and not (directory / "go").exists():
            time.sleep(0.01)
        if body == b"late-bad":
            raise mqlayer.Reject("late")
        if body in (b"mended", b"cursed") and not (directory / "go").exists():
            raise mqlayer.Reject("not yet")
        if body in (b"fatal", b"cursed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if body == b"bad":
            raise ValueError("bad")
        with pool.connection() as connection, connection.transaction():
            ctx.fence(connection)
            source, lp, seq = ctx.identity
            facts = (body.decode(), source, lp, seq)
            connection.execute("INSERT INTO shared_sink (body, source, lp, seq) VALUES (%s, %s, %s, %s)", facts)

    _run(app, stopping)
    pool.close()


def reclaim(_name: str, _directory: Path, _stopping: threading.Event) -> None:
    """Look once for messages of members that are gone."""
    settings = mqlayer.Settings()
    with Database(settings.control_dsn()) as database:
        reclaim_shared(runtime_of(database, settings.key_prefix))


def _book_batch(
    receiver: mqlayer.Receiver, connection: Connection, history: History, batch: Sequence[mqlayer.PopMessage]
) -> None:
    done: list[tuple[mqlayer.PopMessage, Operation]] = []
    for message in batch:
        facts = _pop_facts(message)
        operation = history.begin(Deliver(topic=TOPIC, group=GROUP, attempt=message.attempt, **facts))
        if _fails(message):
            operation.info()
            receiver.nack(message, delay_s=0.02)
            break
        try:
            with connection.transaction():
                receiver.fence(connection, message)
                connection.execute(INTO_SINK, facts)
        except AlreadyApplied:
            pass
        except BaseException:
            operation.info()
            raise
        operation.ok()
        done.append((message, history.begin(Ack(topic=TOPIC, group=GROUP, **facts))))
    with _settling(done):
        receiver.ack(message for message, _ in done)


def _pop_facts(message: mqlayer.PopMessage) -> dict[str, Any]:
    source, lp, seq = message.identity
    origin = {"key": message.key, "source": source, "lp": lp, "seq": seq, "value": message.body.decode()}
    return origin | {"partition": message.token.partition, "epoch": message.token.epoch}


def _fails(message: mqlayer.PopMessage) -> bool:
    return bool(FAILING) and message.attempt == 1 and message.identity.seq % FAILING == 0


@contextlib.contextmanager
def _settling(done: Sequence[tuple[mqlayer.PopMessage, Operation]]) -> Iterator[None]:
    settled = False
    try:
        yield
        settled = True
    finally:
        for _, operation in done:
            (operation.ok if settled else operation.info)()


def _facts(body: bytes, ctx: mqlayer.Context | mqlayer.BatchMessage[bytes]) -> dict[str, Any]:
    source, lp, seq = ctx.identity
    message = {"key": ctx.key, "source": source, "lp": lp, "seq": seq, "value": body.decode()}
    return message | {"partition": ctx.partition, "epoch": ctx.epoch}


def _run(app: mqlayer.App, stopping: threading.Event) -> None:
    while not stopping.is_set():
        try:
            app.start()
            break
        except mqlayer.MqlayerError:
            stopping.wait(0.2)
    # A signal that another thread gets does not wake this one: its handler runs when it looks again.
    while not stopping.wait(0.2):
        pass
    app.stop()


def publish_batches(name: str, directory: Path, stopping: threading.Event) -> None:
    """Publish several messages in each transaction, of any keys, until told to stop."""
    rng, turn = random.Random(f"{name}/{os.getpid()}"), 0
    with History(directory, name) as history:
        while not stopping.is_set():
            try:
                with psycopg.connect(os.environ["MQLAYER_DSN"]) as connection:
                    while not stopping.is_set():
                        turn += 1
                        keys = [f"key-{rng.randrange(KEYS)}" for _ in range(rng.randint(1, 10))]
                        publish_batch(connection, history, keys, rng, f"{name}/{os.getpid()}/{turn}")
                        stopping.wait(rng.random() * 2 * PAUSE_S)
            except psycopg.Error:
                stopping.wait(0.1)


def publish_batch(connection: Connection, history: History, keys: Sequence[str], rng: random.Random, name: str) -> None:
    """Publish a message of each key in one transaction, which at times is rolled back."""
    # In the order of their LPs: whoever takes them in another one may deadlock with us.
    keys = sorted(keys, key=lambda key: lp_of(key.encode()))
    sent = [(key, f"{name}/{number}") for number, key in enumerate(keys)]
    begun = [history.begin(Publish(topic=TOPIC, key=key, value=value, transaction=name)) for key, value in sent]
    goes_back = rng.random() < 0.1
    try:
        # One round trip for all, as `publish_many` has; that one does not say which seqs they got.
        with connection.pipeline():
            publish = "SELECT mqlayer_app.publish_v2(%s, %s, %s)"
            answers = [connection.execute(publish, (TOPIC, key, value.encode())) for key, value in sent]
        rows = [answer.fetchone() for answer in answers]
        (connection.rollback if goes_back else connection.commit)()
    except psycopg.Error:
        # A lost connection at COMMIT: nobody can tell.
        for operation in begun:
            operation.info()
        raise
    for operation, (key, _), row in zip(begun, sent, rows, strict=True):
        (operation.fail if goes_back else operation.ok)(source=1, lp=lp_of(key.encode()), seq=row[0] if row else 0)


def drive(name: str, directory: Path, stopping: threading.Event) -> None:
    """Change the route at random, one change after the other, first whatever was left unfinished; retire now and then.

    Two drivers may run: what one was stopped in, the other one finishes.
    """
    settings = mqlayer.Settings()
    rng = random.Random(f"{os.environ.get('MQLAYER_CHAOS_SEED')}/{name}/{os.getpid()}")
    with History(directory, name) as history, Database(settings.control_dsn(), application=name) as database:
        observe_retiring(history, TOPIC)
        while not stopping.wait(rng.uniform(0.2, 2.0) * DRIVE_EVERY_S):
            try:
                _change(database, settings.key_prefix, rng, name)
                if rng.random() < 0.3:
                    retire_partitions(runtime_of(database, settings.key_prefix))
            except mqlayer.MqlayerError as error:
                # A node or Postgres is away, or the other driver was faster: the next turn goes on.
                log.warning("%s: %s", type(error).__name__, error)


def _change(database: Database, prefix: str, rng: random.Random, actor: str) -> None:
    if rng.random() < 0.2:
        with contextlib.suppress(NotFound, Conflict):
            drop_change(runtime_of(database, actor=actor), TOPIC)
    finish_changes(runtime_of(database, prefix, application=database), topic=TOPIC)
    plan = random_plan(load_route(database, TOPIC), [node.node_id for node in load_nodes(database)], rng)
    apply_change(runtime_of(database, prefix, application=database, actor=actor), plan)


def random_plan(route: Route, nodes: Sequence[NodeId], rng: random.Random) -> ChangePlan:
    """Return some change that suits a route, so that it keeps two to eight partitions."""
    ranges, count = route.ranges, len(route.ranges)
    wide = [r for r in ranges if r.lp_to - r.lp_from >= 4]
    kinds = ["move"] + ["split"] * (count < 8 and bool(wide)) + ["merge"] * (count > 2)
    match rng.choice(kinds):
        case "split":
            parent = rng.choice(wide)
            points = rng.sample(range(parent.lp_from + 1, parent.lp_to), rng.choice([1, 1, 2]))
            return plan_split(route, parent.partition, points, [rng.choice(nodes) for _ in range(len(points) + 1)])
        case "merge":
            first = rng.randrange(count - 1)
            some = ranges[first : first + rng.choice([2, 2, 3])]
            return plan_merge(route, [r.partition for r in some], rng.choice(nodes))
        case _:
            parent = rng.choice(ranges)
            return plan_move(route, parent.partition, rng.choice([node for node in nodes if node != parent.node]))


def work(name: str, directory: Path, stopping: threading.Event) -> None:
    """Run the periodic jobs, but for trimming: what a run's streams hold is read at its end."""
    observe_retiring(History(directory, name), TOPIC)
    if _leave_to_celery(stopping):
        return
    _celery().worker_main(["worker", "--pool", "threads", "--concurrency", "2", "--loglevel", "INFO",
                           "--hostname", f"{name}@chaos", "--without-gossip", "--without-mingle"])  # fmt: skip


def tick(name: str, directory: Path, stopping: threading.Event) -> None:
    """Say when jobs are due."""
    if _leave_to_celery(stopping):
        return
    _celery().start(["beat", "--schedule", str(directory / f"{name}.schedule"), "--loglevel", "INFO", "--pidfile", ""])


def _leave_to_celery(stopping: threading.Event) -> bool:
    """Have Celery be told to end; say whether this process was before. Until Celery listens, being told ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return stopping.is_set()


def _celery() -> Any:
    from mqlayer.workers.app import app

    schedule = app.conf.beat_schedule
    app.conf.beat_schedule = {job: facts for job, facts in schedule.items() if "trim" not in job}
    return app


def skew_clock(file: Path) -> None:
    """From now on this process's wall clock is off by as many seconds as a file says, once there is one."""
    real, real_ns = time.time, time.time_ns
    known: list[float] = [0.0, 0.0]

    def skew() -> float:
        if time.monotonic() > known[0]:
            known[0] = time.monotonic() + 0.2
            with contextlib.suppress(FileNotFoundError, ValueError):
                known[1] = float(file.read_text())
        return known[1]

    time.time = lambda: real() + skew()
    time.time_ns = lambda: real_ns() + int(skew() * 1e9)


ROLES: Final[dict[str, Callable[[str, Path, threading.Event], None]]] = {
    "writer": write,
    "relay": relay,
    "consumer": consume,
    "publisher": publish_batches,
    "pair": consume_twice,
    "driver": drive,
    "receiver": pop,
    "async_receiver": pop_async,
    "seller": sell,
    "sharer": share,
    "reclaimer": reclaim,
    "worker": work,
    "beat": tick,
}


def main() -> None:
    """Play one role until SIGTERM."""
    role, name, directory = sys.argv[1:4]
    stopping = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, end)
    # One that does not end is asked where it is.
    faulthandler.register(signal.SIGUSR1)
    if name_of_bug := os.environ.get("MQLAYER_TEST_PLANT"):
        from tests.chaos.harness.plants import plant

        plant(name_of_bug)
    skew_clock(Path(directory) / f"{name}.skew")
    if role in ("pilot", "shopper"):
        from tests.chaos.day_actors import DAY_ROLES

        DAY_ROLES[role](name, Path(directory), stopping)
        return
    ROLES[role](name, Path(directory), stopping)


if __name__ == "__main__":
    main()
