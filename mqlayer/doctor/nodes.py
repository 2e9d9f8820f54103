"""Checks of one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from mqlayer.doctor.clocks import clock_finding
from mqlayer.doctor.findings import Check, CheckLimits, CheckStatus, Finding
from mqlayer.doctor.versions import redis_finding
from mqlayer.domain.durability import Durability, replicas_wanted
from mqlayer.domain.node_runs import is_same_run, short_run
from mqlayer.redis.node_connection import REQUIRED_SETTINGS, Node
from mqlayer.redis.server_info import ServerInfo
from mqlayer.redis.server_versions import WAITAOF_SINCE, waitaof_is_early


class RegisteredNode(NamedTuple):
    """A node, when it was given up, and a topic of each durability class there."""

    node: Node
    lost_at: datetime | None
    classes: Mapping[Durability, str]


@dataclass(frozen=True, slots=True)
class CheckedNode:
    """A registered node with its server's answers."""

    node: Node
    lost_at: datetime | None
    answers: ServerInfo
    classes: Mapping[Durability, str] = field(default_factory=dict)
    """The durability classes of its partitions' topics, each with a topic."""
    shard: str = ""
    """Address of one shard, if its answers are meant."""

    @property
    def subject(self) -> str:
        """The node's name in findings, or its shard's."""
        return f"{node_subject(self.node)} shard {self.shard}" if self.shard else node_subject(self.node)


def node_subject(node: Node) -> str:
    """Return a node's name in findings."""
    return f"node {node.name} ({node.address})"


def check_version(checked: CheckedNode, _: CheckLimits) -> list[Finding]:
    """Report outdated or faulty versions."""
    answers = checked.answers
    return [redis_finding(checked.subject, answers.product, answers.version)]


def check_armed(checked: CheckedNode, _: CheckLimits) -> list[Finding]:
    """Report an unarmed run (invariant 17)."""
    node, run_id = checked.node, checked.answers.run_id
    if checked.lost_at is not None:
        fix = f"mqlayer node rearm {node.name}, if it is back for good; else let its address go"
        return [Finding("armed", checked.subject, CheckStatus.WARNING, "it was given up as lost, and answers", fix)]
    if is_same_run(run_id, node.armed_run_id):
        return [Finding("armed", checked.subject, CheckStatus.OK, f"run {short_run(run_id)} is the armed one")]
    seen = f"run {short_run(run_id)}, armed is {short_run(node.armed_run_id) or 'none'}: it serves nothing"
    fix = f"a running worker, relay or member arms it within seconds; by hand: mqlayer node rearm {node.name}"
    return [Finding("armed", checked.subject, CheckStatus.BROKEN, seen, fix)]


def check_role(checked: CheckedNode, _: CheckLimits) -> list[Finding]:
    """Report addresses of replicas or cluster nodes."""
    info = checked.answers.info
    role = info.get("role", "")
    if role not in ("master", "primary"):
        fix = "let the address of the node be the primary's"
        return [Finding("role", checked.subject, CheckStatus.BROKEN, f"it is a {role}", fix)]
    if info.get("cluster_enabled") == "1" and not checked.node.is_cluster:
        fix = "register the cluster at cluster://host:port,…: at a plain address all partitions need one hash slot"
        return [Finding("role", checked.subject, CheckStatus.BROKEN, "it runs in cluster mode", fix)]
    if checked.node.is_cluster:
        return [_shards(checked)]
    return [Finding("role", checked.subject, CheckStatus.OK, "primary")]


