"""One round of each race: it returns by what a bug shows, or nothing."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from pydantic import SecretStr

from mqlayer import Context, failpoints
from mqlayer.domain.message import Identity
from mqlayer.domain.routing import lp_of
from mqlayer.errors import RetryLater, TransactionConflict
from mqlayer.failpoints import FailpointHit
from mqlayer.groups import drained
from mqlayer.maintenance import trim_pass
from mqlayer.outbox import publish, transaction
from mqlayer.postgres.database import Connection, Database
from mqlayer.redelivery import release_all
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import (
    Fenced,
    LockHolder,
    LockKept,
    LockTaken,
    acquire_command,
    acquire_reply,
    settle_command,
    settle_reply,
)
from mqlayer.routes import finish_changes, rearm_lost_nodes
from mqlayer.settings import Settings
from mqlayer.stack.wait import comes_true
from mqlayer.topics import create_topic, rearm_node, register_node
from tests.chaos.harness.race_servers import TOPIC, Place
from tests.fixtures.consumers import Stage
from tests.fixtures.power import PoweredRedis, build_sync_noter
from tests.proof.checker import check
from tests.proof.direct_publisher import DIRECT, DirectPublisher, stored_on
from tests.proof.fall_back import FallBack
from tests.proof.history import Ack, Deliver, Effect, History, OwnershipEvent, Publish, read_histories
from tests.proof.manual_member import ManualMember
from tests.proof.our_outbox import OurOutbox
from tests.proof.outbox_race import Race, run_race
from tests.proof.planted_bugs import Outbox
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of

GROUP: Final = "g"
WRITERS: Final = 4
PATIENCE_S: Final = 20.0


def outbox_as(recipe: Callable[[], Outbox]) -> Callable[[Place, bool], str]:
    """Return the race of writers on few keys, on a published recipe or on our outbox."""

    def race(there: Place, planted: bool) -> str:
        return _outbox_race(there, recipe() if planted else OurOutbox())

    return race


def own_outbox(there: Place, planted: bool) -> str:
    """Let writers race on our outbox, whatever its function is."""
    del planted
    return _outbox_race(there, OurOutbox())


def _outbox_race(there: Place, outbox: Outbox) -> str:
    directory, dsn = there.begin(), there.database()
    with psycopg.connect(dsn, autocommit=True) as connection:
        outbox.prepare(connection)
    return _broken(run_race(Race(seed=there.seed), outbox, dsn, directory).counts)


def deadlocks(there: Place, planted: bool) -> str:
    """Have writers collect messages of several keys in each of their transactions."""
    del planted
    there.begin()
    with there.stage() as stage, ThreadPoolExecutor(max_workers=WRITERS) as pool:
        seeds = [random.Random(f"{there.seed}/{number}") for number in range(WRITERS)]
        conflicts = sum(pool.map(lambda rng: _publish_several(stage.dsn, rng), seeds))
    return f"{conflicts} deadlocks" if conflicts else ""


def _publish_several(dsn: str, rng: random.Random) -> int:
    conflicts = 0
    with psycopg.connect(dsn) as connection:
        for _ in range(100):
            try:
                with transaction(connection) as several:
                    for key in rng.sample(range(12), 6):
                        several.publish(TOPIC, key=f"key-{key}", body=b"")
            except TransactionConflict:
                conflicts += 1
                if conflicts == 3:
                    break
    return conflicts


def torn_transactions(there: Place, planted: bool) -> str:
    """Have writers write a row and two messages at a time, of keys in any order: some of these end as deadlocks."""
    del planted
    there.begin()
    with there.stage() as stage, ThreadPoolExecutor(max_workers=WRITERS) as pool:
        with stage.database.connection() as connection:
            connection.execute("CREATE TABLE public.business (name text PRIMARY KEY)")
        list(pool.map(lambda number: _write_both(stage.database, number), range(WRITERS)))
        with stage.database.connection() as connection:
            torn = connection.execute(
                "SELECT name FROM (SELECT convert_from(body, 'UTF8') AS name, 1 AS sent FROM mqlayer_app.outbox) AS o"
                " FULL JOIN public.business b USING (name) GROUP BY name"
                " HAVING count(b.name) <> 2 OR count(o.sent) <> 2"
            ).fetchall()
    return f"{len(torn)} transactions of which a part is missing" if torn else ""


def _write_both(database: Database, number: int) -> None:
    rng = random.Random(number)
    for turn in range(30):
        name, keys = f"{number}/{turn}", rng.sample(range(4), 2)

        def work(connection: Connection, name: str = name, keys: list[int] = keys) -> None:
            connection.execute("INSERT INTO public.business (name) VALUES (%s)", (name,))
            for key in keys:
                publish(connection, TOPIC, key=f"key-{key}", body=name.encode())

        database.transaction(work, timeout_s=PATIENCE_S)


def power_cut(there: Place, planted: bool) -> str:
    """Cut the power of a node that a direct producer publishes to, and count what it was told is stored and is not."""
    directory = there.begin()
    node = PoweredRedis(directory / "node", options={"appendfsync": "everysec" if planted else "always"})
    noter = build_sync_noter(directory)
    assert noter is not None, "no C compiler: install one (Debian: apt-get install gcc)"
    node.library = noter
    node.start()
    try:
        settings = Settings(dsn=SecretStr(there.database()), key_prefix="race")
        with Database(settings.control_dsn()) as database:
            register_node(runtime_of(database), name="n1", url=node.url)
            route = create_topic(runtime_of(database, "race"), DIRECT, partitions=2)
            with DirectPublisher(settings) as publisher:
                publisher.wait_for_more()
                node.cut_power()
                node.start()
                rearm_lost_nodes(runtime_of(database, "race", application=database))
                publisher.wait_for_more()
        missing = publisher.stored - stored_on(node, "race", [part.partition for part in route.ranges])
    finally:
        node.erase()
    return f"{len(missing)} messages that were called stored are lost" if missing else ""


def full_memory(there: Place, planted: bool) -> str:
    """Fill a node's memory while messages are in hand: they are settled all the same."""
    del planted
    there.begin()
    going = threading.Event()

    def handle(body: bytes, ctx: Context) -> None:
        del body, ctx
        going.wait(PATIENCE_S)

    with there.stage() as stage:
        stage.send_numbers(keys=10, each=10)
        stage.consume(handle)
        comes_true(lambda: None not in stage.owners().values(), within_s=PATIENCE_S)
        stage.redis.config_set("maxmemory", 1)
        try:
            going.set()
            settled = comes_true(stage.all_settled, within_s=8)
        finally:
            stage.redis.config_set("maxmemory", 0)
    return "" if settled else "nothing is settled while memory is full"


