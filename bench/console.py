"""Pages of the console on a large system: 10,240 partitions, 50 groups, a week of samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import psycopg
import redis

from bench.registry import Line, bench, note
from bench.stage import Stage
from mqlayer.settings import Settings

LIMIT_MS: Final = 300.0
"""For the slowest of 20 pages."""
TOPICS: Final = 10
GROUPS: Final = 5
"""Of each topic."""
MOVES: Final = 200
"""Of the first topic: route versions that the picture pages through."""
WEEK: Final = 10_080
LPS: Final = 1_024
TIMES: Final = 20

PAGES: Final[Mapping[str, str]] = {
    "topics": "/topics",
    "topic": "/topics/big-0?last=week",
    "route": "/topics/big-0/route",
    "groups": "/groups",
    "group": "/groups/big-0/group-0?last=week",
    "partition": "/groups/big-0/group-0/partitions/{partition}",
    "overview": "/",
    "outbox": "/outbox",
    "problems": "/problems",
    "nodes": "/nodes",
    "node": "/nodes/node-1?last=week",
    "changes": "/changes",
    "change": "/changes/1",
    "audit": "/audit?actor=bench&act=act+7",
}
FILL: Final = """
UPDATE mqlayer.node SET name = 'node-1' WHERE node_id = %(node)s;
INSERT INTO mqlayer.topic (name, strategy, body_limit, backlog_limit)
SELECT 'big-' || n, 'strict', 65536, 0 FROM generate_series(0, %(topics)s - 1) AS n;
INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to, state)
SELECT t.topic_id, %(node)s, lp, lp + 1, 'open'
FROM mqlayer.topic t, generate_series(0, 1023) AS lp WHERE t.name LIKE 'big-%%';
INSERT INTO mqlayer.route_change (topic_id, version, kind, state, actor, planned_at, sealed_at, opened_at, ended_at)
SELECT t.topic_id, n, 'move', 'done', 'bench', now() - interval '1 day', now() - interval '1 day',
       now() - interval '1 day', now() - interval '1 day'
FROM mqlayer.topic t, generate_series(2, %(moves)s + 1) AS n WHERE t.name = 'big-0' ORDER BY n;
UPDATE mqlayer.partition p SET ended_by_change = c.change_id, state = 'sealed'
FROM mqlayer.route_change c WHERE c.topic_id = p.topic_id AND p.lp_from = c.version - 2;
INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to, state, created_by_change)
SELECT topic_id, %(node)s, version - 2, version - 1, 'open', change_id FROM mqlayer.route_change;
INSERT INTO mqlayer.route (topic_id, version, lp_from, lp_to, partition_id)
SELECT p.topic_id, CASE t.name WHEN 'big-0' THEN %(moves)s + 1 ELSE 1 END, p.lp_from, p.lp_to, p.partition_id
FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id) WHERE p.state = 'open' AND t.name LIKE 'big-%%';
UPDATE mqlayer.topic t SET version = CASE name WHEN 'big-0' THEN %(moves)s + 1 ELSE 1 END WHERE name LIKE 'big-%%';
INSERT INTO mqlayer.consumer_group (topic_id, name, state, start, backoff_s)
SELECT topic_id, 'group-' || n, 'live', 'earliest', '{1}'
FROM mqlayer.topic, generate_series(0, %(groups)s - 1) AS n WHERE name LIKE 'big-%%';
INSERT INTO mqlayer.member (group_id, member_id, host, pid, lease_until, least, most)
SELECT group_id, 'member-' || n, 'host', n, now() + interval '1 day', v.in_force, v.in_force
FROM mqlayer.consumer_group, generate_series(0, 15) AS n, mqlayer.protocol AS v;
INSERT INTO mqlayer.assignment (group_id, partition_id, member_id, epoch, changed_at)
SELECT g.group_id, p.partition_id, 'member-' || p.lp_from %% 16, 1, now()
FROM mqlayer.consumer_group g JOIN mqlayer.partition p USING (topic_id);
INSERT INTO mqlayer.sample (kind, object_id, at, lag, oldest_s, parked, dead)
SELECT 'group', group_id, date_trunc('minute', now(), 'UTC') - make_interval(mins => n), n, n, 0, 0
FROM mqlayer.consumer_group, generate_series(0, %(minutes)s - 1) AS n;
INSERT INTO mqlayer.sample (kind, object_id, at, committed, relayed, stored)
SELECT 'topic', topic_id, date_trunc('minute', now(), 'UTC') - make_interval(mins => n), 1000000 - n, 1000000 - n,
       1000000 - n
