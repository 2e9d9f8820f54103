"""Rounds of messages: three of each of twelve keys, named by a tag, and what of them has to be seen."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Final

from tests.fixtures.wait import wait_until
from tests.proof.world import World

KEYS: Final = 12
ROUND: Final = 3 * KEYS

Seen = dict[str, list[str]]
"""Bodies by key, in the order in which they were handled."""


def publish(world: World, tag: str) -> None:
    """Publish three messages of each key, and see them in the partitions."""
    world.publish(ROUND, keys=KEYS, tag=tag)
    world.wait_until_whole()


def of_tags(*tags: str) -> Seen:
    """Return what has to be seen of these rounds."""
    return {
        f"key-{key}": [f"{tag}-{number}" for tag in tags for number in range(key, ROUND, KEYS)] for key in range(KEYS)
    }


def a_moment_between() -> datetime:
    """Return a time that is later than all that was published, and earlier than all that will be."""
    before = time.time()
    wait_until(lambda: time.time() > before + 0.005, what="a later millisecond")
    at = datetime.now(UTC)
    wait_until(lambda: datetime.now(UTC) > at + timedelta(milliseconds=5), what="a later millisecond")
    return at