def parked_keys(there: Place, planted: bool) -> str:
    """Have messages come to keys that are parked and released all the while."""
    del planted
    directory, failed = there.begin(), set[Identity]()
    with there.stage() as stage, History(directory, "race") as history:

        def handle(body: bytes, ctx: Context) -> None:
            facts = _facts(ctx.identity, ctx.key, body)
            operation = history.begin(
                Deliver(group=GROUP, partition=ctx.partition, epoch=ctx.epoch, attempt=ctx.attempt, **facts)
            )
            if ctx.identity.seq % 10 == 1 and ctx.identity not in failed:
                # Released by an operator, its attempts begin anew.
                failed.add(ctx.identity)
                operation.info()
                raise RetryLater(3600.0)
            operation.ok()

        stage.consume(handle, policy="park")
        keys = [f"key-{number}" for number in range(4)]
        for turn in range(1, 121):
            for key in keys:
                identity = Identity(1, lp_of(key.encode()), turn)
                history.note(Publish(**_facts(identity, key, b"%d" % turn)))
            stage.send((key, b"%d" % turn) for key in keys)
            release_all(runtime_of(stage.database, actor="race"), TOPIC, GROUP)
        comes_true(lambda: _nothing_is_parked(stage), within_s=8)
    return _broken(check(read_histories(directory), flows=[(GROUP, TOPIC)]).counts)


