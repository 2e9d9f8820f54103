"""Cases 34, 35, 59, 64, 65: some keys fail for ever, others half of the time, and nobody else notices.

First nothing fails: a quiet stretch, and one in which consumers are killed and stopped at random. Then 10 of 100 keys
(of 1,000 in the long form) always fail, 10 fail half of the time, at the same pace of faults, also at the places
between two writes of parking; an operator releases keys now and then, and two route changes happen. Then a quiet
stretch in which those keys still fail: all others have to be handled as in the first one. Then everything is let go
while the fault is still there: all that waits are messages of failing keys, parked, and the streams are settled. Then
the fault is repaired and the keys are released: every message has its effect, and the histories, the streams and the
sink are judged.

What the quiet stretches show is that the healthy keys keep up with what is published, less than consumers could do, and
that none of them waits for a failing one. How much of their throughput is left is measured by `bench failing_keys`.

The short form runs with the suite; `--long` (or MQLAYER_CHAOS_SECONDS) makes it last. MQLAYER_CHAOS_SEED repeats a
choice of faults, MQLAYER_CHAOS_REPORT names a file for the verdict as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
import redis
from pydantic import SecretStr

from mqlayer.errors import StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.redelivery import release_all
from mqlayer.routes import finish_changes
from mqlayer.runtime.route_cache import load_route
from mqlayer.settings import Settings
from mqlayer.stack import RedisServer
from tests.chaos.actors import GROUP, SINK, TOPIC, put_faults
from tests.chaos.harness.nemesis import end_backends
from tests.chaos.harness.play import LEASE_S, Play
from tests.chaos.harness.scene import Scene
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.checker import Verdict
from tests.proof.history import read_histories
from tests.proof.pace import pace
from tests.proof.route_steps import merge, split
from tests.proof.runtimes import runtime_of

CAST: Final = {"publisher": 2, "relay": 1, "seller": 3}
ASK_EVERY_S: Final = 0.2
ALWAYS: Final = tuple(f"key-{number}" for number in range(10))
HALF: Final = tuple(f"key-{number}" for number in range(10, 20))
RULES: Final = {"policy": "park", "attempt_limit": 6, "backoff_s": [0.05, 0.05, 12.0], "jitter": 0.2}
"""Parked from the third failure on, for 12 s; held from the sixth one on."""
SETTLING_S: Final = 300.0
BEHIND: Final = 200
"""How many messages may be on their way when consumers count as having caught up."""
LEAST_RATIO: Final = 0.7
"""What of the healthy keys has to be handled while others fail, for each message published, against before."""
QUIET: Final = 3
LONGER_S: Final = 10.0
"""How much longer the unluckiest healthy message may wait then."""
NOT_COME_TO: Final = """
SELECT upto.lp FROM unnest(%s::int[], %s::bigint[]) AS upto (lp, seq)
LEFT JOIN (SELECT lp, seq FROM sink UNION SELECT lp, seq FROM mqlayer.parked_message) AS there
    ON there.lp = upto.lp AND there.seq <= upto.seq
