"""Many messages of a key, published singly in one transaction: dense seqs in order, and a cost that does not grow."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import psycopg
import pytest

from mqlayer.domain.routing import lp_of as lp_of_bytes
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.wait import wait_until

pytestmark = pytest.mark.usefixtures("outbox_dsn")

Session = psycopg.Connection[tuple[Any, ...]]
START: Final = 60
"""The counters' seq at the start: 64 is the first at which an LP's place is remembered."""
PUBLISH: Final = "SELECT mqlayer_app.publish_v2(%s, %s, %s)"
MANY: Final = "SELECT mqlayer_app.publish_many_v1(ARRAY['orders', 'orders'], ARRAY['a', 'a'], %s)"
ONCE: Final = "SELECT * FROM mqlayer_app.publish_once_v1('orders', 'a', %s, %s)"
HOSTILE: Final = ("(0,1)", "(999999999,9999)", "(4294967296,70000)", "x", "", "(0,1)' OR true --")


def lp_of(key: str) -> int:
    return lp_of_bytes(key.encode())


@pytest.fixture
def started(outbox_dsn: str) -> Iterator[Session]:
    """A session of the owner, with counters that stand a little before a remembered seq."""
    with psycopg.connect(outbox_dsn, autocommit=True) as session:
        session.execute("UPDATE mqlayer_app.counter SET seq = %s", (START,))
        yield session


def count_as_many(session: Session) -> None:
    """Let an open transaction count as one of many messages."""
    session.execute("SELECT set_config('mqlayer_app.counters', 'many', true)")


def place_setting(key: str) -> str:
    return f"mqlayer_app.counter_{lp_of(key)}"


def remembered(session: Session, key: str) -> str | None:
    """Return where the transaction remembers the newest version of a key's counter."""
    ((found,),) = session.execute("SELECT current_setting(%s, true)", (place_setting(key),)).fetchall()
    return None if found is None else str(found)


def place(session: Session, key: str, topic: str = "orders") -> str:
    """Return where the newest version is."""
    rows = session.execute(
        "SELECT ctid::text FROM mqlayer_app.counter WHERE (topic, lp) = (%s, %s)", (topic, lp_of(key))
    )
    return str(rows.fetchall()[0][0])


def outbox_rows(dsn: str) -> dict[tuple[int, int], list[tuple[int, bytes]]]:
    """Return seqs and bodies of each topic and LP, in the order of seqs."""
    found: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
    for topic_id, lp, seq, body in ask_postgres(
        dsn, "SELECT topic_id, lp, seq, body FROM mqlayer_app.outbox ORDER BY topic_id, lp, seq"
    ):
        found.setdefault((topic_id, lp), []).append((seq, bytes(body)))
    return found


def buffers(session: Session) -> int:
    """Return how many pages a further message touches."""
    text = "EXPLAIN (ANALYZE, BUFFERS) SELECT mqlayer_app.publish_v2('orders', 'a', 'x')"
    plan = "\n".join(str(row[0]) for row in session.execute(text).fetchall())
    return sum(int(count) for count in re.findall(r"(?:hit|read)=(\d+)", plan.split("Planning")[0]))


def test_the_pages_that_a_message_touches_do_not_grow_with_the_messages_before_it(started: Session) -> None:
    """1,000 of one key leave eight pages of versions, 6,000 fifty; another key between them changes nothing."""
    several = (
        "SELECT mqlayer_app.publish_v2('orders', CASE WHEN n % 10 = 0 THEN 'b' ELSE 'a' END, 'x') "
        "FROM generate_series(1, %s) AS n"
    )
    with started.transaction():
        started.execute(several.replace("%s", "1000"))
        early = min(buffers(started) for _ in range(3))
        started.execute(several.replace("%s", "5000"))
        late = min(buffers(started) for _ in range(3))
        assert remembered(started, "a") == place(started, "a")
    assert late <= early + 5, (early, late)
    # Nothing is left of it behind the transaction.
    assert remembered(started, "a") == ""
    with started.transaction():
        started.execute(PUBLISH, ("orders", "a", b"x"))
        assert remembered(started, "a") == ""


@pytest.mark.parametrize("seed", range(6))
def test_seqs_are_dense_and_in_order_whatever_a_transaction_does_between(
    started: Session, outbox_dsn: str, seed: int
) -> None:
    """Savepoints, other keys and topics, other functions, settings of the caller's own, an end without a commit."""
    program = Program(started, random.Random(seed))  # a repeatable choice
    for commits in (True, False, True):
        program.run(steps=60, commits=commits)
    for (topic_id, lp), rows in outbox_rows(outbox_dsn).items():
        bodies = program.expected[topic_id, lp]
        assert rows == list(enumerate(bodies, start=START + 1)), (topic_id, lp)
    assert {place for place, bodies in program.expected.items() if bodies} == set(outbox_rows(outbox_dsn))


