"""A consumer that is stopped past its lease and wakes up."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Any

from mqlayer.redis.keys import group_keys, partition_keys
from tests.fixtures.forked_programs import is_stopped
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.kill_scenes import HANDLERS, PARTITIONS, KillScene, judge
from tests.fixtures.wait import wait_until
from tests.proof.history import Deliver, read_histories


class ZombieWitness:
    """Looks at what the servers hold."""

    def __init__(self, scene: KillScene) -> None:
        self._scene, self._prefix, self._group_id = scene, scene.settings.key_prefix, scene.group_id()

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        return ask_postgres(self._scene.settings.control_dsn(), statement)

    def picture(self) -> object:
        """All that the zombie must not change."""
        node, kept = self._scene.node, []
        for partition in PARTITIONS:
            keys = group_keys(self._prefix, partition, self._group_id)
            log = partition_keys(self._prefix, partition).log.decode()
            kept.append([node.xrange(log), node.get(keys.acks), node.hgetall(keys.attempts.decode())])
        return self._scene.positions(), kept, self.rows("SELECT * FROM sink ORDER BY position")

    def shares(self) -> list[int]:
        """How many partitions each live member owns."""
        return sorted(Counter(row[0] for row in self.rows("SELECT member_id FROM mqlayer.assignment")).values())


OTHER_WORKERS = HANDLERS - 1
"""Of a stopped consumer: each may stand between the look at its lease and the line that it begins."""


def wake_a_zombie(scene: KillScene, place: str, *, in_hand: int = OTHER_WORKERS) -> None:
    """Stop a consumer at a place, have another one go on, and see that the first one changes nothing when it wakes.

    `in_hand`: how many messages or batches its workers may have begun: what these do is refused.
    """
    name, _, occurrence = place.partition("@")
    # An effect's transaction that its process has left alone ends after this, in place of a minute.
    scene.environment["PGOPTIONS"] = "-c idle_in_transaction_session_timeout=1500"
    scene.publish()
    zombie = scene.start("zombie", f"{name}=stop@{occurrence or 1}")
    wait_until(lambda: is_stopped(zombie), timeout_s=40, what="stopped at the place")
    heir = scene.start("heir")
    scene.wait_until_drained()
    witness = ZombieWitness(scene)
    wait_until(scene.settled, timeout_s=20, what="all is settled")
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
