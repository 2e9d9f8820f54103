"""The fence of a batch: one round trip for many messages, each effect once; cases 34, 52, 77."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest

from mqlayer import Batch, BatchMessage, BatchOf
from mqlayer.domain.routing import lp_of
from mqlayer.errors import BatchUndone, HandlerFault, InvalidInput, StaleOwner
from mqlayer.postgres.queries import query
from tests.fixtures.consumers import Stage, member_of
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_ranges import range_of

pytestmark = pytest.mark.usefixtures("as_consumer")

SINK = "CREATE TABLE sink (position bigserial PRIMARY KEY, key text, value int)"
KINDS = ["distinct", "key"]


@pytest.fixture
def connection(stage: Stage) -> Any:
    with kept_session(stage.dsn, autocommit=True) as connection:
        connection.execute(SINK)
        yield connection


def book(connection: psycopg.Connection, messages: list[BatchMessage[int]]) -> None:
    with connection.cursor() as cursor:
        cursor.executemany("INSERT INTO sink (key, value) VALUES (%s, %s)", [(m.key, m.value) for m in messages])


def booked(connection: psycopg.Connection, key: str) -> list[int]:
    rows = connection.execute("SELECT value FROM sink WHERE key = %s ORDER BY position", [key]).fetchall()
    return [value for (value,) in rows]


def consume(stage: Stage, handle: Callable[[Batch[int]], Any], kind: Any, **options: Any) -> None:
    stage.consume(handle, batch=BatchOf(kind, limit=20), body=int, concurrency=2, **options)


@pytest.mark.parametrize("kind", some_of(KINDS, 2))
def test_a_batch_is_applied_in_one_transaction_and_once(
    stage: Stage, connection: psycopg.Connection, kind: Any
) -> None:
    """Case 77: what a lost batch had committed is left out when it comes again, the rest is applied."""
    lost: list[int] = []

    def handle(batch: Batch[int]) -> None:
        losing, half = not lost and len(batch) > 1, len(batch) // 2
        if losing:
            lost.append(half)
        with kept_session(stage.dsn) as own:
            book(own, batch.fence(own, batch[:half] if losing else None))
        if losing:
            raise RuntimeError("its end is not known")

    stage.send_numbers(keys=4, each=30)
    consume(stage, handle, kind)
    stage.wait_settled()
    assert all(booked(connection, f"key-{key}") == [*range(1, 31)] for key in range(4))
    assert lost[0] >= 1


@pytest.mark.parametrize("kind", some_of(KINDS, 2))
def test_what_fails_before_the_fence_is_not_applied_and_the_rest_is(
    stage: Stage, connection: psycopg.Connection, kind: Any
) -> None:
    """Case 58: partial success within one transaction."""

    def handle(batch: Batch[int]) -> None:
        for message in batch:
            if message.value % 7 == 0 and message.attempt == 1:
                batch.fail(message, ValueError("planted"))
        with kept_session(stage.dsn) as own:
            book(own, batch.fence(own))

    stage.send_numbers(keys=3, each=20)
    consume(stage, handle, kind)
    stage.wait_settled()
    assert all(booked(connection, f"key-{key}") == [*range(1, 21)] for key in range(3))


@pytest.mark.parametrize("kind", some_of(KINDS, 2))
def test_a_message_that_fails_behind_the_fence_takes_its_transaction_back(
    stage: Stage, connection: psycopg.Connection, kind: Any
) -> None:
    """Case 77: else it would count as applied without its effect. Nobody beside it has a failed attempt."""
    attempts: set[int] = set()

    def handle(batch: Batch[int]) -> None:
        with kept_session(stage.dsn) as own:
            for message in batch.fence(own):
                attempts.add(message.attempt if message.value != 5 else 1)
                if message.value == 5 and message.attempt == 1:
                    batch.fail(message, ValueError("planted"))
                book(own, [message])

    stage.send_numbers(keys=3, each=10)
    consume(stage, handle, kind)
    stage.wait_settled()
    assert all(booked(connection, f"key-{key}") == [*range(1, 11)] for key in range(3))
    assert attempts == {1}


def test_marks_do_not_outlive_a_transaction_that_was_rolled_back(stage: Stage, connection: psycopg.Connection) -> None:
    """A handler that marks as it goes, and fails before its commit, loses nothing."""
    failed: list[bool] = []

    def handle(batch: Batch[int]) -> None:
        with kept_session(stage.dsn) as own:
            for message in batch.fence(own):
                book(own, [message])
                batch.done(message)
            if not failed:
                failed.append(True)
                raise RuntimeError("before the commit")

    stage.send_numbers(keys=1, each=10)
    consume(stage, handle, "key")
    stage.wait_settled()
    assert booked(connection, "key-0") == [*range(1, 11)]


def test_the_fence_refuses_what_would_lose_or_reverse_an_effect(stage: Stage, connection: psycopg.Connection) -> None:
    """Of one key nothing is left out in front; nothing is fenced twice, nor failed and applied."""
    refused: list[tuple[type[BaseException], str]] = []

    def refuse(act: Callable[[], object]) -> None:
        try:
            act()
        except (InvalidInput, HandlerFault, BatchUndone) as error:
            refused.append((type(error), str(error)))

    kept: list[Batch[int]] = []

    def handle(batch: Batch[int]) -> None:
        if kept:
            return
        kept.append(batch)
        with kept_session(stage.dsn) as own:
            refuse(lambda: batch.fence(own, batch[1:]))
            batch.fail(batch[3], ValueError("planted"))
            refuse(lambda: batch.fence(own, batch[3:4]))
            refuse(lambda: batch.fence(own, batch[4:]))
            assert batch.fence(own) == batch[:3]
            book(own, batch[:3])
            refuse(lambda: batch.fence(own, batch[:1]))
            refuse(lambda: batch.done(batch[4]))

    stage.send_numbers(keys=1, each=6)
    consume(stage, handle, "key")
    stage.wait_settled()
    assert booked(connection, "key-0") == [1, 2, 3]
    kinds = [kind for kind, _ in refused]
    assert kinds == [InvalidInput, InvalidInput, InvalidInput, HandlerFault, InvalidInput]
    assert "message 0 of the batch comes before message 5" in refused[0][1]
    with pytest.raises(HandlerFault, match="has ended"):
        kept[0].done(kept[0][5])


@pytest.mark.parametrize("kind", some_of(KINDS, 2))
def test_a_batch_of_an_owner_that_lost_its_right_is_refused(
    stage: Stage, connection: psycopg.Connection, kind: Any
) -> None:
    """Case 34: nothing of it is applied; of another partition's messages in it nothing is lost."""
    stale = stage.partitions[0]
    raised: list[str] = []
    attempts: set[int] = set()

    def handle(batch: Batch[int]) -> None:
        attempts.update(message.attempt for message in batch if message.partition != stale)
        with kept_session(stage.dsn) as own:
            mine = [message for message in batch if message.partition == stale]
            if mine and not raised:
                facts = {"group_id": stage.group_id(), "lp_from": 0, "lp_to": 512, "epoch": mine[0].epoch + 1_000}
                connection.execute(query("fence_raise"), facts)
            try:
                book(own, batch.fence(own))
            except StaleOwner as error:
                raised.append(str(error))
                raise

    stage.send_numbers(keys=12, each=5)
    app = stage.app()
    app.consumer(stage.topic, group="g", batch=BatchOf(kind, limit=20, linger_s=0.1), body=int)(handle)
    app.start()
    good = [n for n in range(12) if range_of(stage.route, lp_of(f"key-{n}".encode())).partition != stale]
    wait_until(lambda: all(booked(connection, f"key-{key}") == [*range(1, 6)] for key in good), what="the others")
    # Its member counts it once the handler has raised.
    wait_until(lambda: member_of(app).stats.fenced, what="a refusal")
    assert all(booked(connection, f"key-{key}") == [] for key in range(12) if key not in good)
    assert attempts == {1}, "the others of the batch only came again"


