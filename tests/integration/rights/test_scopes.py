"""Who may publish to some topics, or consume for some groups, reaches nothing of the others."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import psycopg
import pytest
from psycopg import errors as pg_errors
from psycopg.conninfo import conninfo_to_dict

from mqlayer.errors import Conflict, PermissionDenied
from mqlayer.groups.group import GroupSettings, ensure_group
from mqlayer.outbox import publish
from mqlayer.postgres.database import Database, translate
from mqlayer.postgres.queries import query
from mqlayer.postgres.rights import Right, grants, revoke
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.topics import create_topic, register_node
from tests.fixtures.roles import Roles
from tests.fixtures.servers import DatabaseMaker
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

# All look at one database, which a worker makes once.
pytestmark = pytest.mark.xdist_group("scopes")


class Scene(NamedTuple):
    """A database with two topics, and two groups of one of them."""

    name: str
    groups: dict[str, int]
    """The ids of orders/ledger and orders/mail, each with something of every kind."""


@pytest.fixture(scope="module")
def scene(database_maker: DatabaseMaker, migrated_template: str, redis_url: str) -> Iterator[Scene]:
    """What each test begins with, to be copied."""
    prefix = f"scopes-{uuid.uuid4().hex[:8]}"
    with database_maker.copy_of(migrated_template) as dsn:
        with Database(dsn) as database, closing(RouteCache(database)) as routes:
            register_node(runtime_of(database), name="node-1", url=redis_url)
            for topic in ("orders", "invoices"):
                create_topic(runtime_of(database, prefix, application=database), topic, partitions=1)
            here, settings = runtime_of(database, prefix), GroupSettings(start="earliest")
            made = {
                name: ensure_group(here, routes, topic="orders", name=name, settings=settings).group_id
                for name in ("ledger", "mail")
            }
            with database.connection() as connection:
                for group in made.values():
                    connection.execute(FILL.replace("$group", str(group)).encode())
        yield Scene(str(conninfo_to_dict(dsn)["dbname"]), made)


@pytest.fixture
def groups(scene: Scene) -> dict[str, int]:
    """The ids of the groups."""
    return scene.groups


@pytest.fixture(scope="module")
def common_dsn(scene: Scene, database_maker: DatabaseMaker) -> Iterator[str]:
    """The database of all tests that leave nothing in it that another one meets."""
    with database_maker.copy_of(scene.name) as dsn:
        yield dsn


@pytest.fixture
def own_database() -> None:
    """A test that commits what others would meet has a database of its own."""


@pytest.fixture
def database_dsn(request: pytest.FixtureRequest, scene: Scene, database_maker: DatabaseMaker) -> Iterator[str]:
    """The database of the test."""
    if "own_database" not in request.fixturenames:
        yield request.getfixturevalue("common_dsn")
        return
    with database_maker.copy_of(scene.name) as dsn:
        yield dsn


@pytest.fixture(scope="module")
def common_ledger(common_dsn: str, database_maker: DatabaseMaker) -> Iterator[psycopg.Connection]:
    """A connection of a role that may consume orders/ledger, and nothing else."""
    with (
        closing(Roles(common_dsn, database_maker.roles_of(common_dsn))) as roles,
        closing(as_ledger(roles)) as connection,
    ):
        yield connection


def as_ledger(roles: Roles) -> psycopg.Connection:
    """Connect as such a role."""
    return psycopg.connect(roles.login(Right.CONSUME, scopes=["orders/ledger"]), autocommit=True)


@pytest.fixture
def ledger(common_ledger: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """Its connection, in a transaction that is rolled back."""
    with common_ledger.transaction(force_rollback=True):
        yield common_ledger


@pytest.fixture
def ledger_alone(own_database: None, roles: Roles) -> Iterator[psycopg.Connection]:
    """A connection of such a role to the test's own database: what it does is committed."""
    with closing(as_ledger(roles)) as connection:
        yield connection


