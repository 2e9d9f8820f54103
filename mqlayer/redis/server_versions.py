"""Products and versions that INFO shows, and their faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Product = Literal["redis", "valkey"]
ServerVersion = tuple[int, int, int]

WAITAOF_SINCE: Final = (7, 2, 0)
"""Redis, or the one that a Valkey matches."""
EARLY_WAITAOF: Final[Mapping[Product, tuple[ServerVersion, ServerVersion | None]]] = {
    "redis": ((7, 4, 0), (7, 4, 3)),
    "valkey": ((8, 0, 0), None),
}
"""From, fixed in: WAITAOF confirms before the fsync under everysec (redis#12622, #13793; measured on Valkey 9.1.2)."""


def product_of(info: Mapping[str, str]) -> tuple[Product, ServerVersion]:
    """Return a server's product and its version."""
    own = info.get("valkey_version")
    return ("valkey", version_of(own)) if own else ("redis", version_of(info.get("redis_version", "")))


def version_of(text: str) -> ServerVersion:
    """Return three numbers; missing ones are 0."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.strip().split(".")[:3]]
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch


def waitaof_is_early(product: Product, version: ServerVersion) -> bool:
    """Whether only `appendfsync always` makes class `disk` true."""
    since, fixed = EARLY_WAITAOF[product]
    return version >= since and (fixed is None or version < fixed)
