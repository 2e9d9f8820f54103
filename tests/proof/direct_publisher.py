"""A thread that publishes without an outbox, and the messages of it that a node holds."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final, Self

import redis

from mqlayer import Producer
from mqlayer.domain.message import Identity
from mqlayer.errors import AcknowledgedLoss, PublishError
from mqlayer.settings import Settings
from tests.fixtures.power import PoweredRedis
from tests.fixtures.wait import wait_until
from tests.proof.streams import read_partition

DIRECT: Final = "direct"
KEYS: Final = [f"key-{number}" for number in range(20)]


class DirectPublisher:
    """A thread that publishes without an outbox, and keeps the answers."""

    def __init__(self, settings: Settings) -> None:
        self._producer, self._stopping = Producer(settings, name="direct"), threading.Event()
        self.stored: set[Identity] = set()
        self.told_lost: set[Identity] = set()
        self.counted_lost = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and publish once more to every LP that was used: a loss is told by the next publish there."""
        self._stopping.set()
        self._thread.join()
        if error is None:
            for key in KEYS:
                self._publish(key)
        self._producer.close()
        self.counted_lost = self._producer.stats.lost

    def wait_for_more(self) -> None:
        """Wait until it was told that some more messages are stored."""
        wanted = len(self.stored) + 10
        wait_until(lambda: len(self.stored) >= wanted, timeout_s=60, what="direct publishing")

    def _run(self) -> None:
        turn = 0
        while not self._stopping.wait(0.002):
            turn += 1
            self._publish(KEYS[turn % len(KEYS)])

    def _publish(self, key: str) -> None:
        try:
            identity = self._producer.send(DIRECT, key=key, body=b"direct", timeout_s=30).identity
        except AcknowledgedLoss as loss:
            # Perhaps of a source before the one that is in force there by now.
            for one in loss.losses:
                self.told_lost.update(Identity(one.source, one.lp, seq) for seq in range(one.first, one.last + 1))
            return
        except PublishError:
            return
        self.stored.add(identity)


def stored_on(node: PoweredRedis, prefix: str, partitions: list[int]) -> set[Identity]:
    """Return the direct producer's messages that a node holds."""
    client = redis.Redis.from_url(node.url)
    return {
        Identity(record.source, record.lp, record.seq)
        for partition in partitions
        for record in read_partition(client, prefix, partition, DIRECT)
    }