FILL = """
    INSERT INTO mqlayer.member (group_id, member_id, host, pid, lease_until, most)
        VALUES ($group, 'm', 'h', 1, now() + '1 hour', 99);
    INSERT INTO mqlayer.assignment (group_id, partition_id, member_id, target, epoch)
        SELECT $group, partition_id, 'm', 'm', 7 FROM mqlayer.partition ORDER BY 2 LIMIT 1;
    INSERT INTO mqlayer.group_start SELECT $group, partition_id, 1 FROM mqlayer.partition ORDER BY 2 LIMIT 1
        ON CONFLICT DO NOTHING;
    INSERT INTO mqlayer.drained SELECT $group, partition_id FROM mqlayer.partition ORDER BY 2 LIMIT 1;
    INSERT INTO mqlayer.parked_key (group_id, lp, name, cause) VALUES ($group, 1, 'k', 'retry');
    INSERT INTO mqlayer.parked_message (group_id, lp, name, source, seq, position, partition_id, log_offset, key, m,
    body)
        SELECT $group, 1, 'k', 1, 1, 1, partition_id, 1, 'k', '1:1:1:1', 'secret' FROM mqlayer.partition LIMIT 1;
    INSERT INTO mqlayer.dead_message
        (group_id, lp, source, seq, partition_id, log_offset, key, m, body, cause, reason, attempts, actor)
        SELECT $group, 1, 1, 2, partition_id, 2, 'k', '1:1:2:1', 'secret', 'rejected', 'r', 1, 'm'
        FROM mqlayer.partition LIMIT 1;
    INSERT INTO mqlayer.failed_attempt (group_id, lp, source, seq, attempt, member_id, error)
        VALUES ($group, 1, 1, 1, 1, 'm', 'e');
    INSERT INTO mqlayer.failure_count (group_id, partition_id, event, count)
        SELECT $group, partition_id, 'failed', 1 FROM mqlayer.partition LIMIT 1;
    INSERT INTO mqlayer.retention_loss (group_id, partition_id, event, lost, seen)
        SELECT $group, partition_id, 'dropped', 1, 1 FROM mqlayer.partition LIMIT 1;
    INSERT INTO mqlayer.partition_pause (group_id, partition_id, paused_by)
        SELECT $group, partition_id, 'o' FROM mqlayer.partition LIMIT 1;
    INSERT INTO mqlayer.parking_change (group_id, number, lp, name) VALUES ($group, 1, 1, 'k');
"""
OF_GROUPS = (
    "member", "assignment", "group_start", "drained", "parked_key", "parked_message", "parked_total", "dead_message",
    "failure_count", "retention_loss", "partition_pause", "parking_change",
)  # fmt: skip


@pytest.mark.parametrize("table", OF_GROUPS)
def test_a_consumer_of_one_group_sees_no_row_of_another(
    groups: dict[str, int], ledger: psycopg.Connection, table: str
) -> None:
    rows = ledger.execute(f"SELECT DISTINCT group_id FROM mqlayer.{table}".encode()).fetchall()
    assert rows == [(groups["ledger"],)], table


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE mqlayer.assignment SET epoch = epoch + 1 WHERE group_id = $mail",
        "UPDATE mqlayer.member SET lease_until = '-infinity' WHERE group_id = $mail",
        "UPDATE mqlayer.parked_key SET due_at = now() WHERE group_id = $mail",
        "UPDATE mqlayer.consumer_group SET allocation = allocation + 1 WHERE group_id = $mail",
    ],
)
def test_a_consumer_of_one_group_changes_no_row_of_another(
    groups: dict[str, int], ledger: psycopg.Connection, statement: str
) -> None:
    assert ledger.execute(statement.replace("$mail", str(groups["mail"])).encode()).rowcount == 0