def _nothing_is_parked(stage: Stage) -> bool:
    release_all(runtime_of(stage.database, actor="race"), TOPIC, GROUP)
    with stage.database.connection() as connection:
        row = connection.execute("SELECT count(*) FROM mqlayer.parked_message").fetchone()
    return stage.all_settled() and row == (0,)


def trimmed_streams(there: Place, planted: bool) -> str:
    """Trim again and again while a group has much before it, and count what it never gets."""
    del planted
    there.begin()
    handled: set[Identity] = set()

    def handle(body: bytes, ctx: Context) -> None:
        del body
        time.sleep(0.002)
        handled.add(ctx.identity)

    with there.stage() as stage:
        stage.consume(handle, prefetch_count=20)
        comes_true(lambda: None not in stage.owners().values(), within_s=PATIENCE_S)
        for turn in range(10):
            stage.send_numbers(keys=20, each=10, first=10 * turn + 1)
            trim_pass(stage.runtime)
        comes_true(stage.all_settled, within_s=8)
        missing = 2000 - len(handled)
    return f"{missing} lost" if missing else ""


def two_owners(there: Place, planted: bool) -> str:
    """Have consumers rely on an advisory lock alone; or, without the bug, on an epoch drawn with it and our fence."""
    return _own_in_turns(there, fenced=not planted)


def fenced_owners(there: Place, planted: bool) -> str:
    """Do the same with our fence, whatever it looks at."""
    del planted
    return _own_in_turns(there, fenced=True)


def _own_in_turns(there: Place, *, fenced: bool) -> str:
    """Have two consumers take turns by an advisory lock; end the connection of the one that has it, again and again."""
    directory, dsn, done = there.begin(), there.database(), threading.Event()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE sink (position bigserial, seq bigint, epoch bigint)")
        connection.execute("CREATE SEQUENCE epochs")
        with ThreadPoolExecutor(max_workers=2) as pool:
            consumers = [pool.submit(_own_by_lock, dsn, done, fenced) for _ in range(2)]
            for _ in range(20):
                before = _effects(connection)
                comes_true(lambda before=before: _effects(connection) > before + 3, within_s=PATIENCE_S)  # type: ignore[misc]
                connection.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
            done.set()
            for consumer in consumers:
                consumer.result()
        rows = connection.execute("SELECT position, seq, epoch FROM sink ORDER BY position").fetchall()
    _note_effects(directory, rows)
    return _broken(check(read_histories(directory), drained=False).counts)


def _effects(connection: Connection) -> int:
    row = connection.execute("SELECT count(*) FROM sink").fetchone()
    return int(row[0]) if row else 0


def _own_by_lock(dsn: str, done: threading.Event, fenced: bool) -> None:
    with psycopg.connect(dsn, autocommit=True) as effects:
        while not done.wait(0.01):
            # It may be ended while it asks for the lock, too.
            with suppress(psycopg.OperationalError), psycopg.connect(dsn, autocommit=True) as lock:
                [(taken, epoch)] = lock.execute("SELECT pg_try_advisory_lock(7), nextval('epochs')").fetchall()
                while taken and not done.is_set():
                    taken = _handle_next(effects, epoch, fenced=fenced)


def _handle_next(effects: Connection, epoch: int, *, fenced: bool) -> bool:
    [(seq,)] = effects.execute("SELECT coalesce(max(seq), 0) + 1 FROM sink").fetchall()
    # What a handler does.
    effects.execute("SELECT pg_sleep(0.002)")
    with effects.transaction():
        answer = _ask_fence(effects, seq, epoch) if fenced else "current"
        if answer == "current":
            effects.execute("INSERT INTO sink (seq, epoch) VALUES (%s, %s)", (seq, epoch))
    return answer != "stale"


