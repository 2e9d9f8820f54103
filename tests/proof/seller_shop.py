"""Consumers of a kill scene that fail and die as a test says, and where each message is then."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.chaos.actors import DEADLY, put_faults
from tests.fixtures.due_keys import try_now
from tests.fixtures.forked_programs import Process
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.kill_scenes import KillScene
from tests.fixtures.wait import wait_until
from tests.proof.history import Deliver, read_histories

DEATHS: Final = 12
"""More than it takes to find out which message it is."""
PLACES: Final = ("parked_message", "dead_message", "sink")


class SellerShop:
    """What a test does to consumers of a scene, and sees of what they leave."""

    def __init__(self, scene: KillScene, **rules: Any) -> None:
        self.scene = scene
        scene.environment |= {"MQLAYER_TEST_RULES": json.dumps(rules), "MQLAYER_TEST_MEMBER": "seller"}

    def start(self, name: str, failpoints: str = "") -> Process:
        """Start a consumer; it has the id of the one before, so that nobody waits for a lease."""
        return self.scene.start(name, failpoints, role="seller")

    def killed(self, failpoint: str) -> None:
        """Start a consumer, and see it killed at its place."""
        assert self.start(f"killed-{failpoint}", failpoint).wait(40) == -9, "the place was not reached"

    def killed_trying(self, failpoint: str) -> None:
        """The same, while parked keys are tried again and again: deaths may be counted against what was in hand."""
        process = self.start(f"killed-{failpoint}", failpoint)
        wait_until(
            lambda: self.trying(lambda: process.poll() is not None), timeout_s=40, what=f"{failpoint} is reached"
        )
        assert process.wait() == -9

    def fail(self, **faults: Any) -> None:
        """Have these faults from now on."""
        put_faults(self.scene.directory, **faults)

    def rows(self, statement: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Return what Postgres answers."""
        return ask_postgres(self.scene.settings.control_dsn(), statement, arguments)

    def trying(self, done: Callable[[], bool]) -> bool:
        """Have all parked keys tried now; return what is asked."""
        self.try_now()
        return done()

    def try_now(self, *, keep_attempts: bool = False) -> None:
        """Have all parked keys tried now: as an operator releases them, or earlier than they are due."""
        try_now(self.scene.database, self.scene.group_id(), keep_attempts=keep_attempts)

    def counts(self) -> dict[str, int]:
        """Return how many messages are parked, dead and handled, which costs less than to look at each."""
        [found] = self.rows(
            "SELECT (SELECT count(*) FROM mqlayer.parked_message), (SELECT count(*) FROM mqlayer.dead_message), "
            "(SELECT count(*) FROM sink)"
        )
        return dict(zip(PLACES, found, strict=True))

    def places(self) -> dict[str, int]:
        """Return how many messages are parked, dead and handled; fails if one is in two places."""
        # One statement: a message may go from one place to another between two.
        found = self.rows(
            "SELECT 'parked_message', source, lp, seq FROM mqlayer.parked_message"
            " UNION ALL SELECT 'dead_message', source, lp, seq FROM mqlayer.dead_message"
            " UNION ALL SELECT 'sink', source, lp, seq FROM sink"
        )
        assert len(found) == len({row[1:] for row in found})
        return {place: sum(row[0] == place for row in found) for place in PLACES}

    def in_place(self, **counts: int) -> bool:
        """Say whether all is settled, and so many messages are in each place."""
        expected = dict.fromkeys(PLACES, 0) | counts
        assert sum(expected.values()) == self.scene.published
        assert self.counts() == expected
        assert self.places() == expected
        return self.scene.settled()

    def wait_places(self, **counts: int) -> None:
        """Wait until all is settled, and so many messages are in each place."""
        wait_until(lambda: self.in_place(**counts), timeout_s=40, what="each message in its place")

    def wait_unparked(self) -> None:
        """Wait until no key is parked."""
        wait_until(lambda: not self.rows("SELECT lp FROM mqlayer.parked_key"), timeout_s=20, what="no key parked")

    def stop(self, process: Process) -> None:
        """Have a consumer end in order."""
        process.terminate()
        assert process.wait(40) == 0


def restart_until(shop: SellerShop, done: Callable[[], bool]) -> int:
    """Start a consumer again and again, as whoever runs it does; return how often it died of a message."""
    for deaths in range(DEATHS):
        process = shop.start(f"run-{deaths}")
        wait_until(lambda: process.poll() is not None or done(), timeout_s=40, what="dead, or done")  # noqa: B023
        if process.poll() is None:
            return deaths
        assert process.wait() == DEADLY
    pytest.fail(f"it still dies after {DEATHS} starts: {shop.places()}")


def attempts_of(scene: KillScene, *but: str) -> set[int]:
    """Return which attempts there were of all messages but these."""
    events = [record.event for record in read_histories(scene.directory)]
    return {event.attempt for event in events if isinstance(event, Deliver) and event.value not in but}