@pytest.mark.parametrize(
    "statement",
    [
        """INSERT INTO mqlayer.member (group_id, member_id, session, host, pid, lease_until, most)
           VALUES ($mail, 'x', 1, 'h', 1, now(), 99)""",
        "INSERT INTO mqlayer.assignment (group_id, partition_id, epoch) VALUES ($mail, 1, 9)",
        "INSERT INTO mqlayer.drained (group_id, partition_id) VALUES ($mail, 1)",
        "INSERT INTO mqlayer.parked_key (group_id, lp, name, cause) VALUES ($mail, 5, 'x', 'retry')",
        """INSERT INTO mqlayer.failed_attempt (group_id, lp, source, seq, attempt, member_id, error)
           VALUES ($mail, 1, 1, 9, 1, 'x', 'x')""",
        """INSERT INTO mqlayer_archive.outcome_queue
           (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor)
           VALUES (1, $mail, 1, 1, 'handled', 1, 'x')""",
        "INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) VALUES (1, 'stolen', 'latest', '{1}')",
        "UPDATE mqlayer.node SET created_at = now()",
        "UPDATE mqlayer.partition SET created_at = now()",
        "SELECT * FROM mqlayer_app.fence_v1($mail, 1::smallint, 1, 'k', 1, 1)",
        "SELECT * FROM mqlayer_app.fence_many_v1($mail, '{1}', '{1}', '{k}', '{1}', '{1}', '{0}')",
        "SELECT * FROM mqlayer_app.fence_many_v2($mail, '{1}', '{1}', '{k}', '{1}', '{1}', '{0}')",
        "SELECT mqlayer_app.fence_raise_v1($mail, 0::smallint, 1::smallint, 1)",
        "SELECT mqlayer_app.inbox_put_v1($mail, 1, 1::smallint, 1)",
        "SELECT mqlayer.members_forget_v1($mail)",
        "SELECT mqlayer.beginnings_forget_v1($mail)",
        "SELECT mqlayer.parked_messages_end_v1($mail, '{1}', '{1}', '{1}', '{true}', 1, 'x')",
        "SELECT mqlayer.parked_messages_end_v2($mail, '{1}', '{k}', '{1}', '{1}', '{true}', 1, 'x')",
        "SELECT mqlayer.parked_key_end_v1($mail, 1::smallint, 'k')",
        "SELECT mqlayer.parked_keys_forget_v1($mail, '{1}', '{k}')",
        "SELECT mqlayer.retired_messages_drop_v1($mail, 10)",
        "SELECT mqlayer.retired_keys_drop_v1($mail, 10)",
        "SELECT mqlayer.members_forget_v1(NULL)",
        "DELETE FROM mqlayer.member",
        "DELETE FROM mqlayer.parked_message",
    ],
)
def test_a_consumer_of_one_group_does_nothing_in_the_name_of_another(
    groups: dict[str, int], ledger: psycopg.Connection, statement: str
) -> None:
    with pytest.raises(pg_errors.InsufficientPrivilege):
        ledger.execute(statement.replace("$mail", str(groups["mail"])).encode())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE mqlayer.assignment SET epoch = 9223372036854775807",
        """INSERT INTO mqlayer.assignment (group_id, partition_id, epoch)
           SELECT $ledger, min(partition_id), 9007199254740991 FROM mqlayer.partition
           ON CONFLICT (group_id, partition_id) DO UPDATE SET epoch = excluded.epoch""",
        "UPDATE mqlayer.parked_key SET due_at = 'infinity'",
        "UPDATE mqlayer.member SET host = repeat('x', 5000)",
        "UPDATE mqlayer.consumer_group SET paused_by = repeat('x', 5000)",
        "UPDATE mqlayer.consumer_group SET backoff_s = array_fill(1.0::float8, ARRAY[5000])",
        """INSERT INTO mqlayer.failure_count (group_id, partition_id, event, count)
           VALUES ($ledger, 1, repeat('x', 64), 1)""",
        "UPDATE mqlayer.failure_count SET count = 9223372036854775807",
        """INSERT INTO mqlayer_archive.outcome_queue
           (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor, delivered_at)
           VALUES (1, $ledger, 1, 1, 'skipped', 1, 'x', 'infinity')""",
        "UPDATE mqlayer.parked_key SET due_at = '294000-01-01'",
        "UPDATE mqlayer.consumer_group SET version = 2147483647 WHERE group_id = $ledger",
        "UPDATE mqlayer.consumer_group SET absent_since = 'infinity' WHERE group_id = $ledger",
        "UPDATE mqlayer.dead_message SET died_at = '-infinity'",
        "UPDATE mqlayer.member SET lease_until = 'infinity'",
        "UPDATE mqlayer.member SET lease_until = '294000-01-01'",
        """INSERT INTO mqlayer_archive.outcome_queue
           (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor)
           VALUES (1, $ledger, 1, 1, 'nonsense', 1, 'x')""",
        """INSERT INTO mqlayer_archive.outcome_queue
           (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor)
           VALUES (1, $ledger, 1, -9223372036854775808, 'skipped', 1, 'x')""",
    ],
)
def test_a_consumer_leaves_no_row_that_work_for_all_groups_fails_at(
    groups: dict[str, int], ledger: psycopg.Connection, statement: str
) -> None:
    """Arming a node raises the epochs of all groups at once; the archiver moves outcomes of all groups of a topic;
    checks and lists read times and texts of all groups.
    """
    with pytest.raises(pg_errors.CheckViolation):
        ledger.execute(statement.replace("$ledger", str(groups["ledger"])).encode())