FROM mqlayer.topic, generate_series(0, %(minutes)s - 1) AS n;
INSERT INTO mqlayer.audit (at, actor, act, object, facts)
SELECT now() - make_interval(secs => n), 'bench', 'act ' || n %% 50, 'big-' || n %% 10, '{"reason": "why"}'
FROM generate_series(1, %(minutes)s * %(minutes)s / 100) AS n;
"""


def fill_system(
    dsn: str, url: str, prefix: str, *, topics: int = TOPICS, groups: int = GROUPS, minutes: int = WEEK
) -> int:
    """Fill the tables and the first node with topics of a partition per LP; return a partition of the first one."""
    facts: dict[str, Any] = {"topics": topics, "groups": groups, "moves": MOVES, "minutes": minutes, "node": 1}
    with psycopg.connect(dsn, cursor_factory=psycopg.ClientCursor, autocommit=True) as connection:
        # The guard of versions allows one step at a time.
        connection.execute("ALTER TABLE mqlayer.topic DISABLE TRIGGER topic_version_consecutive")
        connection.execute(FILL.encode(), facts)
        connection.execute("ALTER TABLE mqlayer.topic ENABLE TRIGGER topic_version_consecutive")
        rows = connection.execute(
            "SELECT p.partition_id, p.lp_from, t.name = 'big-0' AND p.lp_from = 500 "
            "FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id) WHERE t.name LIKE 'big-%%'", ()
        ).fetchall()  # fmt: skip
        connection.execute("ANALYZE")
    _fill_node(url, prefix, rows)
    return next(int(partition) for partition, _, chosen in rows if chosen)


def _fill_node(url: str, prefix: str, rows: Sequence[tuple[Any, ...]]) -> None:
    with redis.Redis.from_url(url, protocol=2) as client:
        pipeline = client.pipeline(transaction=False)
        for partition, lp, _ in rows:
            stem = f"{prefix}:{{{partition}}}:"
            meta = {"state": "open", "topic": "big", "lp_from": lp, "lp_to": lp + 1, "next": 101, "first": 100}
            pipeline.hset(f"{stem}meta", mapping=meta)
            record = {"m": f"1:{lp}:1:1700000000000", "k": f"key-{lp}", "b": "body"}
            pipeline.xadd(f"{stem}log", record, id="100-0")
        pipeline.execute()


@bench("console_pages")
def console_pages(stage: Stage) -> Iterator[Line]:
    """The 95th percentile in ms of 20 loads of each page; the target is in ms."""
    system = stage.system()
    partition = fill_system(system.dsn, system.redis_url, system.settings.key_prefix)
    with browser_here(system.settings) as browser:
        for name, path in PAGES.items():
            p95_ms, size = measure(browser, path.format(partition=partition))
            note(f"  {name}: {size:,} bytes")
            yield Line(
                name=f"console_pages[{name}]", value=round(p95_ms, 1), unit="ms p95", baseline=None, ratio=None,
                target=LIMIT_MS,
            )  # fmt: skip


def browser_here(settings: Settings) -> Any:
    """Return a browser on the console's own machine, which needs no login."""
    from starlette.testclient import TestClient

    from mqlayer.console import console_app

    return TestClient(console_app(settings), base_url="http://127.0.0.1", client=("127.0.0.1", 1))


def measure(browser: Any, path: str, times: int = TIMES) -> tuple[float, int]:
    """Return the 95th percentile in ms of loads of a page after the first one, and its bytes."""
    taken: list[float] = []
    size = len(browser.get(path).content)
    for _ in range(times):
        began = time.perf_counter()
        answer = browser.get(path)
        taken.append(1000 * (time.perf_counter() - began))
        assert answer.status_code == 200, answer.text
    return sorted(taken)[max(0, round(0.95 * times) - 1)], size
