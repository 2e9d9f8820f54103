"""Each process runs under a Redis user of its own, on a cluster whose default user is off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import redis

from mqlayer.redis.acl import CommandAccess, acl_rules, needs_of
from mqlayer.redis.command_specs import example
from mqlayer.redis.roles import GRANTED, RedisRole
from mqlayer.stack.credentials import Login
from tests.fixtures.clusters import Cluster, StartCluster, slot_of
from tests.fixtures.servers import redis_7_program
from tests.fixtures.user_programs import EACH, TOPIC
from tests.fixtures.user_sites import (
    ADMIN,
    ADMIN_PASSWORD,
    JOB_TASKS,
    OUTBOXED,
    PROGRAMS,
    Site,
    UserFiles,
    armed_run,
    call_jobs_due,
    publish_through_the_outbox,
    site_on,
)
from tests.fixtures.wait import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

COMMANDS = {
    RedisRole.RELAY: (("relay", "--once"), 0),
    RedisRole.OPERATOR: (("topic", "create", "others"), 1),
    RedisRole.VIEWER: (("verify", TOPIC), 3),
}
"""What a user that lacks a right types, and the exit code: a relay waits for the node."""


@pytest.fixture
def cluster(start_cluster: StartCluster, tmp_path: Path, key_prefix: str) -> Cluster:
    """A cluster with the users that `mqlayer node acl --cluster` makes."""
    users = UserFiles.make(tmp_path, key_prefix, cluster=True)
    options = {"aclfile": str(users.acl_file), "masteruser": ADMIN, "masterauth": ADMIN_PASSWORD}
    return start_cluster(program=redis_7_program(), options=options, login=Login(ADMIN, ADMIN_PASSWORD))


@pytest.fixture
def site(
    cluster: Cluster, database_dsn: str, key_prefix: str, tmp_path: Path, logging_as_before: None
) -> Iterator[Site]:
    users = UserFiles(tmp_path / "passwords", tmp_path / "users.acl")
    with site_on(cluster.servers, cluster.url, users, dsn=database_dsn, prefix=key_prefix) as found:
        found.type(RedisRole.OPERATOR, "node", "register", "c1", found.url)
        found.type(RedisRole.OPERATOR, "topic", "create", TOPIC, "--partitions", "4", "--archived")
        yield found


def test_every_process_does_its_work_as_its_own_user_and_is_refused_nothing(
    site: Site, cluster: Cluster, database_dsn: str
) -> None:
    operator, viewer, worker = RedisRole.OPERATOR, RedisRole.VIEWER, RedisRole.WORKER
    relay = site.start(RedisRole.RELAY, "relay", "relay")
    members = site.start(RedisRole.CONSUMER, "members", "members", module=PROGRAMS)
    site.start(RedisRole.CONSUMER, "receiver", "receive", module=PROGRAMS)
    groups = {"ordered", "shared", "every", "popped"}

    def publish_and_wait(what: str) -> None:
        before = runs_of_handlers(site)
        publish_through_the_outbox(database_dsn)
        assert int(site.run(RedisRole.PUBLISHER, "publish")) == 2 * EACH
        wait_until(
            lambda: all(runs_of_handlers(site)[group] >= before[group] + OUTBOXED for group in groups),
            timeout_s=60,
            what=what,
        )

    publish_and_wait("the first messages handled")
    expected = OUTBOXED + 2 * EACH
    wait_until(lambda: all(site.handled()[one] >= expected for one in groups), timeout_s=60, what="all handled")
    assert site.refusals() == set()

    # What people look at, what the worker does, and what operators do.
    site.type(viewer, "verify", TOPIC)
    site.type(viewer, "key", "explain", TOPIC, "k1", "--group", "ordered")
    assert "may do all that it needs" in site.type(viewer, "doctor", "--all", code=1)
    site.run(worker, "job", *JOB_TASKS)
    site.type(operator, "route", "split", TOPIC, "1", "--at", "128", "--yes")
    call_jobs_due(database_dsn)
    site.run(worker, "job", "repair_routes", "trim", "archive", "clean_marks")
    site.type(viewer, "verify", TOPIC)
    site.type(operator, "node", "rearm", "c1")
    site.type(viewer, "verify", TOPIC)
    assert site.refusals() == set()

    # A shard fails over: who may not arm leaves it to a worker, and goes on when that did.
    before = armed_run(database_dsn)
    cluster.kill(cluster.owner(1))
    # All servers name the new primary from here on.
    cluster.wait_ok()
    site.wait_armed_by_worker(database_dsn, before)
    site.type(viewer, "verify", TOPIC)
    publish_and_wait("messages handled behind a fail-over")
    target = next(one for one in cluster.primaries() if one is not cluster.owner(2))
    cluster.move_slot(slot_of(2), target)
    publish_and_wait("messages handled behind a move of a slot")
    site.type(viewer, "verify", TOPIC)
    assert site.refusals() == set()
    for file in (relay, members):
        site.unspoken(file.read_text())


def runs_of_handlers(site: Site) -> Counter[str]:
    """Return how often each group handled a message."""
    lines = site.log.read_text().splitlines() if site.log.exists() else []
    return Counter(line.split()[0] for line in lines)


def test_a_user_with_the_rules_of_a_single_node_is_told_what_it_lacks(site: Site, key_prefix: str) -> None:
    for role in GRANTED:
        for client in site.admins():
            give(client, role, acl_rules([role], prefix=key_prefix))
    told = [site.run(RedisRole.PUBLISHER, "publish", code=1)]
    told += [site.type(role, *words, code=code) for role, (words, code) in COMMANDS.items()]
    for said in told:
        assert "cluster|" in said, said
        assert "--cluster" in said, said


@pytest.mark.parametrize("role", GRANTED)
def test_a_rule_less_is_refused(site: Site, role: RedisRole, key_prefix: str) -> None:
    """By each server, and by the check, which names it."""
    whole = acl_rules([role], prefix=key_prefix, cluster=True)
    asker = RedisRole.RELAY if role is RedisRole.OPERATOR else RedisRole.OPERATOR
    needs = [need for need in needs_of(role, cluster=True) - needs_of(role) if need.writes or not need.key]
    assert {need.command for need in needs} >= {"cluster|info", "cluster|slots"}
    for need in sorted(needs):
        call = example(need.command, f"{key_prefix}:{need.key}".replace("{*}", "{1}"))
        less = without(whole, need, key_prefix)
        for client in site.admins():
            assert _dry_run(client, role, call) == b"OK"
            give(client, role, less)
            assert b"no permissions" in _dry_run(client, role, call)
        said = site.type(asker, "node", "acl", role, "--user", f"u-{role}", "--check", code=1)
        assert f"lacks +{need.command}" in said
        for client in site.admins():
            give(client, role, whole)


def without(rules: Iterable[str], need: CommandAccess, prefix: str) -> list[str]:
    """Return rules without one: a command, or a key where it may write."""
    if not need.key:
        return [rule for rule in rules if rule != f"+{need.command}"]
    less = [rule.replace(f" ~{prefix}:{need.key}", "") if f"+{need.command} " in rule else rule for rule in rules]
    return [rule for rule in less if rule != f"(+{need.command})"]


def give(client: redis.Redis, role: RedisRole, rules: Iterable[str]) -> None:
    """Give a role's user these rules in place of its own."""
    client.execute_command("ACL", "SETUSER", f"u-{role}", "clearselectors", *rules)  # type: ignore[no-untyped-call]


def _dry_run(client: redis.Redis, role: RedisRole, call: Iterable[str]) -> bytes:
    reply: bytes = client.execute_command("ACL", "DRYRUN", f"u-{role}", *call)  # type: ignore[no-untyped-call]
    return reply
