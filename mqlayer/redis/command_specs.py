"""Redis commands in use; a test compares `COMMANDS` with servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class CommandSpec(NamedTuple):
    """A command; `min_words` includes its name."""

    min_words: int
    writes: bool = False


COMMANDS: Final[dict[str, CommandSpec]] = {
    "acl|dryrun": CommandSpec(4),
    "acl|whoami": CommandSpec(2),
    "bgrewriteaof": CommandSpec(1),
    "bitcount": CommandSpec(2),
    "bitpos": CommandSpec(3),
    "cluster|info": CommandSpec(2),
    "cluster|slots": CommandSpec(2),
    "config|get": CommandSpec(3),
    "del": CommandSpec(2, writes=True),
    "eval": CommandSpec(3),
    "evalsha": CommandSpec(3),
    "exec": CommandSpec(1),
    "exists": CommandSpec(2),
    "get": CommandSpec(2),
    "getbit": CommandSpec(3),
    "getrange": CommandSpec(4),
    "hdel": CommandSpec(3, writes=True),
    "hget": CommandSpec(3),
    "hgetall": CommandSpec(2),
    "hincrby": CommandSpec(4, writes=True),
    "hlen": CommandSpec(2),
    "hmget": CommandSpec(3),
    "hset": CommandSpec(4, writes=True),
    "hsetnx": CommandSpec(4, writes=True),
    "info": CommandSpec(1),
    "memory|usage": CommandSpec(3),
    "multi": CommandSpec(1),
    "persist": CommandSpec(2, writes=True),
    "pexpire": CommandSpec(3, writes=True),
    "ping": CommandSpec(1),
    "pttl": CommandSpec(2),
    "sadd": CommandSpec(3, writes=True),
    "scan": CommandSpec(2),
    "script|load": CommandSpec(3),
    "select": CommandSpec(2),
    "set": CommandSpec(3, writes=True),
    "setbit": CommandSpec(4, writes=True),
    "setrange": CommandSpec(4, writes=True),
    "sismember": CommandSpec(3),
    "strlen": CommandSpec(2),
    "time": CommandSpec(1),
    "unlink": CommandSpec(2, writes=True),
    "wait": CommandSpec(3),
    "waitaof": CommandSpec(4),
    "xack": CommandSpec(4, writes=True),
    "xadd": CommandSpec(5, writes=True),
    "xclaim": CommandSpec(6, writes=True),
    "xdel": CommandSpec(3, writes=True),
    "xgroup|create": CommandSpec(5, writes=True),
    "xgroup|delconsumer": CommandSpec(5, writes=True),
    "xgroup|destroy": CommandSpec(4, writes=True),
    "xgroup|setid": CommandSpec(5, writes=True),
    "xinfo|consumers": CommandSpec(4),
    "xinfo|groups": CommandSpec(3),
    "xinfo|stream": CommandSpec(3),
    "xlen": CommandSpec(2),
    "xpending": CommandSpec(3),
    "xrange": CommandSpec(4),
    "xread": CommandSpec(4),
    "xreadgroup": CommandSpec(7, writes=True),
    "xrevrange": CommandSpec(4),
    "xsetid": CommandSpec(3, writes=True),
    "xtrim": CommandSpec(4, writes=True),
    "zadd": CommandSpec(4, writes=True),
    "zcard": CommandSpec(2),
    "zcount": CommandSpec(4),
    "zlexcount": CommandSpec(4),
    "zmscore": CommandSpec(3),
    "zrange": CommandSpec(4),
    "zrangebylex": CommandSpec(4),
    "zrangebyscore": CommandSpec(4),
    "zrem": CommandSpec(3, writes=True),
    "zscore": CommandSpec(3),
}
KEYLESS: Final = frozenset(
    {"acl|dryrun", "acl|whoami", "bgrewriteaof", "cluster|info", "cluster|slots", "config|get", "exec", "info", "multi"}
    | {"ping", "scan", "script|load", "select", "time", "wait", "waitaof"}
)
"""Commands without a key; SCAN shows all key names."""
_NO_KEY_YET: Final = {"xread": ("STREAMS",), "xreadgroup": ("GROUP", "g", "c", "STREAMS"), "eval": ("x", "1"),
                      "evalsha": ("x", "1")}  # fmt: skip


def example(command: str, key: str = "") -> Sequence[str]:
    """Return a call for ACL DRYRUN, which never runs it."""
    words = [*command.split("|"), *_NO_KEY_YET.get(command, ()), *([key] if command not in KEYLESS else [])]
    least = COMMANDS[command].min_words
    return [*words, *("1" for _ in range(least - len(words)))]
