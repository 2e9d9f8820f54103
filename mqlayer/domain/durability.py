"""Durability classes of topics: what a confirmed message survives (docs/design/durability.md)."""

from __future__ import annotations

from typing import Final, Literal, get_args

from mqlayer.errors import InvalidInput

Durability = Literal["node", "disk", "replica", "quorum"]
"""`node`: stored, as durable as the node's `appendfsync`; `disk`: synced there; `replica`: on one replica too;
`quorum`: on most of the node's servers."""

NODE: Final = "node"
DURABILITIES: Final[tuple[Durability, ...]] = get_args(Durability)
WAIT_MS: Final = 1_000
"""How long one try waits for replicas; a message waits for further tries."""
DISK_WAIT_MS: Final = 4_000
"""The same for a sync: `everysec` puts one off for two seconds while the disk is busy."""
REPLICAS_LIMIT: Final = 100


def check_durability(name: str) -> Durability:
    """Return a class by name. Raises InvalidInput."""
    for known in DURABILITIES:
        if known == name:
            return known
    raise InvalidInput(f"the durability of a topic is {', '.join(DURABILITIES)}, not {name!r}")


def replicas_wanted(durability: Durability, declared: int) -> int:
    """Return how many of `declared` replicas must have a message."""
    if durability == "replica":
        return 1
    # By the declared number: the connected one shrinks in a failure.
    return max(1, (declared + 1) // 2) if durability == "quorum" else 0
