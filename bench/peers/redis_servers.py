"""The Redis that several systems share: the bench's own, which syncs its file before it answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from bench.peers.peer import PeerServers

if TYPE_CHECKING:
    from bench.peers.ground import Ground

STORED_IN_REDIS: Final = "in the synced append-only file of one Redis"
PERSISTENCE: Final = "https://redis.io/docs/latest/operate/oss_and_stack/management/persistence/"


@contextmanager
def one_redis(ground: Ground) -> Iterator[PeerServers]:
    """Lend an empty Redis."""
    server = ground.emptied_redis()
    yield PeerServers(server.url, ground.pids(server), ground.redis_version())