def test_a_consumer_says_nothing_of_another_topic(groups: dict[str, int], ledger: psycopg.Connection) -> None:
    put = """INSERT INTO mqlayer_archive.outcome_queue
             (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor)
             SELECT topic_id, %s, 1, 1, 'skipped', 1, 'x' FROM mqlayer.topic WHERE name = %s"""
    ledger.execute(put, [groups["ledger"], "orders"])
    with pytest.raises(pg_errors.InsufficientPrivilege):
        ledger.execute(put, [groups["ledger"], "invoices"])


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO mqlayer.assignment (group_id, partition_id, epoch) VALUES ($group, $partition, 0)",
        "INSERT INTO mqlayer.group_start (group_id, partition_id, start_offset) VALUES ($group, $partition, 1)",
        "INSERT INTO mqlayer.drained (group_id, partition_id) VALUES ($group, $partition)",
        """INSERT INTO mqlayer.dead_message
           (group_id, lp, source, seq, partition_id, log_offset, key, m, cause, reason, attempts, actor)
           VALUES ($group, 1, 1, 99, $partition, 9, 'k', 'm', 'skipped', 'r', 1, 'a')""",
        "UPDATE mqlayer.dead_message SET partition_id = $partition",
        """INSERT INTO mqlayer_archive.outcome_queue
           (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor)
           SELECT topic_id, group_id, $partition, 1, 'skipped', 1, 'x'
           FROM mqlayer.consumer_group WHERE group_id = $group""",
    ],
)
def test_a_consumer_names_partitions_of_its_own_topic(
    groups: dict[str, int], ledger: psycopg.Connection, statement: str
) -> None:
    partitions = """SELECT p.partition_id FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id)
                    WHERE t.name = %s"""
    foreign = ledger.execute(partitions, ["invoices"]).fetchall()[0][0]
    own = ledger.execute(partitions, ["orders"]).fetchall()[0][0]
    statement = statement.replace("$group", str(groups["ledger"]))
    with pytest.raises(pg_errors.InsufficientPrivilege, match="row-level security"), ledger.transaction():
        ledger.execute(statement.replace("$partition", str(foreign)).encode())
    again = "ON CONFLICT DO NOTHING" if statement.startswith("INSERT") else ""
    ledger.execute(f"{statement.replace('$partition', str(own))} {again}".encode())


PUT_GROUP = """INSERT INTO mqlayer.consumer_group (topic_id, name, mode, instance_expiry_s, start, backoff_s)
    SELECT topic_id, %s, %s, %s, 'earliest', '{1}' FROM mqlayer.topic WHERE name = %s RETURNING group_id"""
PUT_INSTANCE = """INSERT INTO mqlayer.consumer_group (topic_id, name, broadcast_of, instance, start, backoff_s)
    SELECT topic_id, %s, %s, %s, 'earliest', '{1}' FROM mqlayer.topic WHERE name = %s"""


def test_an_instance_is_of_a_group_that_broadcasts_in_its_own_topic_and_has_its_name(
    groups: dict[str, int], roles: Roles, database_dsn: str
) -> None:
    with closing(psycopg.connect(database_dsn, autocommit=True)) as owner:
        ((other,),) = owner.execute(PUT_GROUP, ["cast", "broadcast", 60, "invoices"]).fetchall()
        ((own,),) = owner.execute(PUT_GROUP, ["cast", "broadcast", 60, "orders"]).fetchall()
        ((plain,),) = owner.execute(PUT_GROUP, ["plain", "exclusive", None, "orders"]).fetchall()
    scopes = ["orders/cast", "orders/plain"]
    with closing(psycopg.connect(roles.login(Right.CONSUME, scopes=scopes), autocommit=True)) as consumer:
        consumer.execute(PUT_INSTANCE, ["cast@a", own, "a", "orders"])
        for wrong in (
            ["cast@b", other, "b", "orders"],
            ["cast@b", own, "c", "orders"],
            ["other@b", own, "b", "orders"],
            ["plain@b", plain, "b", "orders"],
        ):
            with pytest.raises(pg_errors.CheckViolation, match="is no instance of group"):
                consumer.execute(PUT_INSTANCE, wrong)