@pytest.mark.parametrize("kind", some_of(KINDS, 2))
def test_async_batches_have_the_same_fence(stage: Stage, connection: psycopg.Connection, kind: Any) -> None:
    async def handle(batch: Batch[int]) -> None:
        async with await psycopg.AsyncConnection.connect(stage.dsn) as own:
            for message in await batch.afence(own):
                await own.execute("INSERT INTO sink (key, value) VALUES (%s, %s)", [message.key, message.value])

    stage.send_numbers(keys=3, each=10)
    consume(stage, handle, kind)
    stage.wait_settled()
    assert all(booked(connection, f"key-{key}") == [*range(1, 11)] for key in range(3))


# -- the function itself ---------------------------------------------------------------------------------------------


def many(connection: psycopg.Connection, messages: Sequence[tuple[int, int, str | None, int, int, int]]) -> Any:
    """Call fence_many_v2 for group 1."""
    names = ("lps", "sources", "keys", "seqs", "epochs", "replays")
    columns: list[list[Any]] = [list(column) for column in zip(*messages, strict=True)]
    row = connection.execute(query("fence_many"), {"group_id": 1, **dict(zip(names, columns, strict=True))}).fetchone()
    assert row is not None
    return row[0]


def test_it_answers_as_the_fence_of_single_messages_does(database_dsn: str) -> None:
    """Whatever the order, repetitions and sources: one call answers and notes what single calls in turn would."""
    rng = random.Random(7)
    noted = "SELECT group_id, lp, source_id, key, replay, seq FROM mqlayer_app.fence_applied ORDER BY 1, 2, 3, 4"
    with kept_session(database_dsn, autocommit=True) as connection:
        for _ in range(150):
            # All messages of an owned partition have one replay.
            replay = rng.choice([0, 0, 0, 1])
            messages = [
                (rng.randrange(2), rng.choice([1, 1, 2, 3]), rng.choice(["a", "b", "ä", None]), rng.randint(1, 40), 5,
                 replay)
                for _ in range(rng.randint(1, 12))
            ]  # fmt: skip
            if rng.random() < 0.5:
                # Each of a key of its own, as in a batch of distinct keys: these take the short way.
                messages = list({(m[:3], m[3] if m[2] is None else 0): m for m in messages}.values())
            before = connection.execute(noted).fetchall()
            with connection.transaction(force_rollback=True):
                singly = [one(connection, *message) for message in messages]
                after_singly = connection.execute(noted).fetchall()
            assert connection.execute(noted).fetchall() == before
            assert many(connection, messages) == singly
            assert connection.execute(noted).fetchall() == after_singly
            if rng.random() < 0.3:
                connection.execute("DELETE FROM mqlayer_app.fence_applied")