def check_persistence(checked: CheckedNode, _: CheckLimits) -> list[Finding]:
    """Report settings that lose acknowledged writes."""
    info, settings, subject = checked.answers.info, checked.answers.settings, checked.subject
    if info.get("aof_enabled") != "1":
        return [
            _persistence(
                subject, CheckStatus.BROKEN, "appendonly no", f"CONFIG SET {REQUIRED_SETTINGS['appendonly'][1]}"
            )
        ]
    if info.get("aof_last_write_status", "ok") != "ok":
        fix = "see the server's log and its disk; it refuses writes, or loses them with its next end"
        return [_persistence(subject, CheckStatus.BROKEN, "the last write of its append-only file failed", fix)]
    found = [*_rewrites(subject, info)]
    if len(settings) == 0:
        fix = "look into redis.conf: appendfsync always, no-appendfsync-on-rewrite no"
        return [*found, _persistence(subject, CheckStatus.UNKNOWN, "it forbids CONFIG GET", fix)]
    if settings.get("no-appendfsync-on-rewrite") == "yes":
        fix = f"CONFIG SET {REQUIRED_SETTINGS['no-appendfsync-on-rewrite'][1]}"
        found.append(_persistence(subject, CheckStatus.BROKEN, "no-appendfsync-on-rewrite yes", fix))
    found += _fsyncs(subject, settings.get("appendfsync", "always"))
    if not found:
        cut = settings.get("aof-load-truncated", "no")
        seen = f"appendonly yes, appendfsync always; aof-load-truncated {cut}: a cut file shows by run id and marks"
        found.append(_persistence(subject, CheckStatus.OK, seen, ""))
    return found


def check_eviction(checked: CheckedNode, _: CheckLimits) -> list[Finding]:
    """Report eviction policies: they would drop whole partitions."""
    policy = checked.answers.info.get("maxmemory_policy", "")
    if policy == "noeviction":
        return [Finding("eviction", checked.subject, CheckStatus.OK, "maxmemory-policy noeviction")]
    fix = f"CONFIG SET {REQUIRED_SETTINGS['maxmemory-policy'][1]}"
    return [Finding("eviction", checked.subject, CheckStatus.BROKEN, f"maxmemory-policy {policy}", fix)]


def check_memory(checked: CheckedNode, limits: CheckLimits) -> list[Finding]:
    """Report a nearly full node: a full one refuses publishing."""
    answers = checked.answers
    used, most = answers.number("used_memory"), answers.number("maxmemory")
    what, bound = ("maxmemory", most) if most else ("the machine's memory", answers.number("total_system_memory"))
    part = used / bound if bound else 0.0
    seen = f"{used / 2**20:.0f} MiB used, {part:.0%} of {what}"
    if part < limits.part:
        return [Finding("memory", checked.subject, CheckStatus.OK, seen)]
    fix = "let consumers catch up and trimming run, move partitions to another node, or CONFIG SET maxmemory higher"
    verdict = CheckStatus.BROKEN if most and used >= most else CheckStatus.WARNING
    return [Finding("memory", checked.subject, verdict, seen, fix)]


def check_replicas(checked: CheckedNode, _: CheckLimits) -> list[Finding]:
    """Report replicas; broken if too few."""
    wanted = checked.answers.settings.get("min-replicas-to-write", "0")
    there = checked.answers.number("connected_slaves")
    good = checked.answers.number("min_slaves_good_slaves") if wanted != "0" else there
    seen = f"{there} replicas, min-replicas-to-write {wanted}"
    if wanted.isdecimal() and good < int(wanted):
        fix = f"bring replicas back, or CONFIG SET min-replicas-to-write {good}: until then it refuses writes"
        return [Finding("replicas", checked.subject, CheckStatus.BROKEN, f"{seen}, {good} in reach", fix)]
    return [Finding("replicas", checked.subject, CheckStatus.OK, seen)]


def check_durable_topics(checked: CheckedNode, _: CheckLimits) -> list[Finding]:
    """Report a node that can't hold the durability classes of its topics."""
    found = [finding for name in sorted(checked.classes) for finding in _class_findings(checked, name)]
    if found or not checked.classes:
        return found
    seen = f"holds {', '.join(sorted(checked.classes))}"
    return [Finding("durable_topics", checked.subject, CheckStatus.OK, seen)]


