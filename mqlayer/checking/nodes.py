"""Checks of one node, by what its Redis says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.checking.clocks import clock_finding
from mqlayer.checking.findings import Check, Finding, Limits, Verdict
from mqlayer.checking.versions import redis_finding
from mqlayer.redis.asking import ServerAnswers
from mqlayer.redis.nodes import WANTED, Node


@dataclass(frozen=True, slots=True)
class AskedNode:
    """A registered node with what its server answered."""

    node: Node
    lost_at: datetime | None
    answers: ServerAnswers

    @property
    def subject(self) -> str:
        """How a finding names it."""
        return node_subject(self.node)


def node_subject(node: Node) -> str:
    """Return how a finding names a node."""
    return f"node {node.name} ({node.address})"


def check_version(asked: AskedNode, _: Limits) -> list[Finding]:
    """The version, against those that are too old or known to be bad."""
    answers = asked.answers
    return [redis_finding(asked.subject, "valkey" if answers.product == "valkey" else "redis", answers.version)]


def check_armed(asked: AskedNode, _: Limits) -> list[Finding]:
    """Only the armed run serves (invariant 17)."""
    node, run_id = asked.node, asked.answers.run_id
    if asked.lost_at is not None:
        fix = f"mqlayer node rearm {node.name}, if it is back for good; else let its address go"
        return [Finding("armed", asked.subject, Verdict.WARNING, "it was given up as lost, and answers", fix)]
    if run_id == node.armed_run_id:
        return [Finding("armed", asked.subject, Verdict.OK, f"run {run_id[:8]} is the armed one")]
    seen = f"run {run_id[:8]}, armed is {(node.armed_run_id or 'none')[:8]}: it serves nothing"
    fix = f"a running worker, relay or member arms it within seconds; by hand: mqlayer node rearm {node.name}"
    return [Finding("armed", asked.subject, Verdict.BROKEN, seen, fix)]


def check_role(asked: AskedNode, _: Limits) -> list[Finding]:
    """The address has to be a primary's, and not a cluster's."""
    info = asked.answers.info
    role = info.get("role", "")
    if role not in ("master", "primary"):
        fix = "let the address of the node be the primary's"
        return [Finding("role", asked.subject, Verdict.BROKEN, f"it is a {role}", fix)]
    if info.get("cluster_enabled") == "1":
        fix = "cluster-enabled no: register each primary as a node of its own, one read spans several hash slots"
        return [Finding("role", asked.subject, Verdict.BROKEN, "it runs in cluster mode", fix)]
    return [Finding("role", asked.subject, Verdict.OK, "primary")]


def check_persistence(asked: AskedNode, _: Limits) -> list[Finding]:
    """What was acknowledged has to be on disk."""
    info, settings, subject = asked.answers.info, asked.answers.settings, asked.subject
    if info.get("aof_enabled") != "1":
        return [_persistence(subject, Verdict.BROKEN, "appendonly no", f"CONFIG SET {WANTED['appendonly'][1]}")]
    if info.get("aof_last_write_status", "ok") != "ok":
        fix = "see the server's log and its disk; it refuses writes, or loses them with its next end"
        return [_persistence(subject, Verdict.BROKEN, "the last write of its append-only file failed", fix)]
    found = [*_rewrites(subject, info)]
    if len(settings) == 0:
        fix = "look into redis.conf: appendfsync always, no-appendfsync-on-rewrite no"
        return [*found, _persistence(subject, Verdict.UNKNOWN, "it forbids CONFIG GET", fix)]
    if settings.get("no-appendfsync-on-rewrite") == "yes":
        fix = f"CONFIG SET {WANTED['no-appendfsync-on-rewrite'][1]}"
        found.append(_persistence(subject, Verdict.BROKEN, "no-appendfsync-on-rewrite yes", fix))
    found += _fsyncs(subject, settings.get("appendfsync", "always"))
    if not found:
        cut = settings.get("aof-load-truncated", "no")
        seen = f"appendonly yes, appendfsync always; aof-load-truncated {cut}: a cut file shows by run id and marks"
        found.append(_persistence(subject, Verdict.OK, seen, ""))
    return found


def check_eviction(asked: AskedNode, _: Limits) -> list[Finding]:
    """Whatever evicts keys evicts whole partitions."""
    policy = asked.answers.info.get("maxmemory_policy", "")
    if policy == "noeviction":
        return [Finding("eviction", asked.subject, Verdict.OK, "maxmemory-policy noeviction")]
    fix = f"CONFIG SET {WANTED['maxmemory-policy'][1]}"
    return [Finding("eviction", asked.subject, Verdict.BROKEN, f"maxmemory-policy {policy}", fix)]


def check_memory(asked: AskedNode, limits: Limits) -> list[Finding]:
    """A full node refuses to publish, while settling and trimming go on."""
    answers = asked.answers
    used, most = answers.number("used_memory"), answers.number("maxmemory")
    what, bound = ("maxmemory", most) if most else ("the machine's memory", answers.number("total_system_memory"))
    part = used / bound if bound else 0.0
    seen = f"{used / 2**20:.0f} MiB used, {part:.0%} of {what}"
    if part < limits.part:
        return [Finding("memory", asked.subject, Verdict.OK, seen)]
    fix = "let consumers catch up and trimming run, move partitions to another node, or CONFIG SET maxmemory higher"
    verdict = Verdict.BROKEN if most and used >= most else Verdict.WARNING
    return [Finding("memory", asked.subject, verdict, seen, fix)]


def check_replicas(asked: AskedNode, _: Limits) -> list[Finding]:
    """How many copies there are; a fact, unless more are demanded than there are."""
    wanted = asked.answers.settings.get("min-replicas-to-write", "0")
    there = asked.answers.number("connected_slaves")
    good = asked.answers.number("min_slaves_good_slaves") if wanted != "0" else there
    seen = f"{there} replicas, min-replicas-to-write {wanted}"
    if wanted.isdecimal() and good < int(wanted):
        fix = f"bring replicas back, or CONFIG SET min-replicas-to-write {good}: until then it refuses writes"
        return [Finding("replicas", asked.subject, Verdict.BROKEN, f"{seen}, {good} in reach", fix)]
    return [Finding("replicas", asked.subject, Verdict.OK, seen)]


def check_clock(asked: AskedNode, limits: Limits) -> list[Finding]:
    """Its clock against ours."""
    return [clock_finding(asked.subject, asked.answers.ahead_s, asked.answers.round_trip_s, limits)]


CHECKS: Final[dict[str, Check[AskedNode]]] = {
    "version": check_version,
    "armed": check_armed,
    "role": check_role,
    "persistence": check_persistence,
    "eviction": check_eviction,
    "memory": check_memory,
    "replicas": check_replicas,
    "clock": check_clock,
}


def _persistence(subject: str, verdict: Verdict, seen: str, fix: str) -> Finding:
    return Finding("persistence", subject, verdict, seen, fix)


def _rewrites(subject: str, info: dict[str, str]) -> list[Finding]:
    if info.get("aof_last_bgrewrite_status", "ok") == "ok":
        return []
    fix = "see the server's log and its disk: until a rewrite works, its append-only file grows for ever"
    return [_persistence(subject, Verdict.WARNING, "the last rewrite of its append-only file failed", fix)]


def _fsyncs(subject: str, policy: str) -> list[Finding]:
    fix = "CONFIG SET appendfsync always"
    if policy == "everysec":
        seen = "appendfsync everysec: a power cut takes the last seconds of direct publishing, and repeats the outbox's"
        return [_persistence(subject, Verdict.WARNING, seen, fix)]
    if policy == "no":
        return [_persistence(subject, Verdict.BROKEN, "appendfsync no: the system decides when it is on disk", fix)]
    return []