GROUP BY upto.lp, upto.seq HAVING count(there.seq) < upto.seq LIMIT 1
"""
PLACES: Final = (
    "parking.before_commit", "parking.after_commit", "parking.before_resume", "ack.after_send", "handler.after_failure",
)  # fmt: skip


class FailingScene(Scene):
    """What the stores say of one group whose keys fail."""

    groups = (GROUP,)

    def waiting(self) -> Counter[str]:
        """Return how many messages of each key are parked."""
        return Counter(
            dict(self.rows("SELECT convert_from(key, 'UTF8'), count(*) FROM mqlayer.parked_message GROUP BY 1"))
        )

    def release(self) -> int:
        """Have every parked key tried now that is not due, as an operator does; return how many."""
        return release_all(runtime_of(self.database, actor="test"), TOPIC, GROUP)

    def has_caught_up(self) -> bool:
        """Say whether hardly more waits than what is parked."""
        [(handled,)] = self.rows("SELECT count(*) FROM sink")
        return int(handled) + self.waiting().total() + BEHIND >= self.committed()

    def numbers(self) -> tuple[list[int], list[int]]:
        """Return the LPs in which something is committed, and how far each is."""
        rows = self.rows("SELECT lp, seq FROM mqlayer_app.counter WHERE seq > 0")
        return [lp for lp, _ in rows], [seq for _, seq in rows]

    def has_come_to(self, numbers: tuple[list[int], list[int]]) -> bool:
        """Say whether all up to these numbers has its effect, or is parked."""
        with psycopg.connect(self.settings.control_dsn()) as connection:
            return connection.execute(NOT_COME_TO, numbers).fetchone() is None

    def only_failing_keys_wait(self) -> bool:
        """Say whether the streams are settled, and all that has no effect is parked, of keys that fail."""
        finish_changes(runtime_of(self.database, self.prefix, application=self.database), topic=TOPIC)
        assert set(self.waiting()) <= {*ALWAYS, *HALF}
        unsettled = list(self.unsettled())
        assert not unsettled, unsettled
        twice = "SELECT count(*) FROM mqlayer.parked_message JOIN sink USING (source, lp, seq)"
        [(twice_there,)] = self.rows(twice)
        [(handled,)] = self.rows("SELECT count(*) FROM sink")
        assert handled + self.waiting().total() - twice_there == self.committed()
        return True

    def is_over(self) -> bool:
        """Say whether every message has its effect, and nothing is parked."""
        [(handled,)] = self.rows("SELECT count(*) FROM sink")
        assert (handled, self.waiting()) == (self.committed(), Counter())
        return not self.rows("SELECT lp FROM mqlayer.parked_key")


class SellerNemesis:
    """Kills and stops consumers, half of the killed ones once more at a place, and cuts their connections."""

    def __init__(self, play: Play, scene: FailingScene, seed: int) -> None:
        self._play, self._scene, self._rng = play, scene, random.Random(seed)
        self.faults: Counter[str] = Counter()

    def strike(self) -> None:
        """Break something, or release keys."""
        for name in self._play.ended():
            self._play.start(name)
        faults = [self.kill] * 4 + [self.pause] * 2 + [self.release] * 2 + [self.cut_backends, self.flush_scripts]
        fault = self._rng.choice(faults)
        fault()
        self.faults[fault.__name__] += 1

    def kill(self) -> None:
        """Kill a consumer; perhaps the next one of its name ends at a place."""
        name = self._rng.choice(self._play.names("seller"))
        armed = f"{self._rng.choice(PLACES)}=kill@{self._rng.randint(1, 4)}" if self._rng.random() < 0.5 else ""
        self._play.kill(name, armed)

    def pause(self) -> None:
        """Stop a consumer past its lease."""
        self._play.pause(self._rng.choice(self._play.names("seller")), LEASE_S * self._rng.uniform(1.2, 2.0))

    def cut_backends(self) -> None:
        """End all connections to the database."""
        end_backends(self._scene.settings.control_dsn())

    def flush_scripts(self) -> None:
        """Have a Redis forget its scripts."""
        redis.Redis.from_url(self._rng.choice(self._scene.nodes).url).script_flush()

    def release(self) -> None:
        """Do what an operator does, at a bad moment."""
        with contextlib.suppress(StoreUnavailable):
            self._scene.release()

    def rest(self) -> None:
        """Let go: whoever may still be broken at a place is replaced."""
        for name in self._play.names("seller"):
            self._play.kill(name)


@pytest.fixture
def scene(database_dsn: str, key_prefix: str, start_redis: StartRedis, tmp_path: Path) -> Iterator[FailingScene]:
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with psycopg.connect(database_dsn, autocommit=True) as connection:
        connection.execute(SINK)
    nodes: list[RedisServer] = [start_redis() for _ in range(2)]
    with Database(database_dsn) as database:
        yield FailingScene(database, nodes, settings, tmp_path)


@dataclass(frozen=True)
class Load:
    """The time of the faults, and the messages published meanwhile: enough for each failing key to be met."""

    seconds: float
    keys: int
    pause_s: float


SHORT: Final = Load(6, keys=100, pause_s=0.04)
LONG: Final = Load(240, keys=1_000, pause_s=0.004)


def load_of(config: pytest.Config) -> Load:
    """Return the short form, the long one, or the one for as many seconds as are asked for."""
    load = LONG if config.getoption("--long", default=False) else SHORT
    return replace(load, seconds=float(os.environ.get("MQLAYER_CHAOS_SECONDS", load.seconds)))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.full
def test_keys_that_fail_hold_up_nobody_and_are_whole_in_the_end(
    request: pytest.FixtureRequest, scene: FailingScene
) -> None:
    """All other keys are handled while the fault lasts; after it, every key's history is complete and in order."""
    seed = int(os.environ.get("MQLAYER_CHAOS_SEED", "0")) or random.randrange(1, 10**6)
    print(f"MQLAYER_CHAOS_SEED={seed}")  # noqa: T201
    load = load_of(request.config)
    put_faults(scene.directory)
    play = Play(
        scene.settings, scene.directory,
        MQLAYER_TEST_KEYS=str(load.keys), MQLAYER_TEST_RULES=json.dumps(RULES), MQLAYER_TEST_PAUSE_S=str(load.pause_s),
    )  # fmt: skip
    nemesis = SellerNemesis(play, scene, seed)
    began = time.monotonic()
    try:
        for role, count in CAST.items():
            for number in range(count):
                play.start(f"{role}-{number}")
        wait_until(lambda: scene.rows("SELECT 1 FROM sink LIMIT 1"), timeout_s=40, what="a handled message")
        stretches = {"quiet_before": quiet_stretch(scene, load.seconds / 4)}
        began_ns = time.monotonic_ns()
        strike_for(nemesis, load.seconds / 2, random.Random(seed))
        failing_ns = time.monotonic_ns()
        stretches["struck_before"] = began_ns, failing_ns
        put_faults(scene.directory, always=ALWAYS, half=HALF)
        for change in (scene_split, scene_merge, None):
            strike_for(nemesis, load.seconds / 3, random.Random(seed))
            if change is not None:
                change(scene)
        stretches["struck_failing"] = failing_ns, time.monotonic_ns()
        nemesis.rest()
        # Several: one may fall into a time in which the machine is another's.
        for number in range(QUIET):
            stretches[f"quiet_failing_{number}"] = quiet_stretch(scene, load.seconds / 4)
        play.end("publisher")
        wait_for(scene.only_failing_keys_wait, what=f"only failing keys wait, {seed=}")
        waiting, settled_s = scene.waiting(), time.monotonic() - began
        put_faults(scene.directory)
        scene.release()
        wait_for(scene.is_over, what=f"every message has its effect, {seed=}")
        whole_s = time.monotonic() - began
        play.end("seller")
        play.end("relay")
    finally:
        play.kill_all()
    scene.witness()
    verdict = scene.judge()
    records = read_histories(scene.directory)
    healthy = {name: pace(records, *ends, without={*ALWAYS, *HALF}) for name, ends in stretches.items()}
    before, quiet = healthy["quiet_before"], [healthy[f"quiet_failing_{number}"] for number in range(QUIET)]
    failing = max(quiet, key=lambda one: one.kept_up)
    ratios = {
        "quiet_ratio": failing.kept_up / before.kept_up,
        "struck_ratio": healthy["struck_failing"].kept_up / max(0.01, healthy["struck_before"].kept_up),
    }
    told = {name: asdict(found) | {"per_s": found.per_s, "kept_up": found.kept_up} for name, found in healthy.items()}
    report(
        nemesis, verdict, seed=seed, settled_s=settled_s, whole_s=whole_s, waiting=waiting.total(), healthy=told,
        **ratios,
    )  # fmt: skip
    assert verdict.clean, f"{seed=} {verdict}"
    # Noisy cores: keys that are held up by others show far beyond these.
    assert failing.kept_up >= LEAST_RATIO * min(1.0, before.kept_up), f"{seed=} {before} {failing}"
    longest_s = min(one.longest_wait_s for one in quiet)
    assert longest_s <= before.longest_wait_s + LONGER_S, f"{seed=} {before} {quiet}"
    assert set(ALWAYS) <= set(waiting), "not every failing key was parked: too little was published"
    assert sum(scene.changes().values()) == 2


