"""Cases 34 and 35: a consumer stopped past its lease, at each place between two writes, wakes up and changes nothing.

Neither in Redis nor in the read model behind the fence; and it starts no later message of any key.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Any, Final

import pytest
import redis

from mqlayer.groups.group import find_group
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import group_keys, partition_keys
from tests.chaos.actors import GROUP, TOPIC
from tests.chaos.test_consumer_kills import Scene, judge, scene
from tests.fixtures.forked_programs import is_stopped
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.wait import wait_until
from tests.proof.history import Deliver, read_histories

__all__ = ["scene"]

PLACES: Final = [
    "member.before_join_commit", "acquire.after_send", "read.after_reply@2",
    "handler.after_success@40", "handler.after_failure@3", "fence.before@40", "fence.after@40",
    "ack.before_send@2", "ack.after_send@2",
]  # fmt: skip
PARTITIONS: Final = (1, 2, 3, 4)


class Witness:
    """Looks at what the servers hold."""

    def __init__(self, scene: Scene, redis_url: str) -> None:
        self._client: redis.Redis = redis.Redis.from_url(redis_url)
        self._prefix, self._dsn = scene.settings.key_prefix, scene.settings.control_dsn()
        with Database(self._dsn) as database:
            self._group_id = find_group(database, TOPIC, GROUP).group_id

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        return ask_postgres(self._dsn, statement)

    def positions(self) -> list[tuple[int, int]]:
        """Committed and next offset of each partition."""
        found = []
        for partition in PARTITIONS:
            committed = self._client.hget(
                group_keys(self._prefix, partition, self._group_id).lock.decode(), "committed"
            )
            next_offset = self._client.hget(partition_keys(self._prefix, partition).meta.decode(), "next")
            found.append((int(committed or 0), int(next_offset or 0)))
        return found

    def picture(self) -> object:
        """All that the zombie must not change."""
        kept = []
        for partition in PARTITIONS:
            keys = group_keys(self._prefix, partition, self._group_id)
            log = partition_keys(self._prefix, partition).log.decode()
            kept.append(
                [self._client.xrange(log), self._client.get(keys.acks), self._client.hgetall(keys.attempts.decode())]
            )
        return self.positions(), kept, self.rows("SELECT * FROM sink ORDER BY position")

    def shares(self) -> list[int]:
        """How many partitions each live member owns."""
        return sorted(Counter(row[0] for row in self.rows("SELECT member_id FROM mqlayer.assignment")).values())


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_consumer_stopped_past_its_lease_wakes_up_and_changes_nothing(
    scene: Scene,
    redis_url: str,
    place: str,
) -> None:
    wake_a_zombie(scene, redis_url, place)


OTHER_WORKERS = 5
"""Of a stopped consumer: each may stand between the look at its lease and the line that it begins."""


def wake_a_zombie(scene: Scene, redis_url: str, place: str, *, in_hand: int = OTHER_WORKERS) -> None:
    """Stop a consumer at a place, have another one go on, and see that the first one changes nothing when it wakes.

    `in_hand`: how many messages or batches its workers may have begun: what these do is refused.
    """
    name, _, occurrence = place.partition("@")
    # An effect's transaction that its process has left alone ends after this, in place of a minute.
    scene._environment["PGOPTIONS"] = "-c idle_in_transaction_session_timeout=1500"
    scene.publish()
    zombie = scene.start("zombie", f"{name}=stop@{occurrence or 1}")
    wait_until(lambda: is_stopped(zombie), timeout_s=40, what="stopped at the place")
    heir = scene.start("heir")
    scene.wait_until_drained()
    witness = Witness(scene, redis_url)
    wait_until(lambda: all(c == n for c, n in witness.positions()), timeout_s=20, what="all is settled")
    wait_until(lambda: witness.shares() == [4], timeout_s=20, what="the heir has everything")
    before, highest = witness.picture(), max(row[0] for row in witness.rows("SELECT epoch FROM mqlayer.assignment"))

    woken_ns = time.monotonic_ns()
    zombie.send_signal(signal.SIGCONT)
    wait_until(lambda: witness.shares() == [2, 2], timeout_s=40, what="it is a member again, under new epochs")
    assert witness.picture() == before
    for process in (zombie, heir):
        process.terminate()
        assert process.wait(40) == 0
    assert witness.picture() == before

    started_late = [
        record.event
        for record in read_histories(scene.directory)
        if record.process.startswith("zombie")
        and record.phase == "invoke"
        and record.at_ns > woken_ns
        and isinstance(record.event, Deliver)
        and record.event.epoch <= highest
    ]
    assert len(started_late) <= in_hand, started_late
    judge(scene)