def test_a_consumer_gives_its_partitions_epochs_that_were_given_out(
    groups: dict[str, int], ledger: psycopg.Connection
) -> None:
    raised = """INSERT INTO mqlayer.assignment (group_id, partition_id, epoch)
                SELECT %s, min(partition_id), nextval('mqlayer.epoch') FROM mqlayer.partition
                ON CONFLICT (group_id, partition_id) DO UPDATE SET epoch = excluded.epoch"""
    ledger.execute("SELECT nextval('mqlayer.epoch') FROM generate_series(1, 10)")
    assert ledger.execute(raised, [groups["ledger"]]).rowcount == 1


def test_a_replaced_server_is_seen_to_whatever_number_a_consumer_gave_its_group(
    ledger_alone: psycopg.Connection, roles: Roles
) -> None:
    with pytest.raises(pg_errors.CheckViolation):
        ledger_alone.execute("UPDATE mqlayer.consumer_group SET allocation = 9223372036854775807")
    ledger_alone.execute("UPDATE mqlayer.consumer_group SET allocation = 4611686018427387904")
    with closing(psycopg.connect(roles.login(Right.RELAY), autocommit=True)) as relay:
        relay.execute("SELECT mqlayer.server_replaced_v1('{}')")


USED = "SELECT last_value FROM mqlayer.topic_topic_id_seq"
NEAR_THE_END = """SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, max_value - 1)
    FROM pg_sequences WHERE schemaname IN ('mqlayer', 'mqlayer_archive') AND max_value <= 2147483647"""


@pytest.mark.parametrize("right", [Right.RELAY, Right.WORK])
def test_no_role_uses_the_numbers_up_by_leaps(
    own_database: None, roles: Roles, database_dsn: str, right: Right
) -> None:
    """No rollback takes a leap back, nor when it was."""
    with (
        closing(psycopg.connect(database_dsn, autocommit=True)) as owner,
        closing(psycopg.connect(roles.login(right), autocommit=True)) as role,
    ):
        with role.transaction(force_rollback=True):
            role.execute("SELECT mqlayer.server_replaced_v1('{}')")
        used = owner.execute(USED).fetchall()
        with pytest.raises(pg_errors.LockNotAvailable, match="leapt less than 5 seconds ago"):
            role.execute("SELECT mqlayer.server_replaced_v1('{}')")
        assert owner.execute(USED).fetchall() == used
        owner.execute("SELECT setval('mqlayer.repaired_at', extract(epoch FROM now())::bigint - 6)")
        role.execute("SELECT mqlayer.server_replaced_v1('{}')")
        assert owner.execute(USED).fetchall() > used
        with closing(psycopg.connect(roles.login(Right.OPERATE), autocommit=True)) as operator:
            operator.execute("SELECT mqlayer.server_replaced_v1('{}')")
        with pytest.raises(pg_errors.InsufficientPrivilege):
            role.execute("SELECT mqlayer.server_repair_v1('{}')")


def test_a_replaced_server_is_seen_to_with_sequences_at_their_end(
    own_database: None, roles: Roles, database_dsn: str
) -> None:
    with closing(psycopg.connect(database_dsn, autocommit=True)) as owner:
        owner.execute(NEAR_THE_END.encode())
        owner.execute("UPDATE mqlayer.server SET timeline = timeline + 5")
        owner.execute("INSERT INTO mqlayer.server (system_id, timeline) VALUES ('1', 7) ON CONFLICT DO NOTHING")
        with closing(psycopg.connect(roles.login(Right.VIEW), autocommit=True)) as viewer:
            assert viewer.execute("SELECT mqlayer.server_seen_v1()").fetchone() == (True,)
            ((count,),) = viewer.execute("SELECT count(*) FROM mqlayer.numbers_used_v1() WHERE used > 0.99").fetchall()
            assert count == 6, "nodes, topics, partitions, changes, snapshots and lakes"


@pytest.mark.parametrize(
    "told",
    [
        "[1]",
        '{"nonsense": 1}',
        '{"key": 1}',
        '{"dead_ids": [1]}',
        '{"tag": 1}',
        '{"since": "never"}',
        '{"until": ""}',
        '{"since": "2026-01-01T00:00:00+00:00", "until": null}',
        '{"since": "2026-02-31T00:00:00+00:00"}',
        '{"since": "2026-01-01T24:00:00+00:00"}',
    ],
)
def test_a_consumer_leaves_no_redrive_that_nobody_can_list(
    groups: dict[str, int], ledger: psycopg.Connection, told: str
) -> None:
    put = """INSERT INTO mqlayer.redrive (group_id, kind, filter, per_s, actor, upto_batch, position, newer)
             VALUES (%s, 'replay', %s, 0, 'x', 9, 1, 'between')"""
    done = [groups["ledger"], '{"since": "2026-01-31T23:59:59.000001+05:30", "tag": "a"}']
    ledger.execute(put, done)
    ledger.execute("UPDATE mqlayer.redrive SET state = 'cancelled', ended_at = now()")
    with pytest.raises((pg_errors.CheckViolation, pg_errors.DataError)):
        ledger.execute(put, [groups["ledger"], told])


