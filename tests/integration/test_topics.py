"""Nodes, topics and routes: made once, whole, and by the database's own rules."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest
import redis

from mqlayer.domain.routing import check_tiling
from mqlayer.errors import ConfigurationRefused, Conflict, InvalidInput, InvalidName, NotFound, StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.redis import node_connection
from mqlayer.redis.keys import partition_keys
from mqlayer.runtime.route_cache import RouteCache, load_route
from mqlayer.stack import RedisServer
from mqlayer.topics import attach_topics, create_topic, list_nodes, list_topics, rearm_node, register_node
from tests.fixtures.failpoints import armed, broken_off_at
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_ranges import range_of
from tests.proof.runtimes import runtime_of

PLACES = ["topic.after_allocate", "topic.after_make", "topic.after_activate"]


@pytest.fixture
def node(database: Database, redis_url: str) -> str:
    register_node(runtime_of(database), name="n1", url=redis_url)
    return redis_url


def test_a_topic_tiles_all_lps_over_all_nodes(
    database: Database, node: str, key_prefix: str, start_redis: StartRedis
) -> None:
    """Case 2: version 1 is there with its partitions, open in Redis."""
    second = start_redis().url
    register_node(runtime_of(database), name="n2", url=second)
    route = create_topic(runtime_of(database, key_prefix), "orders", partitions=5)
    assert route.version == 1
    check_tiling((r.lp_from, r.lp_to) for r in route.ranges)
    assert [r.node for r in route.ranges] == [1, 2, 1, 2, 1]
    clients = {number: redis.Redis.from_url(url, decode_responses=True) for number, url in ((1, node), (2, second))}
    for part in route.ranges:
        meta = clients[part.node].hgetall(partition_keys(key_prefix, part.partition).meta)
        assert meta["state"] == "open"
        assert (meta["lp_from"], meta["lp_to"]) == (str(part.lp_from), str(part.lp_to))


def test_two_creators_at_once_make_one_version(database: Database, node: str, key_prefix: str) -> None:
    """Case 4."""
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(lambda _: create_topic(runtime_of(database, key_prefix), "orders", partitions=3), range(4))
        )
    assert len(set(made)) == 1
    assert [(t.name, t.version, t.partitions) for t in list_topics(database)] == [("orders", 1, 3)]


def test_a_topic_with_other_limits_is_a_conflict_and_stays(database: Database, node: str, key_prefix: str) -> None:
    route = create_topic(runtime_of(database, key_prefix), "orders", partitions=2)
    with pytest.raises(Conflict, match="body_limit"):
        create_topic(runtime_of(database, key_prefix), "orders", partitions=2, body_limit=10)
    assert load_route(database, "orders") == route


def test_a_limit_that_changed_is_in_force_once_topics_are_attached_again(
    database: Database, node: str, key_prefix: str
) -> None:
    create_topic(runtime_of(database, key_prefix, application=database), "orders")
    publish = "SELECT mqlayer_app.publish_v1('orders', 'k', repeat('x', 11)::bytea)"
    with database.connection() as connection:
        assert connection.execute(publish).fetchone() == (1,)
        connection.execute("UPDATE mqlayer.topic SET body_limit = 10 WHERE name = 'orders'")
    assert attach_topics(runtime_of(database, application=database)) == 1
    with database.connection() as connection, pytest.raises(psycopg.Error, match="takes 10"):
        connection.execute(publish)


def test_creating_a_topic_again_waits_for_no_publisher(database: Database, node: str, key_prefix: str) -> None:
    """It would hold the counters that it has come past, and with them all who publish, behind one slow transaction."""
    create_topic(runtime_of(database, key_prefix, application=database), "orders")
    with kept_session(database.dsn) as slow:
        slow.execute("SELECT mqlayer_app.publish_v1('orders', 'k', 'x')")
        with ThreadPoolExecutor() as pool:
            again = pool.submit(create_topic, runtime_of(database, key_prefix, application=database), "orders")
            try:
                assert again.result(20).version == 1
            finally:
                slow.rollback()


@pytest.mark.parametrize("name", ["", "Orders", "1st", "a b", "a{b}", "x" * 64])
def test_bad_names_are_refused(database: Database, node: str, key_prefix: str, name: str) -> None:
    with pytest.raises(InvalidName):
        create_topic(runtime_of(database, key_prefix), name)
    with pytest.raises(InvalidName):
        register_node(runtime_of(database), name=name, url=node)


def test_bad_limits_and_a_topic_without_nodes_are_refused(database: Database, key_prefix: str) -> None:
    for wrong in ({"partitions": 0}, {"body_limit": 0}, {"backlog_limit": -1}):
        with pytest.raises(InvalidInput):
            create_topic(runtime_of(database, key_prefix), "orders", **wrong)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="node register"):
        create_topic(runtime_of(database, key_prefix), "orders")
    assert list_topics(database) == []


@pytest.mark.parametrize("place", some_of(PLACES, 4))
def test_a_creation_that_was_killed_is_finished_by_the_next(
    database: Database, node: str, key_prefix: str, place: str
) -> None:
    """Case 17: until it is finished nobody sees a route to a stream that is not there."""
    program = (
        "import sys; from mqlayer.postgres.database import Database; from mqlayer.topics import create_topic; "
        "from mqlayer.runtime import Runtime; from mqlayer.settings import Settings; "
        "create_topic(Runtime(Database(sys.argv[1]), Settings(key_prefix=sys.argv[2])), 'orders', partitions=3)"
    )
    killed = ask_python("-c", program, database.dsn, key_prefix, env=os.environ | armed(f"{place}=kill"))
    assert killed.returncode == -9
    if place != "topic.after_activate":
        with pytest.raises(NotFound):
            load_route(database, "orders")
    route = create_topic(runtime_of(database, key_prefix), "orders", partitions=3)
    assert (route.version, len(route.ranges)) == (1, 3)
    assert create_topic(runtime_of(database, key_prefix), "orders", partitions=3) == route


def test_partitions_of_another_system_on_the_node_are_not_taken(database: Database, node: str, key_prefix: str) -> None:
    redis.Redis.from_url(node).hset(
        partition_keys(key_prefix, 1).meta.decode(), mapping={"state": "open", "lp_from": 5, "lp_to": 6, "change": ""}
    )
    with pytest.raises(Conflict, match="KEY_PREFIX"):
        create_topic(runtime_of(database, key_prefix), "orders", partitions=2)
    with pytest.raises(NotFound):
        load_route(database, "orders")


ROUTES = "INSERT INTO mqlayer.route (topic_id, version, lp_from, lp_to, partition_id) VALUES (1, 2, %s, %s, %s)"
PARTITIONS = (
    "INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to) VALUES (1, 1, %s, %s) RETURNING partition_id"
)


def put_version(dsn: str, version: int | None) -> None:
    """Commit a version number alone."""
    with closing(psycopg.connect(dsn)) as connection:
        connection.execute("UPDATE mqlayer.topic SET version = %s", (version,))
        connection.commit()


def put_version_2(dsn: str, ranges: list[tuple[int, int]]) -> None:
    """Commit a second route version of the topic, whatever it is."""
    with closing(psycopg.connect(dsn)) as connection:
        for lp_from, lp_to in ranges:
            row = connection.execute(PARTITIONS, (lp_from, lp_to)).fetchone()
            connection.execute(ROUTES, (lp_from, lp_to, row[0] if row else 0))
        connection.execute("UPDATE mqlayer.topic SET version = 2")
        connection.commit()


@pytest.mark.parametrize(
    "ranges",
    [[(0, 1000)], [(1, 1024)], [(0, 500), (501, 1024)], [(0, 600), (500, 1024)], [(0, 512), (0, 512), (512, 1024)],
     [(512, 1024)], [(0, 0), (0, 1024)]],
)  # fmt: skip
def test_the_database_refuses_a_version_that_does_not_tile(
    database: Database, node: str, key_prefix: str, ranges: list[tuple[int, int]]
) -> None:
    """Case 2: a gap or an overlap changes nothing."""
    before = create_topic(runtime_of(database, key_prefix), "orders", partitions=2)
    with pytest.raises(psycopg.errors.IntegrityError):
        put_version_2(database.dsn, ranges)
    assert load_route(database, "orders") == before


def test_the_database_refuses_a_version_without_routes_and_a_jump(
    database: Database, node: str, key_prefix: str
) -> None:
    create_topic(runtime_of(database, key_prefix), "orders", partitions=2)
    for version in (2, 3, None):
        with pytest.raises(psycopg.errors.IntegrityError):
            put_version(database.dsn, version)


def test_a_version_that_tiles_is_taken_and_notified(database: Database, node: str, key_prefix: str) -> None:
    """Caches hear of a new version; an old one that comes late does not replace it."""
    create_topic(runtime_of(database, key_prefix), "orders", partitions=2)
    routes = RouteCache(database)
    assert routes.route("orders").version == 1
    routes.listen()
    try:
        # Not in a transaction: it would see the same statistics again and again.
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            wait_until(
                lambda: connection.execute(
                    "SELECT 1 FROM pg_stat_activity WHERE application_name = 'mqlayer routes' "
                    "AND datname = current_database() AND query LIKE 'LISTEN%'"
                ).fetchone(),
                what="the cache listens",
            )
        put_version_2(database.dsn, [(0, 100), (100, 1024)])
        wait_until(lambda: routes.route("orders").version == 2, what="the new version is used")
    finally:
        routes.close()
    assert range_of(routes.route("orders"), 99).lp_to == 100


def test_a_known_route_serves_while_postgres_is_away(database: Database, node: str, key_prefix: str) -> None:
    create_topic(runtime_of(database, key_prefix), "orders", partitions=2)
    away = Database("postgresql://nobody:secret@127.0.0.1:1/none", timeout_s=0.2)
    routes = RouteCache(database, max_age_s=0)
    known = routes.route("orders")
    routes._database = away
    assert routes.route("orders") == known
    with pytest.raises(StoreUnavailable) as refused:
        routes.route("payments")
    assert "secret" not in str(refused.value)
    away.close()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("maxmemory-policy", "allkeys-lru"), ("appendonly", "no"), ("no-appendfsync-on-rewrite", "yes")],
)
def test_settings_that_void_the_promise_are_refused(
    database: Database, start_redis: StartRedis, setting: str, value: str
) -> None:
    server = start_redis(options={setting: value})
    with pytest.raises(ConfigurationRefused, match=setting):
        register_node(runtime_of(database), name="n1", url=server.url)
    assert list_nodes(database) == []
    assert register_node(runtime_of(database, unsafe=True), name="n1", url=server.url).name == "n1"


def test_a_node_that_is_too_old_is_refused_by_its_name(
    database: Database, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scripts/matrix --only too-old` has a real one."""
    monkeypatch.setattr(node_connection, "OLDEST", (99, 0, 0))
    with pytest.raises(ConfigurationRefused, match=r"this is Redis \d+\.\d+\.\d+: mqlayer needs Redis 6\.2 or later"):
        register_node(runtime_of(database, unsafe=True), name="n1", url=redis_url)
    assert list_nodes(database) == []