def quiet_stretch(scene: FailingScene, seconds: float) -> tuple[int, int]:
    """Let the run go on untouched for a while, once it has caught up; return when, on CLOCK_MONOTONIC.

    With all that was committed before: whoever takes over for the dead belongs to the faults, also where it is so quick
    that hardly anything waits yet.
    """
    numbers = scene.numbers()
    wait_for(lambda: scene.has_come_to(numbers), what="somebody owns every partition")
    wait_for(scene.has_caught_up, what="the consumers have caught up")
    began_ns = time.monotonic_ns()
    # The length of the stretch is part of the experiment, not a wait for anything.
    time.sleep(max(2.0, seconds))
    return began_ns, time.monotonic_ns()


def wait_for(condition: Callable[[], bool], *, what: str) -> None:
    """Wait until the system has settled as a question says that counts all of a run: so it is asked now and then."""
    wait_until(condition, timeout_s=SETTLING_S, longest_s=ASK_EVERY_S, what=what)


def scene_split(scene: FailingScene) -> None:
    """Split the first partition, which holds some of the keys."""
    split(runtime_of(scene.database, scene.prefix), TOPIC, load_route(scene.database, TOPIC).ranges[0].partition)


def scene_merge(scene: FailingScene) -> None:
    """Merge the last two partitions."""
    parents = [line.partition for line in load_route(scene.database, TOPIC).ranges[-2:]]
    merge(runtime_of(scene.database, scene.prefix), TOPIC, parents)


def strike_for(nemesis: SellerNemesis, seconds: float, rng: random.Random) -> None:
    """Break one thing after the other for a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        # The pace of faults is part of the experiment, not a wait for anything.
        time.sleep(rng.uniform(0.3, 1.0))
        nemesis.strike()


def report(nemesis: SellerNemesis, verdict: Verdict, **facts: Any) -> None:
    """Write down what was done and what was found, where that is asked for."""
    if path := os.environ.get("MQLAYER_CHAOS_REPORT"):
        found = facts | {"faults": nemesis.faults, "verdict": json.loads(verdict.as_json())}
        Path(path).write_text(json.dumps(found), "utf-8")
