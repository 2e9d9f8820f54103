"""Cases 59, 64, 65, 67: consumers killed at each step of parking, resuming and dead-lettering, and by a message itself.

Whatever step it was: each message is in exactly one place afterwards (unsettled in its stream, parked, dead, or
handled), no key is reversed, each fenced effect is there once, and each message that left has its reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import pytest
import redis

from mqlayer.domain.routing import lp_of
from mqlayer.groups.group import find_group
from mqlayer.postgres.database import Database
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.runtime.route_cache import load_route
from mqlayer.topics import list_nodes
from tests.chaos.actors import DEADLY, GROUP, TOPIC, put_faults
from tests.chaos.test_consumer_kills import COUNT, KEYS, Scene, judge, scene
from tests.fixtures.due_keys import try_now
from tests.fixtures.forked_programs import Process
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.wait import wait_until
from tests.proof.history import Deliver, read_histories
from tests.proof.route_ranges import range_of
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of

__all__ = ["scene"]

BROKEN: Final = tuple(f"key-{number}" for number in range(1, 7))
OF_BROKEN: Final = len(BROKEN) * COUNT // KEYS
PARTITIONS: Final = (1, 2, 3, 4)
LATER_S: Final = 3600.0
LIMIT: Final = 5
"""How many messages of a key may be parked where that is limited."""
DEATHS: Final = 12
"""More than it takes to find out which message it is."""
PLACES: Final = ("parked_message", "dead_message", "sink")


class Shop:
    """What a test does to consumers of a scene, and sees of what they leave."""

    def __init__(self, scene: Scene, **rules: Any) -> None:
        self.scene = scene
        scene._environment |= {"MQLAYER_TEST_RULES": json.dumps(rules), "MQLAYER_TEST_MEMBER": "seller"}

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
        with Database(self.scene.settings.control_dsn()) as database:
            try_now(database, find_group(database, TOPIC, GROUP).group_id, keep_attempts=keep_attempts)

    def settled(self) -> bool:
        """Say whether everything in the streams is settled."""
        prefix = self.scene.settings.key_prefix
        with Database(self.scene.settings.control_dsn()) as database:
            group_id = find_group(database, TOPIC, GROUP).group_id
            [node] = list_nodes(database)
        with redis.Redis.from_url(node.url) as client:
            return all(
                client.hget(group_keys(prefix, partition, group_id).lock.decode(), "committed")
                == client.hget(partition_keys(prefix, partition).meta.decode(), "next")
                for partition in PARTITIONS
            )

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
        assert self.places() == expected
        return self.settled()

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


def test_kills_while_keys_are_parked(scene: Scene) -> None:
    """Cases 64, 65: the key and all that follows it is parked, and released later; nothing else waits for it."""
    shop = Shop(scene, policy="park", attempt_limit=2, backoff_s=[0.01])
    shop.fail(always=BROKEN)
    scene.publish()
    for failpoint in (
        "parking.before_commit=kill", "parking.after_commit=kill", "ack.after_send=kill@2",
        "parking.after_commit=kill@2", "ack.before_send=kill@3",
    ):  # fmt: skip
        shop.killed(failpoint)
    shop.start("last")
    shop.wait_places(parked_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    assert shop.rows("SELECT DISTINCT cause, due_at FROM mqlayer.parked_key") == [("exhausted", None)]
    shop.fail()
    shop.try_now()
    shop.wait_places(sink=COUNT)
    shop.wait_unparked()
    judge(scene)


@pytest.mark.slow
def test_kills_while_keys_are_resumed(scene: Scene) -> None:
    """Case 64: what is parked comes before what came meanwhile, whoever goes on with it."""
    shop = Shop(scene, policy="park", attempt_limit=2, backoff_s=[0.01])
    shop.fail(always=BROKEN)
    scene.publish()
    first = shop.start("first")
    shop.wait_places(parked_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    shop.stop(first)
    shop.fail()
    scene.publish()
    for failpoint in (
        "parking.before_commit=kill", "parking.after_commit=kill", "parking.before_resume=kill@2",
        "handler.after_success=kill@20", "parking.before_commit=kill@4", "parking.after_commit=kill@5",
        "parking.before_resume=kill@6",
    ):  # fmt: skip
        # Who died of chance in the middle of a key may be counted against it: here that is not the question.
        shop.try_now()
        shop.killed(failpoint)
    shop.try_now()
    shop.start("last")
    shop.wait_places(sink=2 * COUNT)
    shop.wait_unparked()
    judge(scene)


def test_kills_while_a_key_at_its_limit_holds_a_route_change_up(scene: Scene) -> None:
    """Cases 24, 64: its parent drains when there is room, whoever dies over it; no successor goes on before."""
    shop = Shop(scene, policy="park", attempt_limit=9, backoff_s=[LATER_S], key_messages_limit=LIMIT)
    shop.fail(always=["key-7"])
    scene.publish()
    of_key = COUNT // KEYS
    first = shop.start("first")
    wait_until(
        lambda: shop.places() == {"parked_message": LIMIT, "dead_message": 0, "sink": COUNT - of_key},
        timeout_s=40, what="the key is parked as far as there is room, the others are handled",
    )  # fmt: skip
    prefix = scene.settings.key_prefix
    with Database(scene.settings.control_dsn()) as database:
        parent = range_of(load_route(database, TOPIC), lp_of(b"key-7")).partition
        split(runtime_of(database, prefix), TOPIC, parent)
    first.kill()
    scene.publish()
    for failpoint in ("acquire.after_send=kill", "parking.before_commit=kill", "parking.after_commit=kill"):
        shop.killed(failpoint)
    shop.start("waiting")
    others = "SELECT count(*) FROM sink WHERE partition > 4 OR key = 'key-7'"
    elsewhere = "SELECT count(*) FROM sink WHERE value::int >= %s"
    wait_until(lambda: shop.rows(elsewhere, COUNT)[0][0] > 0, timeout_s=40, what="other partitions go on")
    assert shop.rows(others) == [(0,)]
    # Others may be blamed for a death, and wait.
    of_broken = "SELECT count(*) FROM mqlayer.parked_message WHERE key = 'key-7'"
    assert shop.rows(of_broken) == [(LIMIT,)]
    scene.running[-1].kill()
    shop.fail()
    for failpoint in (
        "parking.before_resume=kill", "handler.after_success=kill@2", "parking.after_commit=kill@2",
        "drained.before_commit=kill",
    ):  # fmt: skip
        shop.killed_trying(failpoint)
    shop.start("last")
    wait_until(
        lambda: shop.trying(lambda: shop.places()["sink"] == 2 * COUNT),
        timeout_s=40, what="every message has its effect",
    )  # fmt: skip
    shop.wait_unparked()
    judge(scene, partitions=6)


def test_a_consumer_that_died_by_chance_costs_a_parked_message_no_attempt(scene: Scene) -> None:
    """Case 59: it is to blame from the second death on; here its last attempt would have been that of a healthy one."""
    shop = Shop(scene, policy="dead_letter", attempt_limit=2, backoff_s=[LATER_S])
    shop.fail(always=BROKEN)
    scene.publish()
    first = shop.start("first")
    shop.wait_places(parked_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    shop.stop(first)
    shop.fail()
    shop.try_now(keep_attempts=True)
    shop.killed("parking.before_resume=kill@3")
    shop.start("last")
    shop.wait_places(sink=COUNT)
    judge(scene)


def test_kills_while_messages_are_dead_lettered(scene: Scene) -> None:
    """Case 67: a message that leaves is dead and settled, or neither; nobody handles it after that."""
    shop = Shop(scene, policy="dead_letter", attempt_limit=2, backoff_s=[0.01])
    shop.fail(always=BROKEN)
    scene.publish()
    for failpoint in ("parking.before_commit=kill", "parking.after_commit=kill", "ack.before_send=kill@5"):
        shop.killed(failpoint)
    shop.start("last")
    shop.wait_places(dead_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    judge(scene)


def test_kills_while_messages_are_dead_lettered_that_were_parked(scene: Scene) -> None:
    """Case 67: from parked to dead in one step, and its key goes on behind it."""
    shop = Shop(scene, policy="dead_letter", attempt_limit=3, backoff_s=[0.01, LATER_S])
    shop.fail(always=BROKEN)
    scene.publish()
    first = shop.start("first")
    shop.wait_places(parked_message=OF_BROKEN, sink=COUNT - OF_BROKEN)
    shop.stop(first)
    for failpoint in ("parking.before_commit=kill@6", "parking.after_commit=kill@6", "parking.before_resume=kill@8"):
        shop.try_now(keep_attempts=True)
        shop.killed(failpoint)
    shop.try_now(keep_attempts=True)
    shop.start("last")
    waiting = "SELECT count(*) FROM mqlayer.parked_key WHERE due_at > now() + interval '1 minute'"
    wait_until(
        lambda: shop.places()["dead_message"] >= len(BROKEN) and shop.rows(waiting) == [(len(BROKEN),)],
        timeout_s=40, what="each key's first message is dead, and its next one waits",
    )  # fmt: skip
    shop.fail()
    shop.try_now()
    shop.wait_unparked()
    dead = shop.places()["dead_message"]
    shop.wait_places(dead_message=dead, sink=COUNT - dead)
    judge(scene)


def restart_until(shop: Shop, done: Callable[[], bool]) -> int:
    """Start a consumer again and again, as whoever runs it does; return how often it died of a message."""
    for deaths in range(DEATHS):
        process = shop.start(f"run-{deaths}")
        wait_until(lambda: process.poll() is not None or done(), timeout_s=40, what="dead, or done")  # noqa: B023
        if process.poll() is None:
            return deaths
        assert process.wait() == DEADLY
    pytest.fail(f"it still dies after {DEATHS} starts: {shop.places()}")


def attempts_of(scene: Scene, *but: str) -> set[int]:
    """Return which attempts there were of all messages but these."""
    events = [record.event for record in read_histories(scene.directory)]
    return {event.attempt for event in events if isinstance(event, Deliver) and event.value not in but}


@pytest.mark.slow
@pytest.mark.parametrize(("in_loop", "limit"), [(False, 2), (True, 1)])
def test_a_message_that_kills_its_consumer_every_time_comes_to_its_end(scene: Scene, in_loop: bool, limit: int) -> None:
    """Cases 58, 59: nobody ever answers for it; its neighbours are handled, and no attempt of theirs is counted."""
    backoff: dict[str, Any] = {"backoff_s": [0.01]} if limit > 1 else {}
    shop = Shop(scene, policy="dead_letter", attempt_limit=limit, **backoff)
    if in_loop:
        scene._environment["MQLAYER_TEST_ASYNC"] = "1"
    shop.fail(deadly=["47"])
    scene.publish()
    deaths = restart_until(shop, lambda: shop.in_place(dead_message=1, sink=COUNT - 1))
    [(cause, attempts, reason)] = shop.rows("SELECT cause, attempts, reason FROM mqlayer.dead_message")
    assert (cause, attempts, reason) == ("exhausted", limit, "nobody answered")
    assert deaths >= 3 + limit
    assert attempts_of(scene, "47") == {1}
    judge(scene)


def test_a_message_that_kills_its_consumer_in_the_middle_of_a_parked_key_comes_to_its_end(scene: Scene) -> None:
    """Case 59: what is before it in its key's line has its effects once, what is behind it goes on."""
    shop = Shop(scene, policy="park", attempt_limit=1, backoff_s=[0.01])
    shop.fail(always=["key-7"])
    scene.publish()
    each = COUNT // KEYS
    first = shop.start("first")
    shop.wait_places(parked_message=each, sink=COUNT - each)
    shop.stop(first)
    shop.fail(deadly=[str(7 + 5 * KEYS)])
    shop.try_now()
    held = [("exhausted", 1, None)]
    restart_until(shop, lambda: shop.rows("SELECT cause, attempts, due_at FROM mqlayer.parked_key") == held)
    shop.wait_places(parked_message=each - 5, sink=COUNT - each + 5)
    assert shop.rows(
        "SELECT convert_from(body, 'UTF8') FROM mqlayer.parked_message ORDER BY position, seq LIMIT 1"
    ) == [(str(7 + 5 * KEYS),)]
    shop.fail()
    shop.try_now()
    shop.wait_places(sink=COUNT)
    judge(scene)