def _class_findings(checked: CheckedNode, durability: Durability) -> list[Finding]:
    node, answers, topic = checked.node, checked.answers, checked.classes[durability]
    waits = f"topic {topic} waits for {durability}"
    if durability == "disk":
        if answers.redis_version < WAITAOF_SINCE:
            shown = ".".join(map(str, answers.version))
            return [_durable_topics(checked, f"{waits}, and {shown} has no WAITAOF", "Redis 7.2 or later, or Valkey")]
        appendfsync = answers.settings.get("appendfsync", "not told")
        if appendfsync == "no":
            return [_durable_topics(checked, f"{waits}, and appendfsync is no", "CONFIG SET appendfsync always")]
        if waitaof_is_early(answers.product, answers.version) and appendfsync != "always":
            seen = f"{waits}, and this server confirms a sync before it: appendfsync is {appendfsync}"
            return [_durable_topics(checked, seen, "CONFIG SET appendfsync always")]
        return []
    wanted, there = replicas_wanted(durability, node.replicas), answers.number("connected_slaves")
    if there >= wanted:
        return []
    fix = (
        "bring replicas back: until then its messages are not confirmed, and their outbox rows stay; "
        f"or mqlayer topic set {topic} --durability node"
    )
    return [_durable_topics(checked, f"{waits}: {there} of {wanted} replicas are connected", fix)]


def _durable_topics(checked: CheckedNode, seen: str, fix: str) -> Finding:
    return Finding("durable_topics", checked.subject, CheckStatus.BROKEN, seen, fix)


def check_clock(checked: CheckedNode, limits: CheckLimits) -> list[Finding]:
    """Check the clock."""
    return [clock_finding(checked.subject, checked.answers.ahead_s, checked.answers.round_trip_s, limits)]


CHECKS: Final[dict[str, Check[CheckedNode]]] = {
    "version": check_version,
    "armed": check_armed,
    "role": check_role,
    "persistence": check_persistence,
    "eviction": check_eviction,
    "memory": check_memory,
    "replicas": check_replicas,
    "durable_topics": check_durable_topics,
    "clock": check_clock,
}


OF_SHARDS: Final = ("version", "persistence", "eviction", "memory", "replicas", "durable_topics", "clock")
"""Checks that each shard of a cluster has."""


def _shards(checked: CheckedNode) -> Finding:
    alone = [address for address, one in checked.answers.shards.items() if one.number("connected_slaves") == 0]
    seen = f"a cluster of {len(checked.answers.shards)} shards"
    if alone:
        fix = "add replicas: where a shard is away, all partitions of the node wait"
        return Finding("role", checked.subject, CheckStatus.WARNING, f"{seen}; without a replica: {alone[0]}", fix)
    return Finding("role", checked.subject, CheckStatus.OK, seen)


def _persistence(subject: str, verdict: CheckStatus, seen: str, fix: str) -> Finding:
    return Finding("persistence", subject, verdict, seen, fix)


def _rewrites(subject: str, info: dict[str, str]) -> list[Finding]:
    if info.get("aof_last_bgrewrite_status", "ok") == "ok":
        return []
    fix = "see the server's log and its disk: until a rewrite works, its append-only file grows for ever"
    return [_persistence(subject, CheckStatus.WARNING, "the last rewrite of its append-only file failed", fix)]


def _fsyncs(subject: str, policy: str) -> list[Finding]:
    fix = "CONFIG SET appendfsync always"
    if policy == "everysec":
        seen = "appendfsync everysec: a power cut takes the last seconds of direct publishing, and repeats the outbox's"
        return [_persistence(subject, CheckStatus.WARNING, seen, fix)]
    if policy == "no":
        return [_persistence(subject, CheckStatus.BROKEN, "appendfsync no: the system decides when it is on disk", fix)]
    return []
