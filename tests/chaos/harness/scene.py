"""A topic on some nodes and the groups that consume it; what the stores say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import redis

from mqlayer.groups.group import find_group
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.routes import drain_progress, finish_changes, retire_partitions, route_history
from mqlayer.runtime.route_cache import load_route
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.chaos.actors import GROUP, MIRROR, TOPIC
from tests.chaos.harness.stores import note_sink, note_streams
from tests.fixtures.kept_connections import ask_postgres
from tests.proof.checker import Verdict, check
from tests.proof.history import History, Lineage, read_histories
from tests.proof.node_client import client_at
from tests.proof.runtimes import runtime_of

TOMBSTONE: Final = {"meta": {"state": "deleted"}}
WITHOUT_EFFECT: Final = """
SELECT counter.lp, counter.seq::bigint, count(sink.seq)::bigint, min(partition.partition_id)
FROM mqlayer_app.counter AS counter
LEFT JOIN sink ON sink.lp = counter.lp
LEFT JOIN mqlayer.partition AS partition
    ON partition.state = 'open' AND counter.lp >= partition.lp_from AND counter.lp < partition.lp_to
WHERE counter.seq > 0
GROUP BY counter.lp, counter.seq HAVING count(sink.seq) < counter.seq ORDER BY counter.lp
"""
NEWEST: Final = f"SELECT lp, seq::bigint FROM mqlayer_app.counter WHERE topic = '{TOPIC}' AND seq > 0"
UNOWNED: Final = """
SELECT g.name, a.partition_id, n.name, p.state
FROM mqlayer.assignment AS a
JOIN mqlayer.consumer_group AS g USING (group_id)
JOIN mqlayer.partition AS p USING (partition_id)
JOIN mqlayer.node AS n USING (node_id)
WHERE a.member_id IS NULL AND p.state <> 'deleted' ORDER BY 1, 2
"""


class Node(Protocol):
    """A Redis."""

    @property
    def url(self) -> str:
        """Its address."""


class Scene:
    """Some nodes, a topic, two groups; what the stores say of them."""

    groups: tuple[str, ...] = (GROUP, MIRROR)

    def __init__(
        self, database: Database, nodes: Sequence[Node], settings: Settings, directory: Path, *, partitions: int = 4
    ) -> None:
        self.database, self.nodes, self.settings, self.directory = database, nodes, settings, directory
        self.prefix, self.emptied = settings.key_prefix, False
        self.make(partitions)

    def make(self, partitions: int) -> None:
        """Register the nodes and create the topic."""
        for number, node in enumerate(self.nodes):
            register_node(runtime_of(self.database), name=f"n{number}", url=node.url)
        runtime = runtime_of(self.database, self.prefix, application=self.database)
        create_topic(runtime, TOPIC, partitions=partitions, archived=True)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return what Postgres answers."""
        return ask_postgres(self.settings.control_dsn(), statement)

    def changes(self) -> Counter[str]:
        """Return how many changes of each kind came into force."""
        return Counter(change.kind for change in route_history(self.database, TOPIC) if change.state == "done")

    def committed(self) -> int:
        """Return how many messages were committed to the outbox."""
        return int(self.rows("SELECT coalesce(sum(seq), 0)::bigint FROM mqlayer_app.counter")[0][0])

    def partitions(self, *states: str) -> list[int]:
        """Return the partitions in some states."""
        found = self.rows("SELECT partition_id, state FROM mqlayer.partition ORDER BY partition_id")
        return [partition for partition, state in found if state in states]

    def parents(self) -> dict[int, tuple[int, ...]]:
        """Return whose place each partition took, of all that ever served."""
        return {
            partition: tuple(parents)
            for partition, parents in self.rows(
                "SELECT p.partition_id, array_agg(q.partition_id) FROM mqlayer.partition p JOIN mqlayer.partition q"
                " ON q.ended_by_change = p.created_by_change AND q.lp_from < p.lp_to AND p.lp_from < q.lp_to GROUP "
                "BY p.partition_id"
            )
        }

    def unsettled(self) -> Iterator[str]:
        """Say what the groups have yet to do."""
        for progress in drain_progress(runtime_of(self.database, self.prefix), TOPIC):
            yield f"{progress}"
        yield from self.not_stored()
        with self._clients() as clients:
            yield from self._behind(clients)

    def _behind(self, clients: Sequence[redis.Redis]) -> Iterator[str]:
        version = load_route(self.database, TOPIC).version
        for name in self.groups:
            group = find_group(self.database, TOPIC, name)
            if group.version != version:
                yield f"group {name} is at version {group.version} of {version}"
            for partition in self.partitions("open"):
                keys = group_keys(self.prefix, partition, group.group_id)
                committed = _hget(clients, keys.lock, "committed")
                following = _hget(clients, partition_keys(self.prefix, partition).meta, "next")
                if following > 1 and committed != following:
                    yield f"group {name} is at {committed} of {following} in partition {partition}"

    def not_stored(self) -> Iterator[str]:
        """Say of which LPs a partition does not hold all that was committed: a node lost it, a relay has yet to send it
        again, and a group that had not handled it will."""
        newest, ranges = dict(self.rows(NEWEST)), load_route(self.database, TOPIC).ranges
        with self._clients() as clients:
            marks_of = {r: _outbox_marks(clients, partition_keys(self.prefix, r.partition).marks) for r in ranges}
        for found, marks in marks_of.items():
            lacking = [lp for lp, seq in newest.items() if found.lp_from <= lp < found.lp_to and marks.get(lp, 0) < seq]
            if lacking:
                yield f"partition {found.partition} lacks messages of LPs {lacking}"

    def without_effect(self, *, limit: int) -> Iterator[str]:
        """Say in which LPs something that was committed is not in the sink, and in which partitions these are."""
        for lp, committed, there, partition in self.rows(WITHOUT_EFFECT):
            limit -= 1
            if limit < 0:
                yield "and more"
                return
            yield f"LP {lp} of partition {partition}: {committed - there} of {committed} have no effect"

    def unowned(self) -> Iterator[str]:
        """Say which partitions nobody consumes now, of which group."""
        for group, partition, node, state in self.rows(UNOWNED):
            yield f"group {group} has nobody for partition {partition} ({state}, on {node})"

    def is_settled(self) -> bool:
        """Say whether both groups have settled all that was committed, along the whole lineage."""
        ends = self.rows("SELECT coalesce(max(position), 0)::bigint FROM sink")[0][0]
        assert ends >= self.committed(), f"at least {self.committed() - ends} messages have no effect"
        # What the periodic job does: where a drain and the end of its change meet, neither raises the group's version.
        finish_changes(runtime_of(self.database, self.prefix, application=self.database), topic=TOPIC)
        waiting = list(self.unsettled())
        assert not waiting, waiting
        there = self.rows("SELECT count(*) FROM sink")[0][0]
        assert there == self.committed(), f"{there} effects of {self.committed()} messages"
        return True

    def leftovers(self) -> Iterator[str]:
        """Retire what is drained; say what is left of any partition but those in force beside its tombstone."""
        retire_partitions(runtime_of(self.database, self.prefix))
        in_force = sorted(r.partition for r in load_route(self.database, TOPIC).ranges)
        for state, wanted in (("open", in_force), ("sealed", []), ("importing", [])):
            if (found := sorted(self.partitions(state))) != wanted:
                yield f"partitions that are {state}: {found}, not {wanted}"
        for partition in self.partitions("deleted"):
            # A node that is emptied lacks tombstones until it is armed; it need not be where nothing else is gone.
            if (left := self.left_of(partition)) != TOMBSTONE and (left or not self.emptied):
                yield f"partition {partition} is deleted, and its nodes hold {left}"

    def left_of(self, partition: int) -> dict[str, Any]:
        """Return all that the nodes hold of a partition: the last part of each key's name, and what is in it."""
        left: dict[str, Any] = {}
        for node in self.nodes:
            client = client_at(node.url, decode_responses=True)
            for key in client.scan_iter(f"{self.prefix}:{{{partition}}}:*", count=10_000):
                kind = client.type(key)
                left[key.split("}:")[1]] = client.hgetall(key) if kind == "hash" else kind
        return left

    def witness(self) -> None:
        """Write down what the stores hold."""
        with History(self.directory, "witness") as history:
            # Of those that are deleted some may not be buried yet.
            everything = self.partitions("open", "sealed", "deleted")
            note_streams(history, self.settings.control_dsn(), self.prefix, everything)
            note_sink(history, self.settings.control_dsn())
            for partition, parents in self.parents().items():
                history.note(Lineage(topic=TOPIC, partition=partition, parents=parents))

    def judge(self) -> Verdict:
        """Have the histories judged for both groups."""
        return check(read_histories(self.directory), flows=[(group, TOPIC) for group in self.groups])

    @contextmanager
    def _clients(self) -> Iterator[list[redis.Redis]]:
        """Lend a client of each node: to connect takes longer than to ask."""
        with ExitStack() as cleanup:
            clients = [client_at(node.url, decode_responses=True) for node in self.nodes]
            yield [cleanup.enter_context(client) for client in clients]


def _outbox_marks(clients: Sequence[redis.Redis], key: bytes) -> dict[int, int]:
    """Return the seq of the outbox's newest message per LP that a partition holds."""
    for client in clients:
        found: Any = client.hgetall(key.decode())
        if found:
            return {int(name.removeprefix("1:")): int(seq) for name, seq in found.items() if name.startswith("1:")}
    return {}


def _hget(clients: Sequence[redis.Redis], key: bytes, name: str) -> int:
    for client in clients:
        value: Any = client.hget(key.decode(), name)
        if value is not None:
            return int(value)
    return 0