class Program:
    """Random steps within transactions, and what must be in the outbox after them."""

    def __init__(self, session: Session, choose: random.Random) -> None:
        self.session, self.choose, self.number = session, choose, 0
        self.expected: dict[tuple[int, int], list[bytes]] = {
            (topic_id, lp_of(key)): [] for topic_id in (1, 2) for key in "ab"
        }
        self.savepoints: list[dict[tuple[int, int], list[bytes]]] = []

    def run(self, *, steps: int, commits: bool) -> None:
        """Run a transaction."""
        before = self._copy()
        self.savepoints = []
        self.session.execute("BEGIN")
        count_as_many(self.session)
        for _ in range(steps):
            self._step()
        self.session.execute("COMMIT" if commits else "ROLLBACK")
        if not commits:
            self.expected = before

    def _step(self) -> None:
        kinds = ("publish", "many", "once", "savepoint", "back", "release", "hostile")
        (kind,) = self.choose.choices(kinds, weights=(30, 2, 2, 3, 2, 2, 2))
        if kind == "publish":
            topic_id, key = self.choose.choice((1, 1, 1, 2)), self.choose.choice("aaab")
            self.session.execute(PUBLISH, (("orders", "invoices")[topic_id - 1], key, self._body(topic_id, key)))
        elif kind == "many":
            self.session.execute(MANY, ([self._body(1, "a"), self._body(1, "a")],))
        elif kind == "once":
            body = self._body(1, "a")
            self.session.execute(ONCE, (body, body.decode()))
        elif kind == "savepoint":
            self.session.execute(f"SAVEPOINT s{len(self.savepoints)}".encode())
            self.savepoints.append(self._copy())
        elif kind == "hostile":
            self.session.execute("SELECT set_config(%s, %s, true)", (place_setting("a"), self.choose.choice(HOSTILE)))
        elif self.savepoints:
            self._end_savepoint(back=kind == "back")

    def _end_savepoint(self, *, back: bool) -> None:
        saved = self.savepoints.pop()
        name = f"s{len(self.savepoints)}"
        if back:
            self.session.execute(f"ROLLBACK TO {name}".encode())
            self.expected = saved
        self.session.execute(f"RELEASE {name}".encode())

    def _body(self, topic_id: int, key: str) -> bytes:
        self.number += 1
        body = b"%d" % self.number
        self.expected[topic_id, lp_of(key)].append(body)
        return body

    def _copy(self) -> dict[tuple[int, int], list[bytes]]:
        return {place: list(bodies) for place, bodies in self.expected.items()}


def test_a_savepoint_that_is_rolled_back_takes_the_place_back(started: Session) -> None:
    with started.transaction():
        count_as_many(started)
        for _ in range(5):
            started.execute(PUBLISH, ("orders", "a", b"x"))
        before = place(started, "a")
        with started.transaction(force_rollback=True):
            started.execute(PUBLISH, ("orders", "a", b"x"))
            assert remembered(started, "a") == place(started, "a") != before
        assert remembered(started, "a") == place(started, "a") == before


@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK", "dies"])
@pytest.mark.parametrize("knows", [False, True])
def test_another_publisher_of_the_key_waits_and_goes_on_behind_it(
    started: Session, outbox_dsn: str, ends: str, knows: bool
) -> None:
    """A place of another transaction's version, which a caller may set, is no way around the lock on the counter."""
    # The pool ends last: its thread waits for the connections.
    with ThreadPoolExecutor(1) as pool, psycopg.connect(outbox_dsn) as other, psycopg.connect(outbox_dsn) as holder:
        count_as_many(holder)
        for _ in range(6):
            holder.execute(PUBLISH, ("orders", "a", b"held"))
        count_as_many(other)
        if knows:
            found = place(started, "a")
            other.execute("SELECT set_config(%s, %s, true)", (place_setting("a"), found))
        waiting = pool.submit(lambda: other.execute(PUBLISH, ("orders", "a", b"waited")).fetchall()[0][0])
        await_lock(started, other.info.backend_pid, waiting)
        if ends == "dies":
            started.execute("SELECT pg_terminate_backend(%s)", (holder.info.backend_pid,))
            holder.close()
        else:
            holder.execute(ends.encode())
        assert waiting.result(timeout=20) == (START + 6 if ends == "COMMIT" else START) + 1
        other.commit()
    rows = outbox_rows(outbox_dsn)[1, lp_of("a")]
    assert [seq for seq, _ in rows] == list(range(START + 1, START + 1 + len(rows)))


def test_a_known_place_conflicts_under_repeatable_read_as_the_index_does(started: Session, outbox_dsn: str) -> None:
    with psycopg.connect(outbox_dsn) as reader:
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        found = place(reader, "a")
        started.execute(PUBLISH, ("orders", "a", b"first"))
        count_as_many(reader)
        reader.execute("SELECT set_config(%s, %s, true)", (place_setting("a"), found))
        with pytest.raises(psycopg.errors.SerializationFailure):
            reader.execute(PUBLISH, ("orders", "a", b"second"))


def await_lock(session: Session, pid: int, waiting: Future[Any]) -> None:
    """Wait until a session waits for a lock."""
    ask = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
    wait_until(lambda: waiting.done() or session.execute(ask, (pid,)).fetchall()[0][0], what="the lock")
    assert not waiting.done()


@pytest.mark.parametrize(
    ("topic", "body", "state"),
    [("nowhere", b"x", "MQ001"), ("orders", None, "MQ005"), ("orders", b"x" * 1_001, "MQ003")],
)
@pytest.mark.parametrize("many", [False, True])
def test_a_message_that_publish_v1_refuses_is_refused(
    started: Session, topic: str, body: bytes | None, state: str, many: bool
) -> None:
    """Also at a seq from which a transaction counts as one of many."""
    for seq in (START, 255):
        started.execute("UPDATE mqlayer_app.counter SET seq = %s", (seq,))
        with started.transaction(force_rollback=True):
            if many:
                count_as_many(started)
            refused = []
            for name in ("publish_v1", "publish_v2"):
                with pytest.raises(psycopg.Error) as raised, started.transaction():
                    started.execute(PUBLISH.replace("publish_v2", name).encode(), (topic, "a", body))
                refused.append(
                    (raised.value.sqlstate, str(raised.value).splitlines()[0], raised.value.diag.message_hint)
                )
            assert refused[0] == refused[1]
            assert refused[0][0] == state