def test_a_node_is_registered_once_under_a_name(database: Database, node: str, start_redis: StartRedis) -> None:
    assert register_node(runtime_of(database), name="n1", url=node) == list_nodes(database)[0]
    with pytest.raises(Conflict):
        register_node(runtime_of(database), name="n1", url=start_redis().url)


@pytest.mark.parametrize("url", ["", "nonsense", "http://127.0.0.1", "redis://user:secret@127.0.0.1:1/0"])
def test_an_address_that_does_not_answer_is_an_error_without_its_password(database: Database, url: str) -> None:
    with pytest.raises((InvalidInput, StoreUnavailable)) as refused:
        register_node(runtime_of(database), name="n1", url=url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("place", ["rearm.before_fence", "rearm.before_arm"])
def test_arming_that_breaks_half_way_is_done_by_the_next(
    database: Database, key_prefix: str, start_redis: StartRedis, place: str
) -> None:
    """A node serves only while it is armed (invariant 17)."""
    server: RedisServer = start_redis()
    register_node(runtime_of(database), name="n1", url=server.url)
    create_topic(runtime_of(database, key_prefix), "orders", partitions=2)
    server.restart()
    with kept_session(database.dsn) as connection:
        connection.execute(
            "INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) VALUES (1, 'g', 'earliest', '{1}')"
        )
        connection.execute("INSERT INTO mqlayer.assignment (group_id, partition_id, epoch) VALUES (1, 1, 1)")
    with broken_off_at(place):
        rearm_node(runtime_of(database, key_prefix), "n1")
    before = list_nodes(database)[0].armed_run_id
    armed, epochs = rearm_node(runtime_of(database, key_prefix), "n1")
    assert armed.armed_run_id != before
    assert epochs == 1
    assert rearm_node(runtime_of(database, key_prefix), "n1") == (armed, 0)
    with kept_session(database.dsn) as connection:
        acts = [row[0] for row in connection.execute("SELECT act FROM mqlayer.audit ORDER BY audit_id").fetchall()]
    assert acts == ["node register", "topic create", "node rearm"]