def test_a_consumer_of_one_group_fences_and_notes_for_it(groups: dict[str, int], ledger: psycopg.Connection) -> None:
    group = groups["ledger"]
    row = ledger.execute("SELECT answer FROM mqlayer_app.fence_v1(%s, 1::smallint, 1, 'k', 1, 7)", [group]).fetchone()
    assert row == ("current",)
    assert ledger.execute("SELECT mqlayer_app.inbox_put_v1(%s, 1, 1::smallint, 1)", [group]).fetchone() == ("current",)


def test_what_is_missing_and_who_may_give_it_is_said(groups: dict[str, int], ledger: psycopg.Connection) -> None:
    with pytest.raises(pg_errors.InsufficientPrivilege) as refused:
        ledger.execute("SELECT * FROM mqlayer_app.fence_v1(%s, 1::smallint, 1, 'k', 1, 1)", [groups["mail"]])
    error = translate(refused.value, "postgres at db:5432/shop")
    assert isinstance(error, PermissionDenied)
    assert error.fix == f"mqlayer grant consume {ledger.info.user} --group orders/mail"
    assert "lacks the right to consume orders/mail" in str(error)


def test_names_of_versions_belong_to_the_role_that_used_them_first(
    roles: Roles, ledger_alone: psycopg.Connection
) -> None:
    take = "SELECT answer FROM mqlayer_app.version_take_v1(%s, 'e', 1, '', '{}', 'o', 1, 9, 9, 9, 9, 60)"
    assert ledger_alone.execute(take, ["ledger"]).fetchone() == ("due",)
    mail = roles.login(Right.CONSUME, scopes=["orders/mail"])
    with closing(psycopg.connect(mail, autocommit=True)) as other:
        for statement in (
            take,
            "SELECT mqlayer_app.version_set_v1(%s, 'e', 99)",
            "SELECT * FROM mqlayer_app.version_released_v1(%s, 60)",
        ):
            with pytest.raises(pg_errors.InsufficientPrivilege, match="another role uses"):
                other.execute(statement, ["ledger"])
        assert other.execute(take, ["mail"]).fetchone() == ("due",)
    assert ledger_alone.execute(take.replace("1, ''", "2, ''"), ["ledger"]).fetchone() == ("due",)


def test_a_name_of_versions_that_all_groups_use_is_not_taken_by_a_consumer_of_one(
    roles: Roles, ledger_alone: psycopg.Connection
) -> None:
    take = "SELECT * FROM mqlayer_app.version_take_v1('stock', 'e', {}, 'secret', '{{}}', 'o', 1, 9, 999, 9, 999, 60)"
    with closing(psycopg.connect(roles.login(Right.CONSUME), autocommit=True)) as everything:
        everything.execute(take.format(1).encode())
        everything.execute(take.format(3).encode())
        for statement in (
            take.format(2),
            "SELECT mqlayer_app.version_set_v1('stock', 'e', 99)",
            "SELECT * FROM mqlayer_app.version_released_v1('stock', 60)",
        ):
            with pytest.raises(pg_errors.InsufficientPrivilege, match="another role uses"):
                ledger_alone.execute(statement.encode())
        row = everything.execute(f"SELECT answer, versions FROM ({take.format(2)}) AS t".encode()).fetchone()
        assert row == ("due", [3])


WAYS = [
    "SELECT mqlayer_app.publish_v1('{}', 'k', 'x')",
    "SELECT mqlayer_app.publish_v2('{}', 'k', 'x')",
    "SELECT mqlayer_app.publish_once_v1('{}', 'k', 'x', 'id')",
    "SELECT mqlayer_app.publish_at_v1('{}', 'k', 'x', now() + interval '1 hour')",
    "SELECT mqlayer_app.publish_many_v1('{{orders,{}}}', '{{k,l}}', '{{x,y}}')",
    "SELECT mqlayer_app.publish_many_once_v1('{{orders,{}}}', '{{k,l}}', '{{x,y}}', '{{a,b}}')",
]


