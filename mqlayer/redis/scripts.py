"""Script texts per server version.

6.2 knows no ``#!lua`` header: there, scripts replicate effects, to read the time first, and ``allow-oom`` ones begin
with a write without memory: only the first is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha1

from mqlayer.resources import lua_names, lua_source

HEADERS_SINCE = (7, 0, 0)


def script_text(name: str, version: tuple[int, int, int]) -> str:
    """Return a script's text for a server version."""
    source = lua_source(name)
    if version >= HEADERS_SINCE:
        return source
    header, body = source.split("\n", 1)
    prelude = "redis.replicate_commands()"
    if "allow-oom" in header:
        prelude += " redis.call('PERSIST', KEYS[1])"
    return f"{prelude}\n{body}"


@cache
def _texts(*, headers: bool) -> Mapping[str, str]:
    version = HEADERS_SINCE if headers else (6, 2, 0)
    return {name: script_text(name, version) for name in lua_names()}


@cache
def _digests(*, headers: bool) -> Mapping[str, bytes]:
    return {
        name: sha1(text.encode(), usedforsecurity=False).hexdigest().encode()
        for name, text in _texts(headers=headers).items()
    }


def script_texts(version: tuple[int, int, int]) -> Mapping[str, str]:
    """Return all scripts' texts."""
    return _texts(headers=version >= HEADERS_SINCE)


def script_digests(version: tuple[int, int, int]) -> Mapping[str, bytes]:
    """Return all scripts' SHA-1 digests."""
    return _digests(headers=version >= HEADERS_SINCE)