def _ask_fence(effects: Connection, seq: int, epoch: int) -> str:
    row = effects.execute(
        "SELECT answer FROM mqlayer_app.fence_v1(1, 1::smallint, 1, 'key', %s, %s)", (seq, epoch)
    ).fetchone()
    return str(row[0]) if row else ""


def _note_effects(directory: Path, rows: list[tuple[Any, ...]]) -> None:
    with History(directory, "race") as history:
        for place, seq, epoch in rows:
            facts = _facts(Identity(1, 1, seq), "key", b"")
            history.note(Effect(group=GROUP, partition=1, epoch=epoch, place=place, **facts))


def _facts(identity: Identity, key: str | None, body: bytes) -> dict[str, Any]:
    source, lp, seq = identity
    return {"topic": TOPIC, "key": key, "source": source, "lp": lp, "seq": seq, "value": body.decode()}


def _broken(counts: Any) -> str:
    return ", ".join(f"{count} {breach}" for breach, count in counts.items() if count)


def woken_owners(there: Place, planted: bool) -> str:
    """Have two owners of a partition take its lock and settle in it; each sleeps past the other's taking, and goes on.

    What stops one that slept is the node, and nothing else.
    """
    del planted
    directory, epochs = there.begin(), itertools.count(1)
    with there.stage() as stage, History(directory, "race") as history, ThreadPoolExecutor(max_workers=2) as pool:
        stage.send_numbers(keys=20, each=200)
        until = time.monotonic() + 6
        list(pool.map(lambda name: _own_and_sleep(stage, history, epochs, name, until), ["a", "b"]))
    return _broken(check(read_histories(directory), drained=False).counts)


def _own_and_sleep(stage: Stage, history: History, epochs: Iterator[int], member: str, until: float) -> None:
    rng, partition = random.Random(member), int(stage.partitions[0])
    with stage.connection() as connection:
        while time.monotonic() < until:
            holder = LockHolder(stage.prefix, partition, 1, member, next(epochs))
            owned = _take(connection, history, holder)
            while owned and time.monotonic() < until:
                # It sleeps, as a stopped process does, for up to some seconds of the node's clock.
                time.sleep(rng.choice([0.01, 0.01, 0.1, 1.5]))
                owned = _settle_next(connection, history, holder)


def _take(connection: NodeConnection, history: History, holder: LockHolder) -> bool:
    event = OwnershipEvent(
        topic=TOPIC, group=GROUP, partition=holder.partition, member=holder.member, epoch=holder.epoch, change="taken"
    )
    operation = history.begin(event)
    answer = acquire_reply(connection.call([acquire_command(connection, holder, start=1)])[0], connection.node.address)
    taken = not isinstance(answer, Fenced)
    (operation.ok if taken else operation.fail)()
    return taken


def _settle_next(connection: NodeConnection, history: History, holder: LockHolder) -> bool:
    """Refresh the lock as a member does with each read, and settle the next offset; say whether both were taken."""
    answer = acquire_reply(connection.call([acquire_command(connection, holder, start=1)])[0], connection.node.address)
    # Whatever the answer is: between it and the settling anything may happen.
    offset = answer.committed if isinstance(answer, LockKept | LockTaken) else 1
    facts = _facts(Identity(1, 1, offset), "key", b"")
    history.note(Effect(group=GROUP, partition=holder.partition, epoch=holder.epoch, fenced=False, **facts))
    operation = history.begin(Ack(group=GROUP, partition=holder.partition, epoch=holder.epoch, **facts))
    settled = settle_reply(
        connection.call([settle_command(connection, holder, [(offset, offset)])])[0], connection.node.address
    )
    (operation.ok if isinstance(settled, LockKept) else operation.fail)()
    return isinstance(settled, LockKept)