def one(
    connection: psycopg.Connection, lp: int, source: int, key: str | None, seq: int, epoch: int, replay: int
) -> Any:
    """Call fence_v1 for group 1."""
    facts = {"group_id": 1, "lp": lp, "source": source, "key": key, "seq": seq, "epoch": epoch, "replay": replay}
    row = connection.execute(query("fence"), facts).fetchone()
    assert row is not None
    return row[0]


def test_a_stale_one_ends_it(database_dsn: str) -> None:
    with kept_session(database_dsn, autocommit=True) as connection:
        assert many(connection, [(1, 1, "a", 1, 9, 0)]) == ["current"]
        assert many(connection, [(2, 1, "b", 1, 8, 0), (1, 1, "a", 2, 8, 0), (0, 1, "c", 1, 8, 0)]) == [
            None, "stale", "current"
        ]  # fmt: skip


def test_a_batch_raises_the_epochs_that_a_take_over_left(database_dsn: str) -> None:
    """An open effect of the former owner held a row. Each partition of the batch has an epoch of its own."""
    epochs = "SELECT lp, epoch FROM mqlayer_app.fence_epoch ORDER BY 1"
    with closing(psycopg.connect(database_dsn)) as former, kept_session(database_dsn, autocommit=True) as connection:
        facts = {"group_id": 1, "lp_from": 0, "lp_to": 3, "epoch": 5}
        connection.execute(query("fence_raise"), facts)
        assert many(former, [(1, 1, "a", 1, 5, 0)]) == ["current"]
        connection.execute(query("fence_raise"), facts | {"epoch": 7})
        assert connection.execute(epochs).fetchall() == [(0, 7), (1, 5), (2, 7)]
        former.commit()
        taken = [(4, 1, "d", 1, 6, 0), (2, 1, "b", 1, 7, 0), (1, 1, "a", 1, 7, 0)]
        assert many(connection, taken) == ["current", "current", "applied"]
        assert connection.execute(epochs).fetchall() == [(0, 7), (1, 7), (2, 7), (4, 6)]
        assert "stale" in many(former, [(1, 1, "c", 1, 5, 0)])
        former.rollback()


