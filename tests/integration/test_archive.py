"""The archive: every record of archived topics once, in order, whatever happens between the streams and it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from mqlayer.archiving import archive_pass
from mqlayer.domain.routing import lp_of
from mqlayer.postgres.database import Database
from mqlayer.redis.nodes import NodeConnection
from mqlayer.redis.partitions import Appended, Run, append_command, append_reply
from mqlayer.routes.cache import load_route
from mqlayer.topics import create_topic, list_nodes, register_node

TOPIC = "orders"


class Scene:
    """An archived topic, and sources that append to it straight."""

    def __init__(self, dsn: str, url: str, prefix: str, partitions: int = 2, *, archived: bool = True) -> None:
        self.dsn, self.prefix = dsn, prefix
        self.database = Database(dsn)
        register_node(self.database, name="n1", url=url)
        self.route = create_topic(
            self.database, TOPIC, prefix=prefix, partitions=partitions, archived=archived, application=self.database
        )
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.seqs: dict[tuple[int, int], int] = {}

    def close(self) -> None:
        self.connection.close()
        self.database.close()

    def rows(self, sql: str, *facts: object) -> list[tuple[Any, ...]]:
        return self.connection.execute(sql.encode(), facts).fetchall()

    def send(self, source: int, key: str, *bodies: bytes, facts: bytes = b"1700000000000") -> None:
        """Append messages of a key as a source, where its LP is now."""
        lp = lp_of(key.encode())
        first = self.seqs.get((source, lp), 0) + 1
        fields = [field for body in bodies for field in (facts, key.encode(), body)]
        place = load_route(self.database, TOPIC).range_of(lp)
        node = next(node for node in list_nodes(self.database) if node.node_id == place.node)
        with NodeConnection(node) as line:
            command = append_command(line, self.prefix, place.partition, source, [Run(lp, first, len(bodies), fields)])
            answer = append_reply(line.call([command])[0], node.address)
        assert isinstance(answer, Appended), answer
        assert answer.outcomes is None, answer
        self.seqs[source, lp] = first + len(bodies) - 1

    def archive(self) -> Any:
        return archive_pass(self.database, prefix=self.prefix)

    def archived(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT source, lp, seq FROM mqlayer_archive.record ORDER BY source, lp, seq")

    def expected(self) -> list[tuple[int, int, int]]:
        return sorted((s, lp, seq) for (s, lp), last in self.seqs.items() for seq in range(1, last + 1))


@pytest.fixture
def scene(database_dsn: str, redis_url: str, key_prefix: str) -> Iterator[Scene]:
    scene = Scene(database_dsn, redis_url, key_prefix)
    yield scene
    scene.close()


def test_every_record_is_archived_once_with_its_place_and_content(scene: Scene) -> None:
    """Case 79."""
    scene.send(1, "a", b"one", b"two")
    scene.send(2, "a", b"other", facts=b'1700000000123:{"mq-tags":"0011223344556677:eu,vip","x":"\xc3\xa4"}')
    scene.send(1, "b", b"\x00\xff", facts=b'1700000000000:{"h":"1"}')
    report = scene.archive()
    assert report.archived == {TOPIC: 4}
    assert scene.archived() == scene.expected()
    lp = lp_of(b"a")
    rows = scene.rows(
        "SELECT batch, version, partition_id, log_offset, seq, extract(epoch FROM published_at)::float8, key, tags, "
        "headers, body FROM mqlayer_archive.record WHERE lp = %s ORDER BY batch, log_offset", lp,
    )  # fmt: skip
    partition = scene.route.range_of(lp).partition
    assert [row[1:] for row in rows] == [
        (1, partition, 1, 1, 1_700_000_000, b"a", None, None, b"one"),
        (1, partition, 2, 2, 1_700_000_000, b"a", None, None, b"two"),
        (1, partition, 3, 1, pytest.approx(1_700_000_000.123), b"a", ["eu", "vip"], '{"x":"ä"}', b"other"),
    ]
    assert scene.rows("SELECT count(*) FROM mqlayer_archive.record WHERE archived_at > now() - interval '1 min'") == [
        (4,)
    ]
    assert scene.archive().archived == {}