@pytest.mark.parametrize("way", WAYS)
def test_a_publisher_of_one_topic_publishes_to_no_other(groups: dict[str, int], roles: Roles, way: str) -> None:
    with closing(psycopg.connect(roles.login(Right.PUBLISH, scopes=["orders"]), autocommit=True)) as connection:
        connection.execute(way.format("orders").encode())
        with pytest.raises(pg_errors.InsufficientPrivilege, match="lacks the right to publish invoices"):
            connection.execute(way.format("invoices").encode())
        with pytest.raises(pg_errors.InsufficientPrivilege):
            connection.execute(way.format("not.there").encode())


def test_a_topic_that_is_refused_is_named_in_short(groups: dict[str, int], roles: Roles) -> None:
    with closing(psycopg.connect(roles.login(Right.PUBLISH, scopes=["orders"]), autocommit=True)) as connection:
        for way in WAYS:
            with pytest.raises(pg_errors.InsufficientPrivilege) as refused:
                connection.execute(way.format("x" * 100_000).encode())
            assert len(f"{refused.value.diag.message_primary}{refused.value.diag.message_hint}") < 500


def test_a_delayed_message_is_cancelled_by_who_may_publish_to_its_topic(own_database: None, roles: Roles) -> None:
    orders = roles.login(Right.PUBLISH, scopes=["orders"])
    invoices = roles.login(Right.PUBLISH, scopes=["invoices"])
    cancel = query("delayed_cancel")
    with (
        closing(psycopg.connect(orders, autocommit=True)) as owner,
        closing(psycopg.connect(invoices, autocommit=True)) as other,
    ):
        at = "SELECT mqlayer_app.publish_at_v1('orders', 'k', 'x', now() + interval '1 hour')"
        ((delayed,),) = owner.execute(at.encode()).fetchall()
        with pytest.raises(pg_errors.InsufficientPrivilege):
            other.execute(cancel, {"delayed_id": delayed})
        assert owner.execute(cancel, {"delayed_id": delayed}).fetchone() == (True,)


def test_a_delayed_message_that_comes_while_it_is_cancelled_is_kept_from_who_may_not(
    own_database: None, roles: Roles, database_dsn: str
) -> None:
    """The canceller waits for the table while the message is committed: its next statement sees the message."""
    orders = roles.login(Right.PUBLISH, scopes=["orders"])
    cancel = "SELECT mqlayer_app.cancel_delayed_v1(%s)"
    with (
        closing(psycopg.connect(orders, autocommit=True)) as other,
        closing(psycopg.connect(database_dsn)) as publisher,
        ThreadPoolExecutor(1) as pool,
    ):
        publisher.execute("LOCK TABLE mqlayer_app.delayed IN SHARE MODE")
        published = "SELECT mqlayer_app.publish_at_v1('invoices', 'k', 'x', now() + interval '1 hour')"
        delayed = publisher.execute(published.encode()).fetchone()
        cancelled = pool.submit(other.execute, cancel, delayed)
        with closing(psycopg.connect(database_dsn, autocommit=True)) as seen:
            waits = "SELECT count(*) FROM pg_locks WHERE pid = %s AND NOT granted"
            facts = [other.info.backend_pid]
            wait_until(lambda: seen.execute(waits, facts).fetchone() == (1,), what="the canceller waits")
        publisher.commit()
        with pytest.raises(pg_errors.InsufficientPrivilege, match="publish invoices"):
            cancelled.result(timeout=20)
        assert publisher.execute("SELECT count(*) FROM mqlayer_app.delayed").fetchone() == (1,)


def test_python_says_which_right_publishing_lacks(groups: dict[str, int], roles: Roles) -> None:
    dsn = roles.login(Right.PUBLISH, scopes=["orders"])
    with psycopg.connect(dsn) as connection, pytest.raises(PermissionDenied) as refused:
        publish(connection, "invoices", key="k", body=b"x")
    assert refused.value.fix == f"mqlayer grant publish {Roles.name_of(dsn)} --topic invoices"


