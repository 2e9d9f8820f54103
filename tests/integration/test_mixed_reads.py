"""Case 62: one read that holds everything a handler is not given, in every way to consume.

Matching and other messages, tags with the hash of a wanted one, void records, and the command record of a split lie
mixed in one partition before its group begins. Nothing there expires by age: a void record is the only record whose
message is gone (see docs/how-to/publish.md).
"""

from __future__ import annotations

from typing import Final, Literal

import pytest

from mqlayer import Batch, BatchOf, Context
from mqlayer.domain.message import encode_facts, void_facts
from mqlayer.domain.routing import lp_of
from mqlayer.domain.tags import tags_text
from mqlayer.groups.group import find_group
from mqlayer.inspect import group_statuses
from mqlayer.redis.partition_scripts import MessageRun, append_command
from mqlayer.runtime.route_cache import load_route
from mqlayer.topics import create_topic
from tests.fixtures.consumers import SOURCE, Stage
from tests.fixtures.shared_members import share
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_ranges import range_of
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of

WANTED, ALIKE, OTHER, VOID = "t26821", "t49091", "other", "void"
"""A wanted tag, one with its hash, one without; and no message at all."""
TOPIC: Final = "loose"
KEY: Final = b"k"
PATTERN: Final = (WANTED, OTHER, ALIKE, VOID, WANTED, VOID, VOID, OTHER, WANTED, ALIKE)
TURNS: Final = 30
"""How many times the pattern lies in the parent: less than one read takes."""
PATIENT_S: Final = 20.0
Way = Literal["single", "batch", "shared", "best effort"]
WAYS: Final[tuple[Way, ...]] = ("single", "batch", "shared", "best effort")


class Mixed:
    """A topic of one partition, and what was appended to it."""

    def __init__(self, stage: Stage, way: Way) -> None:
        # Void records come about in topics of this strategy.
        strategy: Literal["strict", "best_effort"] = "best_effort" if way == "best effort" else "strict"
        self._stage, self._numbers, self._void = stage, 0, way == "best effort"
        stage.topic = TOPIC
        stage.route = create_topic(
            runtime_of(stage.database, stage.prefix, application=stage.database), TOPIC, partitions=1, strategy=strategy
        )
        stage.partitions = [line.partition for line in stage.route.ranges]
        self.wanted: list[bytes] = []

    def append(self, kinds: tuple[str, ...]) -> None:
        """Append a record of each kind."""
        fields: list[bytes] = []
        first = self._numbers + 1
        for kind in kinds:
            self._numbers += 1
            body = b"%d" % self._numbers
            if kind == VOID and self._void:
                fields += (void_facts(encode_facts(1, None), "no key"), b"\xff", b"")
                continue
            fields += (encode_facts(1, None, tags_text(() if kind == VOID else (kind,))), KEY, body)
            if kind == WANTED:
                self.wanted.append(body)
        lp = lp_of(KEY)
        with self._stage.connection() as connection:
            partition = range_of(self._stage.route, lp).partition
            run = MessageRun(lp, first, len(kinds), fields)
            (reply,) = connection.call([append_command(connection, self._stage.prefix, partition, SOURCE, [run])])
        assert reply[0] == b"ok", reply

    def split(self) -> None:
        """Split the partition, and send to its successors from here on."""
        split(
            runtime_of(self._stage.database, self._stage.prefix, application=self._stage.database),
            TOPIC,
            self._stage.partitions[0],
        )
        self._stage.route = load_route(self._stage.database, TOPIC)

    def lag(self) -> int:
        (status,) = group_statuses(runtime_of(self._stage.database, self._stage.prefix), TOPIC, "g")
        assert status.lag is not None
        return status.lag


def consume(stage: Stage, way: Way) -> list[bytes]:
    """Start a member in this way; return where it notes what its handler is given."""
    bodies: list[bytes] = []
    wanted = f"any:{WANTED}"
    # A message without a settlement in time is given again.
    settings = stage.settings(lease_s=PATIENT_S)

    def one(body: bytes, _ctx: Context) -> None:
        bodies.append(body)

    def several(messages: Batch[bytes]) -> None:
        bodies.extend(message.value for message in messages)

    if way == "shared":
        share(stage, one, tag_filter=wanted, visibility_timeout_s=PATIENT_S)
    elif way == "batch":
        stage.consume(several, tag_filter=wanted, batch=BatchOf("key", limit=7), settings=settings)
    else:
        stage.consume(one, tag_filter=wanted, settings=settings)
    return bodies


@pytest.mark.parametrize("way", some_of(WAYS, 4))
def test_one_read_with_all_that_a_handler_is_not_given_is_settled_whole(stage: Stage, way: Way) -> None:
    """Case 62: the bitmap has no gap, so that the parent is drained, and what its successors hold is handled."""
    mixed = Mixed(stage, way)
    mixed.append(PATTERN * TURNS)
    mixed.split()
    mixed.append(PATTERN)
    bodies = consume(stage, way)
    wait_until(lambda: len(bodies) >= len(mixed.wanted), timeout_s=20, what="what is wanted is handled")
    wait_until(lambda: mixed.lag() == 0, timeout_s=20, what="nothing is left unsettled")
    wait_until(lambda: find_group(stage.database, TOPIC, "g").version == 2, what="the parent counts as drained")
    assert (bodies if way != "shared" else sorted(bodies, key=int)) == mixed.wanted
    left = [stage.redis.exists(stage.group_keys(partition).acks) for partition in stage.partitions]
    assert not any(left), "a bitmap is left, though all is settled"


@pytest.mark.parametrize("way", some_of(WAYS, 2))
def test_a_run_of_nothing_that_is_wanted_moves_the_group_to_its_end(stage: Stage, way: Way) -> None:
    """Case 62: mismatches, collisions and void records only, up to the command record, and behind it."""
    mixed = Mixed(stage, way)
    mixed.append((OTHER, ALIKE, VOID, VOID, ALIKE, OTHER) * 50)
    mixed.split()
    mixed.append((VOID, ALIKE, OTHER))
    bodies = consume(stage, way)
    wait_until(lambda: find_group(stage.database, TOPIC, "g").version == 2, timeout_s=20, what="the parent is drained")
    wait_until(lambda: mixed.lag() == 0, timeout_s=20, what="nothing is left unsettled")
    mixed.append((WANTED,))
    wait_until(lambda: bodies == mixed.wanted, what="what is wanted then is handled")
