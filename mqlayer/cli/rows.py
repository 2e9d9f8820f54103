"""Groups and partitions as rows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mqlayer.cli.output import format_age, format_key
from mqlayer.domain.key_classes import NO_CLASSES
from mqlayer.domain.retry_rules import PARKING_LIMITS, RetryRules
from mqlayer.inspect import GroupStatus, PartitionStatus, UnsettledMessage, VersionLag, describe_breaker
from mqlayer.redelivery import FailureCounts


def group_row(group: GroupStatus) -> dict[str, Any]:
    """Row of `group list`."""
    facts = group.facts
    live = facts.state == "live" and facts.mode != "broadcast"
    return {
        "topic": facts.topic,
        "group": facts.name,
        "state": facts.state,
        "mode": facts.mode,
        "version": facts.version,
        "topic_version": facts.topic_version,
        "members": facts.alive if facts.mode != "pop" else None,
        "partitions": len(group.undrained) if live else None,
        "lag": group.lag if live else None,
        "unreachable": ", ".join(sorted(group.unreachable)),
    }


def group_text_row(group: GroupStatus) -> dict[str, Any]:
    """Row of `group list` for people."""
    row = group_row(group)
    return row | {"version": f"{row['version']} of {row.pop('topic_version')}"}


def settings_row(group: GroupStatus) -> dict[str, Any]:
    """Settings and state for `group show`."""
    facts = group.facts
    return {
        "topic": facts.topic,
        "group": facts.name,
        "state": facts.state,
        "start": facts.start if facts.start_at is None else facts.start_at,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(facts.rules).items()},
        "mode": facts.mode,
        "scope": facts.scope,
        "ordered": facts.ordered,
        "balance": facts.balance,
        "tag_filter": facts.tag_filter,
        "settings_version": facts.settings_version,
        "rate_limit": facts.rate_limit,
        "rate_burst": facts.rate_burst,
        "breaker": None if facts.breaker is None else describe_breaker(facts.breaker),
        "paused_at": facts.paused_at,
        "version": facts.version,
        "topic_version": facts.topic_version,
        "seek": facts.seek,
        "created_at": facts.created_at,
        "deployment": facts.deployments.in_force,
        "canary": facts.deployments.canary,
        "canary_lps": facts.deployments.canary_lps,
        "previous_deployment": facts.deployments.previous,
        "fallback": facts.deployments.fallback,
        "copied_from": facts.copied_from,
        "instance": facts.instance,
        "instance_expiry_s": facts.instance_expiry_s,
        "absent_s": None if facts.absent_s is None else round(facts.absent_s, 1),
        "members": facts.alive if facts.mode != "pop" else None,
        "lag": group.lag if facts.state == "live" and facts.mode != "broadcast" else None,
        "unreachable": dict(group.unreachable),
    }


def _class_words(rules: RetryRules) -> list[str]:
    words = []
    if rules.key_class != NO_CLASSES:
        words.append(f"key classes by {rules.key_class}")
    if rules.class_concurrency is not None:
        words.append(f"{rules.class_concurrency} keys of a class at once in a member")
    if rules.class_rate is not None:
        words.append(f"{rules.class_rate:g} messages/s of a class")
    return words


def describe_rules(rules: RetryRules) -> str:
    """Return a group's retry rules in one line."""
    words = [f"backoff {','.join(f'{wait:g}' for wait in rules.backoff_s)} s"]
    if rules.jitter:
        words.append(f"jitter {rules.jitter:g}")
    words.append(f"{rules.attempt_limit} attempts, then {rules.policy}")
    if rules.non_retryable_errors:
        words.append(f"non-retryable: {' '.join(rules.non_retryable_errors)}")
    if rules.retryable_errors:
        words.append(f"retryable: {' '.join(rules.retryable_errors)}")
    if rules.time_limit_s is not None:
        words.append(f"time limit {rules.time_limit_s:g} s")
    if rules.max_time_limit_s is not None:
        words.append(f"max time limit {rules.max_time_limit_s:g} s")
    if rules.breaker_share is not None:
        words.append(f"breaker at {rules.breaker_share:g} of {rules.breaker_keys} keys in {rules.breaker_window_s:g} s")
    if rules.breaker_errors:
        words.append(f"breaker errors: {' '.join(rules.breaker_errors)}")
    words += _class_words(rules)
    default = RetryRules()
    words += [
        f"{name.removesuffix('_limit').replace('_', ' ')} up to {getattr(rules, name):,}"
        for name in PARKING_LIMITS
        if getattr(rules, name) != getattr(default, name)
    ]
    return ", ".join(words)


def partition_facts(one: PartitionStatus) -> dict[str, Any]:
    """A partition for --json."""
    facts, stall = one.facts, one.stall
    return {
        "partition": facts.partition,
        "node": one.node,
        "lp_from": facts.lp_from,
        "lp_to": facts.lp_to,
        "made_in": facts.made_in,
        "state": facts.visibility,
        "behind": list(facts.behind),
        "owner": facts.owner,
        "epoch": facts.epoch,
        "target": facts.target,
        "committed": None if one.position is None else one.position.position,
        "end": None if one.position is None else one.position.next_offset,
        "lag": one.lag,
        "age_s": one.age_s,
        "head": None if one.head is None else head_facts(one.head),
        "stuck": None if stall is None else {"reason": stall.reason, "since": stall.since, "detail": stall.detail},
    }


