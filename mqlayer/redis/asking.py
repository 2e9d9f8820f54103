"""What a Redis says of itself, asked without any demand on it: for those who judge it, not for those who use it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import redis

from mqlayer.domain.runs import run_of
from mqlayer.errors import InvalidInput
from mqlayer.redis.access import NodeAccess
from mqlayer.redis.addresses import Line, shown_url
from mqlayer.redis.denials import not_reached

ASKED_SETTINGS: Final = ("appendfsync", "no-appendfsync-on-rewrite", "aof-load-truncated", "min-replicas-to-write")
"""What INFO does not tell. Managed servers may forbid to ask."""


@dataclass(frozen=True, slots=True)
class ServerAnswers:
    """INFO as it is, settings as far as they may be asked, and how far the server's clock is ahead of ours."""

    info: dict[str, str]
    settings: dict[str, str]
    ahead_s: float
    round_trip_s: float

    @property
    def run_id(self) -> str:
        """The run that answered."""
        return run_of({"run_id": "", **self.info})

    @property
    def product(self) -> str:
        """`redis` or `valkey`."""
        return "valkey" if "valkey_version" in self.info else "redis"

    @property
    def version(self) -> tuple[int, int, int]:
        """The version of the product; a Valkey also names the Redis that it is compatible with."""
        shown = self.info.get("valkey_version") or self.info.get("redis_version", "")
        numbers = [int(part) if part.isdecimal() else 0 for part in shown.split(".")[:3]]
        major, minor, patch = [*numbers, 0, 0, 0][:3]
        return major, minor, patch

    def number(self, name: str) -> int:
        """Return a number of INFO, 0 where this version does not tell it."""
        text = self.info.get(name, "")
        return int(text) if text.isdecimal() else 0


def ask_server(url: str, *, timeout_s: float, node: str = "", access: NodeAccess | None = None) -> ServerAnswers:
    """Ask a Redis for what it says of itself; `node` is its name, `access` how to log in where it is none.

    Raises StoreUnavailable, InvalidInput for a URL that is none.
    """
    way = Line(url, connect_timeout_s=timeout_s, timeout_s=timeout_s, node=node, access=access)
    line = way.connection
    try:
        way.aim()
        line.connect()
        return _ask(line)
    except (redis.RedisError, OSError, InvalidInput) as error:
        raise not_reached(shown_url(url), error) from error
    finally:
        line.disconnect()


def _ask(line: Any) -> ServerAnswers:
    info = dict(part.split(":", 1) for part in _call(line, "INFO").decode().splitlines() if ":" in part)
    settings: dict[str, str] = {}
    for name in ASKED_SETTINGS:
        try:
            reply = _call(line, "CONFIG", "GET", name)
        except redis.ResponseError:
            continue
        if len(reply) == 2:
            settings[name] = reply[1].decode()
    sent, sent_at = time.monotonic(), time.time()
    seconds, micros = _call(line, "TIME")
    round_trip_s = time.monotonic() - sent
    ahead_s = int(seconds) + int(micros) / 1e6 - sent_at - round_trip_s / 2
    return ServerAnswers(info, settings, ahead_s, round_trip_s)


def _call(line: Any, *command: str) -> Any:
    line.send_command(*command, check_health=False)
    return line.read_response()
