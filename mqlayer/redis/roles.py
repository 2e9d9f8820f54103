"""Which scripts and plain commands each kind of process sends to a node.

Found by reading the source (`python -m tests.proof.reach` prints these tables), held against it by
tests/unit/test_rights.py, and against what processes really send by tests/integration/test_redis_users.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class RedisRole(StrEnum):
    """What a process is to a node. A process that is several of these has the rights of all."""

    PUBLISHER = "publisher"
    """Direct producers; who publishes through the outbox needs no Redis at all."""
    CONSUMER = "consumer"
    """Members and receivers of groups."""
    RELAY = "relay"
    WORKER = "worker"
    """Celery's periodic jobs, which also arm nodes."""
    VIEWER = "viewer"
    """People and dashboards that look: doctor, verify, lag."""
    OPERATOR = "operator"
    """Commands that change something."""
    ARMING = "arming"
    """The part of a worker's and an operator's that brings a node back into service."""


GRANTED: Final = tuple(role for role in RedisRole if role is not RedisRole.ARMING)
"""The roles that users are made for."""

SCRIPTS: Final[Mapping[RedisRole, frozenset[str]]] = {
    RedisRole.PUBLISHER: frozenset({"log_append", "log_append_once", "marks_read"}),
    RedisRole.CONSUMER: frozenset(
        {
            "attempt_count",
            "attempt_start",
            "lock_release",
            "lock_acquire",
            "log_select",
            "offsets_settle",
            "pop_receive",
            "pop_settle",
            "rate_acquire",
            "shared_due",
            "shared_nack",
            "shared_attempt",
            "shared_extend",
            "shared_reclaim",
            "shared_settle",
            "shared_acquire",
        }
    ),
    RedisRole.RELAY: frozenset(
        {
            "lock_fence",
            "log_append",
            "log_recount",
            "log_ends",
            "mark_skip",
            "marks_read",
            "partition_create",
            "partition_open",
            "partition_reopen",
            "partition_retire",
            "partition_seal",
            "source_end",
            "source_term",
        }
    ),
    RedisRole.WORKER: frozenset(
        {
            "group_forget",
            "group_position",
            "dedup_load",
            "lock_fence",
            "log_append",
            "log_append_once",
            "log_recount",
            "log_ends",
            "log_trim",
            "mark_skip",
            "marks_drop",
            "marks_read",
            "partition_create",
            "partition_open",
            "partition_reopen",
            "partition_retire",
            "partition_seal",
            "shared_reclaim",
            "source_end",
            "source_term",
        }
    ),
    RedisRole.VIEWER: frozenset({"group_position", "key_find", "log_chain", "partition_read"}),
    RedisRole.OPERATOR: frozenset(
        {
            "group_forget",
            "group_position",
            "dedup_load",
            "key_find",
            "lock_fence",
            "log_append",
            "log_chain",
            "log_recount",
            "log_ends",
            "log_trim",
            "mark_skip",
            "partition_create",
            "partition_read",
            "partition_open",
            "partition_reopen",
            "partition_retire",
            "partition_seal",
            "source_end",
        }
    ),
    RedisRole.ARMING: frozenset(
        {
            "lock_fence",
            "log_append",
            "log_recount",
            "log_ends",
            "mark_skip",
            "partition_create",
            "partition_open",
            "partition_reopen",
            "partition_retire",
            "partition_seal",
            "source_end",
        }
    ),
}

PLAIN_COMMANDS: Final[Mapping[RedisRole, frozenset[str]]] = {
    RedisRole.PUBLISHER: frozenset({"evalsha", "wait", "xrevrange"}),
    RedisRole.CONSUMER: frozenset({"evalsha", "xpending", "xrange", "xread", "xreadgroup"}),
    RedisRole.RELAY: frozenset(
        {
            "bgrewriteaof",
            "config|get",
            "eval",
            "evalsha",
            "exec",
            "hdel",
            "hget",
            "hgetall",
            "hmget",
            "multi",
            "scan",
            "xrevrange",
        }
    ),
    RedisRole.WORKER: frozenset(
        {
            "bgrewriteaof",
            "config|get",
            "eval",
            "evalsha",
            "exec",
            "hdel",
            "hget",
            "hgetall",
            "hmget",
            "multi",
            "pttl",
            "scan",
            "time",
            "wait",
            "xrange",
            "xrevrange",
            "xtrim",
            "zrange",
        }
    ),
    RedisRole.VIEWER: frozenset({"evalsha", "hmget", "memory|usage", "time", "xrange"}),
    RedisRole.OPERATOR: frozenset(
        {
            "bgrewriteaof",
            "config|get",
            "eval",
            "evalsha",
            "exec",
            "hdel",
            "hget",
            "hgetall",
            "hmget",
            "memory|usage",
            "multi",
            "pttl",
            "scan",
            "time",
            "xrange",
            "xrevrange",
            "xsetid",
            "xtrim",
            "zrange",
        }
    ),
    RedisRole.ARMING: frozenset(
        {"bgrewriteaof", "config|get", "eval", "evalsha", "exec", "hdel", "hget", "hgetall", "hmget", "multi", "scan"}
    ),
}