def test_a_batch_reads_its_own_rows_whatever_the_statistics_say(database_dsn: str) -> None:
    """They may be of another group, from before this one had rows."""
    fill_applied = """INSERT INTO mqlayer_app.fence_applied (group_id, lp, source_id, key, seq)
        SELECT %s, n %% 1024, 1, 'k' || n, 1 FROM generate_series(1, 10000) AS n"""
    with kept_session(database_dsn, autocommit=True) as connection:
        for group in (2, 1):
            taken = {"group_id": group, "lp_from": 0, "lp_to": 1024, "epoch": 5}
            connection.execute(query("fence_raise"), taken)
            connection.execute(fill_applied, [group])
            if group == 2:
                connection.execute("ANALYZE mqlayer_app.fence_epoch, mqlayer_app.fence_applied")
        facts: dict[str, Any] = {
            "group_id": 1, "lps": [n % 1024 for n in range(1, 101)], "sources": [1] * 100,
            "keys": [f"k{n}" for n in range(1, 101)], "epochs": [5] * 100, "replays": [0] * 100,
        }  # fmt: skip
        plan = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + query("fence_many")
        pages = 0
        for seq in range(2, 9):
            row = connection.execute(plan, facts | {"seqs": [seq] * 100}).fetchone()
            assert row is not None
            pages = row[0][0]["Plan"]["Shared Hit Blocks"] + row[0][0]["Plan"]["Shared Read Blocks"]
        # Two looks at its epoch and one write per message; by a plan that reads a group's rows it is ten times as much.
        assert 0 < pages < 2_000


def test_arrays_of_different_lengths_are_refused(database_dsn: str) -> None:
    with (
        kept_session(database_dsn, autocommit=True) as connection,
        pytest.raises(psycopg.Error, match="arrays of different lengths"),
    ):
        connection.execute("SELECT mqlayer_app.fence_many_v2(1, '{1}', '{1,2}', '{a}', '{1}', '{1}', '{0}')")


def test_batches_with_keys_in_common_do_not_deadlock(database_dsn: str) -> None:
    """A stale owner and the new one may have the same messages, in another order."""
    forth = [(lp, 1, key, 1, 5, 0) for lp in range(3) for key in "abc"]
    with (
        closing(psycopg.connect(database_dsn)) as first,
        closing(psycopg.connect(database_dsn)) as second,
        kept_session(database_dsn, autocommit=True) as observer,
    ):
        assert many(first, forth[4:]) == ["current"] * 5
        answers: list[Any] = []
        other = threading.Thread(target=lambda: answers.append(many(second, forth[::-1])))
        other.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: observer.execute(waiting).fetchone(), what="the second one waits")
        first.commit()
        other.join(10)
        assert sorted(answers[0]) == ["applied"] * 5 + ["current"] * 4
        second.rollback()