def late_ack(there: Place, planted: bool) -> str:
    """Have a node fall back and be armed, and an ack of before come: it is of messages that are others by now."""
    del planted
    directory, going = there.begin(), threading.Event()

    def handle(body: bytes, ctx: Context) -> None:
        del ctx
        if body == b"new":
            going.wait(PATIENCE_S)

    with there.stage() as stage:
        partition = int(stage.partitions[0])
        key = stage.key_in(partition)
        stage.consume(handle)
        stage.send([(key, b"kept")] * 10)
        comes_true(lambda: stage.position(partition).committed == 11, within_s=PATIENCE_S)
        kept = FallBack(there.node, directory / "kept")
        [(member, epoch)] = [(who, epoch) for where, who, epoch, _ in stage.assignments() if where == partition]
        stage.send([(key, b"lost")] * 10)
        comes_true(lambda: stage.position(partition).committed == 21, within_s=PATIENCE_S)
        kept.happen()
        rearm_node(runtime_of(stage.database, stage.prefix, application=stage.database), "node-1")
        stage.forget_last(key, 10)
        stage.send([(key, b"new")] * 10)
        holder = LockHolder(stage.prefix, partition, stage.group_id(), member or "", epoch)
        with stage.connection() as connection:
            answer = settle_reply(
                connection.call([settle_command(connection, holder, [(11, 20)])])[0], connection.node.address
            )
        going.set()
    return "an ack of before settles 10 new messages" if isinstance(answer, LockKept) else ""


def lost_seal(there: Place, planted: bool) -> str:
    """Have a node lose a seal that nobody had recorded yet, and one that read it say so, under the epoch of now.

    The partition went on meanwhile, and is sealed again behind more messages.
    """
    del planted
    directory = there.begin()
    with there.stage() as stage:
        partition = int(stage.partitions[0])
        member = ManualMember(stage.database, stage.prefix, TOPIC, group=GROUP)
        stage.send_numbers(keys=20, each=10)
        member.consume_all()
        kept = FallBack(there.node, directory / "kept")
        _seal_unrecorded(stage, partition)
        lost = member.position(partition)[1]
        kept.happen()
        rearm_node(runtime_of(stage.database, stage.prefix, application=stage.database), "node-1")
        stage.send_numbers(keys=20, each=10, first=11)
        finish_changes(runtime_of(stage.database, stage.prefix, application=stage.database))
        left, command = member.position(partition)
        assert lost is not None, "the first seal was not read"
        assert command is not None, "there is no second seal"
        passed = drained(stage.database, member.session, member.assigned()[partition], lost.seal_id)
        return f"{len(left)} messages are passed by" if passed and member.version == 2 else ""


def early_successors(there: Place, planted: bool) -> str:
    """Split a partition while its first message waits to be tried again, and send more: that waits for all before."""
    del planted
    there.begin()
    handled: list[int] = []

    def handle(body: bytes, ctx: Context) -> None:
        if body == b"0" and ctx.attempt < 3:
            raise RetryLater(0.5)
        handled.append(int(body))

    with there.stage() as stage:
        partition = int(stage.partitions[0])
        key = stage.key_in(partition)
        stage.send((key, b"%d" % number) for number in range(20))
        stage.consume(handle)
        comes_true(lambda: None not in stage.owners().values(), within_s=PATIENCE_S)
        stage.route = split(runtime_of(stage.database, stage.prefix, application=stage.database), TOPIC, partition)
        stage.send((key, b"%d" % number) for number in range(20, 40))
        comes_true(lambda: len(handled) == 40, within_s=8)
    missing = set(range(40)) - set(handled)
    return f"{len(missing)} messages are passed by" if missing else "" if handled == sorted(handled) else "inversion"


def _seal_unrecorded(stage: Stage, partition: int) -> None:
    """Split a partition by a driver that dies between the seal and its record."""
    failpoints.arm("change.after_seal", "raise")
    try:
        with suppress(FailpointHit):
            split(runtime_of(stage.database, stage.prefix, application=stage.database), TOPIC, partition)
    finally:
        failpoints.disarm_all()