def replay_facts(group: GroupStatus) -> dict[str, Any] | None:
    """The running replay for --json, or None."""
    if group.replay is None:
        return None
    return asdict(group.replay) | {"since": group.replay.since}


def breaker_facts(group: GroupStatus) -> dict[str, Any] | None:
    """A breaker that is not closed, for --json."""
    return None if group.facts.breaker is None else asdict(group.facts.breaker)


def parked_facts(group: GroupStatus) -> dict[str, Any]:
    """Parked counts for --json."""
    parked = group.parked
    since = parked.since
    return {"keys": parked.keys, "messages": parked.messages, "waiting": parked.waiting, "since": since,
            "bytes": parked.bytes}  # fmt: skip


def failure_facts(counts: FailureCounts) -> dict[str, Any]:
    """Failure counts for --json."""
    json = asdict(counts) | {"last_at": dict(counts.last_at)}
    del json["group_id"]
    return json


def failure_row(counts: FailureCounts) -> dict[str, Any]:
    """Row of `parked stats`."""
    return {
        "topic": counts.topic,
        "group": counts.group,
        "keys": counts.keys,
        "waiting": counts.waiting,
        "full": counts.full,
        "messages": counts.messages,
        "bytes": counts.bytes,
        "oldest_s": counts.oldest_s,
        "overdue_s": counts.overdue_s,
        "dead_now": counts.dead,
        "ever": describe_totals(counts),
    }


def describe_totals(counts: FailureCounts) -> str:
    """Return a group's lifetime totals in one line."""
    return ", ".join(f"{name} {count}" for name, count in counts.totals.items())


def head_facts(head: UnsettledMessage) -> dict[str, Any]:
    """The first unsettled message for --json."""
    return {
        "offset": head.offset,
        "key": head.key,
        "identity": head.identity,
        "age_s": head.age_s,
        "attempts": head.attempts,
        "failing_since": head.failing_since,
        "retry_at": head.retry_at,
        "retry_in_s": head.retry_in_s,
        "unmatched": head.unmatched,
    }


def version_facts(version: VersionLag) -> dict[str, Any]:
    """A route version's lag for --json."""
    return {
        "made_in": version.version,
        "partitions": version.partitions,
        "lag": version.lag,
        "age_s": version.age_s,
        "unknown": version.unknown,
    }


def partition_row(one: PartitionStatus) -> dict[str, Any]:
    """Row of `group show`."""
    json = partition_facts(one)
    hidden = f"hidden behind {', '.join(map(str, one.facts.behind))}"
    return {
        "partition": json["partition"],
        "node": json["node"],
        "LPs": f"[{json['lp_from']}, {json['lp_to']})",
        "state": hidden if one.facts.visibility == "hidden" else json["state"],
        "owner": json["owner"],
        "epoch": json["epoch"],
        "target": json["target"],
        "committed": json["committed"],
        "end": json["end"],
        "lag": _or_unreachable(one.lag),
    }


def lag_row(one: PartitionStatus) -> dict[str, Any]:
    """Row of `group lag`."""
    return {
        "partition": one.facts.partition,
        "made_in": one.facts.made_in,
        "state": one.facts.visibility,
        "lag": _or_unreachable(one.lag),
        "oldest_s": one.age_s,
        "owner": one.facts.owner,
    }


def version_row(version: VersionLag) -> dict[str, Any]:
    """Row per route version of `group lag`."""
    return {
        "version": version.version,
        "partitions": version.partitions,
        "lag": version.lag,
        "oldest_s": version.age_s,
        "not_known": version.unknown or None,
    }


def stall_row(one: PartitionStatus) -> dict[str, Any]:
    """Row of a stuck partition."""
    facts, head, stall = one.facts, one.head, one.stall
    return {
        "stuck": facts.partition,
        "owner": facts.owner,
        "epoch": facts.epoch,
        "head": head and head.offset,
        "key": head and format_key(head.key),
        "since": stall and stall.since,
        "attempts": head and head.attempts,
        "next_attempt": _retry(head),
        "why": stall and stall.detail,
    }


def describe_waiting(one: PartitionStatus) -> str:
    """Return a partition's stall and head in one line."""
    words = [f"owner {one.facts.owner}"] if one.facts.owner is not None else []
    if one.stall is not None:
        words.append(f"is stuck: {one.stall.detail}")
    if one.head is not None:
        words.append(f"its head is offset {one.head.offset}, key {format_key(one.head.key)}")
        if one.head.retry_in_s is not None:
            words.append(f"next attempt {_retry(one.head)}")
    return ", ".join(words)


def _retry(head: UnsettledMessage | None) -> str | None:
    if head is None or head.retry_in_s is None:
        return None
    return f"in {format_age(head.retry_in_s)}" if head.retry_in_s else "now"


def _or_unreachable(lag: int | None) -> int | str:
    return "?" if lag is None else lag
