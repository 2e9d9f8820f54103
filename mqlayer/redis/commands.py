"""The commands of Redis that this code and its scripts use: how many words each takes, and whether it writes.

`COMMANDS` is held against what servers say of themselves by a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class Known(NamedTuple):
    """A command: the least number of words, its name included, and whether it counts as writing."""

    words: int
    writes: bool = False


COMMANDS: Final[dict[str, Known]] = {
    "acl|dryrun": Known(4),
    "acl|whoami": Known(2),
    "bgrewriteaof": Known(1),
    "bitcount": Known(2),
    "bitpos": Known(3),
    "config|get": Known(3),
    "del": Known(2, writes=True),
    "eval": Known(3),
    "evalsha": Known(3),
    "exec": Known(1),
    "exists": Known(2),
    "get": Known(2),
    "getbit": Known(3),
    "getrange": Known(4),
    "hdel": Known(3, writes=True),
    "hget": Known(3),
    "hgetall": Known(2),
    "hincrby": Known(4, writes=True),
    "hlen": Known(2),
    "hmget": Known(3),
    "hset": Known(4, writes=True),
    "hsetnx": Known(4, writes=True),
    "info": Known(1),
    "memory|usage": Known(3),
    "multi": Known(1),
    "persist": Known(2, writes=True),
    "pexpire": Known(3, writes=True),
    "ping": Known(1),
    "pttl": Known(2),
    "sadd": Known(3, writes=True),
    "scan": Known(2),
    "script|load": Known(3),
    "select": Known(2),
    "set": Known(3, writes=True),
    "setbit": Known(4, writes=True),
    "setrange": Known(4, writes=True),
    "sismember": Known(3),
    "strlen": Known(2),
    "time": Known(1),
    "unlink": Known(2, writes=True),
    "wait": Known(3),
    "xack": Known(4, writes=True),
    "xadd": Known(5, writes=True),
    "xclaim": Known(6, writes=True),
    "xdel": Known(3, writes=True),
    "xgroup|create": Known(5, writes=True),
    "xgroup|delconsumer": Known(5, writes=True),
    "xgroup|destroy": Known(4, writes=True),
    "xinfo|consumers": Known(4),
    "xinfo|groups": Known(3),
    "xinfo|stream": Known(3),
    "xlen": Known(2),
    "xpending": Known(3),
    "xrange": Known(4),
    "xread": Known(4),
    "xreadgroup": Known(7, writes=True),
    "xrevrange": Known(4),
    "xsetid": Known(3, writes=True),
    "xtrim": Known(4, writes=True),
    "zadd": Known(4, writes=True),
    "zcard": Known(2),
    "zrange": Known(4),
    "zrangebylex": Known(4),
    "zrangebyscore": Known(4),
    "zrem": Known(3, writes=True),
    "zscore": Known(3),
}
KEYLESS: Final = frozenset(
    {"acl|dryrun", "acl|whoami", "bgrewriteaof", "config|get", "exec", "info", "multi", "ping", "scan", "script|load"}
    | {"select", "time", "wait"}
)
"""Commands that name no key; SCAN shows names of keys to whoever may call it."""
_NO_KEY_YET: Final = {"xread": ("STREAMS",), "xreadgroup": ("GROUP", "g", "c", "STREAMS"), "eval": ("x", "1"),
                      "evalsha": ("x", "1")}  # fmt: skip
"""What stands between these commands and their key."""


def example(command: str, key: str = "") -> Sequence[str]:
    """Return a call of a command on a key, as ACL DRYRUN takes it: it is judged, never run."""
    words = [*command.split("|"), *_NO_KEY_YET.get(command, ()), *([key] if command not in KEYLESS else [])]
    least = COMMANDS[command].words
    return [*words, *("1" for _ in range(least - len(words)))]
