"""Scripts and commands per role; `python -m tests.proof.reach` prints them from the source, tests/unit/test_rights.py
checks them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class RedisRole(StrEnum):
    """A process's role; it may have several."""

    PUBLISHER = "publisher"
    """Direct producers only."""
    CONSUMER = "consumer"
    RELAY = "relay"
    WORKER = "worker"
    """Periodic jobs; they also arm."""
    VIEWER = "viewer"
    OPERATOR = "operator"
    ARMING = "arming"
    """The part of workers and operators that arms nodes."""


GRANTED: Final = tuple(role for role in RedisRole if role is not RedisRole.ARMING)

SCRIPTS: Final[Mapping[RedisRole, frozenset[str]]] = {
    RedisRole.PUBLISHER: frozenset({"log_append", "log_append_once", "log_touch", "marks_read"}),
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
            "shared_defer",
            "shared_deferred",
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
            "log_touch",
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
            "log_bound",
            "log_recount",
            "log_ends",
            "log_search",
            "log_touch",
            "log_trim",
            "mark_skip",
            "marks_drop",
            "marks_read",
            "partition_create",
            "partition_open",
            "partition_reopen",
            "partition_retire",
            "partition_seal",
            "position_drop",
            "shared_reclaim",
            "source_end",
            "source_term",
        }
    ),
    RedisRole.VIEWER: frozenset({"group_position", "key_find", "log_chain", "log_search", "partition_read"}),
    RedisRole.OPERATOR: frozenset(
        {
            "group_copy",
            "group_forget",
            "group_position",
            "dedup_load",
            "key_find",
            "lock_fence",
            "log_append",
            "log_bound",
            "log_chain",
            "log_recount",
            "log_ends",
            "log_search",
            "log_touch",
            "log_trim",
            "mark_skip",
            "partition_create",
            "partition_read",
            "partition_open",
            "partition_reopen",
            "partition_retire",
            "partition_seal",
            "position_drop",
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
    RedisRole.PUBLISHER: frozenset({"evalsha", "wait", "waitaof", "xrevrange"}),
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
            "wait",
            "waitaof",
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
            "waitaof",
            "xrange",
            "xrevrange",
            "xtrim",
            "zrange",
        }
    ),
    RedisRole.VIEWER: frozenset({"evalsha", "getrange", "hmget", "memory|usage", "time", "xrange"}),
    RedisRole.OPERATOR: frozenset(
        {
            "bgrewriteaof",
            "config|get",
            "eval",
            "evalsha",
            "exec",
            "getrange",
            "hdel",
            "hget",
            "hgetall",
            "hmget",
            "memory|usage",
            "multi",
            "pttl",
            "scan",
            "time",
            "wait",
            "waitaof",
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