def test_reading_everything_gives_no_right_to_publish_or_consume(
    groups: dict[str, int], roles: Roles, database_dsn: str
) -> None:
    """Roles of backups and monitoring are often members of pg_read_all_data."""
    with closing(psycopg.connect(database_dsn, autocommit=True)) as owner:
        for right, scope, statement in (
            (Right.PUBLISH, "orders", "SELECT mqlayer_app.publish_v1('invoices', 'k', 'x')"),
            (Right.CONSUME, "orders/ledger", f"SELECT mqlayer_app.inbox_put_v1({groups['mail']}, 1, 1::smallint, 1)"),
        ):
            dsn = roles.login(right, scopes=[scope])
            with closing(psycopg.connect(dsn, autocommit=True)) as reader:
                owner.execute(f"GRANT pg_read_all_data TO {reader.info.user}".encode())
                with pytest.raises(pg_errors.InsufficientPrivilege, match="lacks the right"):
                    reader.execute(statement.encode())


@pytest.mark.parametrize(("right", "scope"), [(Right.PUBLISH, "orders"), (Right.CONSUME, "orders/mail")])
def test_a_right_to_everything_is_not_taken_in_parts(
    groups: dict[str, int], roles: Roles, database_dsn: str, right: Right, scope: str
) -> None:
    with closing(psycopg.connect(roles.login(right))) as connection:
        role = connection.info.user
    with pytest.raises(Conflict, match="without limits"):
        revoke(database_dsn, "application", role, right, (scope,))
    revoke(database_dsn, "application", role, right)
    assert role not in {grant.role for grant in grants(database_dsn, "application")}


def test_members_of_a_role_have_its_rights(groups: dict[str, int], roles: Roles) -> None:
    team = Roles.name_of(roles.login(Right.PUBLISH, scopes=["orders"]))
    alone = roles.login()
    with closing(psycopg.connect(roles.dsn, autocommit=True)) as owner:
        owner.execute(f'GRANT "{team}" TO "{Roles.name_of(alone)}"'.encode())
    with closing(psycopg.connect(alone, autocommit=True)) as connection:
        connection.execute(WAYS[0].format("orders").encode())
        with pytest.raises(pg_errors.InsufficientPrivilege):
            connection.execute(WAYS[0].format("invoices").encode())


def test_a_role_that_was_set_counts_in_place_of_who_logged_in(groups: dict[str, int], roles: Roles) -> None:
    """A superuser, or the owner of the database, who became another role has that one's rights only."""
    with closing(psycopg.connect(roles.dsn, autocommit=True)) as connection:
        connection.execute(f'SET ROLE "{Roles.name_of(roles.login(Right.PUBLISH, scopes=["orders"]))}"'.encode())
        connection.execute(WAYS[0].format("orders").encode())
        with pytest.raises(pg_errors.InsufficientPrivilege):
            connection.execute(WAYS[0].format("invoices").encode())


def test_a_direct_producers_names_are_bounded(groups: dict[str, int], roles: Roles) -> None:
    with closing(psycopg.connect(roles.login(Right.PUBLISH), autocommit=True)) as producer:
        with pytest.raises(pg_errors.CheckViolation):
            producer.execute("INSERT INTO mqlayer.source (kind, name) VALUES ('direct', repeat('x', 2000))")
        producer.execute("INSERT INTO mqlayer.source (kind, name) VALUES ('direct', repeat('x', 1000))")


def test_a_direct_producer_ends_no_source_of_another(groups: dict[str, int], roles: Roles) -> None:
    one, two = roles.login(Right.PUBLISH), roles.login(Right.PUBLISH)
    with closing(psycopg.connect(one, autocommit=True)) as a, closing(psycopg.connect(two, autocommit=True)) as b:
        ((source,),) = a.execute(query("source_open_direct"), {"name": "a"}).fetchall()
        assert b.execute(query("source_close"), {"source_id": source}).rowcount == 0
        assert a.execute(query("source_close"), {"source_id": source}).rowcount == 1


def test_an_audit_row_says_which_role_wrote_it(groups: dict[str, int], roles: Roles) -> None:
    dsn = roles.login(Right.OPERATE)
    facts = {"actor": "somebody else", "act": "test", "object": "x", "facts": "{}"}
    with closing(psycopg.connect(dsn, autocommit=True)) as connection:
        connection.execute(query("audit_insert"), facts)
        assert connection.execute("SELECT role FROM mqlayer.audit WHERE act = 'test'").fetchone() == (
            Roles.name_of(dsn),
        )
        for statement in (
            "INSERT INTO mqlayer.audit (actor, act, object, role) VALUES ('a', 'b', 'c', 'postgres')",
            "UPDATE mqlayer.audit SET actor = 'x'",
            "DELETE FROM mqlayer.audit",
        ):
            with pytest.raises(pg_errors.InsufficientPrivilege):
                connection.execute(statement.encode())
