"""A direct producer killed at every place between two writes leaves dense chains, and all that it acknowledged."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.failpoint_names import failpoint_names
from tests.proof.manual_change import set_meta
from tests.proof.world import World

FAILPOINTS = sorted(name for name in failpoint_names() if name.startswith("producer."))
OFTEN = {"producer.before_append", "producer.after_send", "producer.after_reply"}
PLACES = [(name, nth) for name in FAILPOINTS for nth in ((1, 2, 40) if name in OFTEN else (1,))]


@pytest.mark.parametrize(("name", "nth"), some_of(PLACES, 4))
def test_a_producer_killed_at_any_failpoint_leaves_whole_chains(
    world: World, tmp_path: Path, name: str, nth: int
) -> None:
    count = 300 if name == "producer.before_source_close" else 1_000_000
    acknowledged = tmp_path / "acknowledged"
    with acknowledged.open("wb") as output:
        process = start_python(
            "tests.proof.publisher",
            str(count),
            stdout=output,
            env={
                **os.environ,
                "MQLAYER_DSN": world.dsn,
                "MQLAYER_KEY_PREFIX": world.key_prefix,
                **armed(f"{name}=kill@{nth}"),
            },
        )
    try:
        wait_until(lambda: _reach(world, name, process), timeout_s=60, what=f"{name} to be reached")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL

    for _, partition, _ in world.partitions():
        set_meta(world, partition, state="open")
    stored = world.by_key()
    for line in acknowledged.read_text().splitlines():
        key, number = line.split()
        assert number in stored[key]
    for values in stored.values():
        numbers = [int(value) for value in values]
        assert numbers == sorted(set(numbers))
    with world.producer() as successor:
        assert successor.send("orders", key="k0", body=b"1000000").identity.seq == 1
    assert world.by_key()["k0"][-1] == "1000000"


def _reach(world: World, name: str, process: Process) -> bool:
    """Make the process come to the place, unless it does by itself; return whether it died there."""
    if process.poll() is not None:
        return True
    if name == "producer.before_reroute" and world.records():
        for _, partition, _ in world.partitions():
            set_meta(world, partition, state="sealed")
    if name == "producer.after_renewal":
        _lose_marks(world)
    return False


def _lose_marks(world: World) -> None:
    """Have the node forget that it has the newest messages, as after a fall-back."""
    with world.client() as client:
        for _, partition, _ in world.partitions():
            marks: Any = client.hgetall(world.keys(partition).marks)
            if marks:
                client.hset(world.keys(partition).marks, mapping=dict.fromkeys(marks, 0))
