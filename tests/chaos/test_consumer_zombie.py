"""Cases 34 and 35: a consumer stopped past its lease, at each place between two writes, wakes up and changes nothing.

Neither in Redis nor in the read model behind the fence; and it starts no later message of any key.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.fixtures.kill_scenes import KillScene
from tests.fixtures.variants import some_of
from tests.proof.zombies import wake_a_zombie

PLACES: Final = [
    "member.before_join_commit", "acquire.after_send", "read.after_reply@2",
    "handler.after_success@40", "handler.after_failure@3", "fence.before@40", "fence.after@40",
    "ack.before_send@2", "ack.after_send@2",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("place", some_of(PLACES, 5))
def test_a_consumer_stopped_past_its_lease_wakes_up_and_changes_nothing(kill_scene: KillScene, place: str) -> None:
    wake_a_zombie(kill_scene, place)
