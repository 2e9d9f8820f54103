"""A run: servers, processes, faults; then all is let go, drains, and is judged."""

from __future__ import annotations

import gc
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import psycopg
import pytest
from pydantic import SecretStr

from mqlayer.doctor.verify import verify
from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.routes import finish_changes, rearm_lost_nodes
from mqlayer.settings import Settings
from mqlayer.stack import RedisServer
from mqlayer.testing.servers import best_place
from tests.chaos.actors import SINK, TOPIC
from tests.chaos.harness.nemesis import KINDS, Nemesis
from tests.chaos.harness.plants import PLANTS, plant
from tests.chaos.harness.play import Play
from tests.chaos.harness.progress import Progress, judge_so_far
from tests.chaos.harness.recovery import recoveries, summary
from tests.chaos.harness.scene import Scene
from tests.chaos.harness.sites import DatabaseSite, NodeSite, PairSite, PowerSite
from tests.fixtures.power import build_sync_noter
from tests.fixtures.wait import wait_until
from tests.proof.archive_update import archive_all
from tests.proof.checker import Verdict, check
from tests.proof.history import FallBack, History, read_histories
from tests.proof.observer import observe_retiring
from tests.proof.runtimes import runtime_of

CAST: Final = {"publisher": 3, "relay": 2, "pair": 4, "driver": 2, "worker": 2, "beat": 2}
BATCHES: Final = {"pair-0": "distinct", "pair-1": "key", "pair-2": "distinct", "pair-3": "key"}
"""Whose handlers take batches of what. The visitor's take single messages: a group may have all kinds."""
KEYS: Final = 500
LEASE_S: Final = 2.0
SETTLED_ASKED_S: Final = 0.2
"""How often it is asked whether all is settled: that counts all of a run, on all nodes."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long faults go on: at least so long, and until there were so many, so many changes of routes and messages."""

    seconds: float
    faults: int
    every_s: float
    changes: int = 0
    messages: int = 0
    settling_s: float = 300.0
    """How long all that was committed may take to be handled once the faults are over; else the run is stuck."""
    stall_s: float = math.inf
    """How long nothing may change meanwhile; else the run is stuck."""
    poll_interval_s: float = math.inf
    """How often what there is so far is judged; the run ends when that finds something."""
    pause_s: float = 0.04
    """How long a publisher waits between two transactions, on average."""


SHORT: Final = Length(seconds=0, faults=60, every_s=0.45, changes=5, messages=5_000, pause_s=0.08)
"""About a minute."""
SUITE: Final = Length(seconds=0, faults=24, every_s=0.4, changes=2, messages=900, pause_s=0.1)
"""About half a minute: each kind of fault strikes, and then some more."""
Audit = Callable[[Scene], Iterable[str]]
"""One more judge of what a run leaves that is not stuck: says what is wrong."""


def run(
    seed: int,
    length: Length,
    *,
    bug: str = "",
    audits: Iterable[Audit] = (),
    form: Callable[..., Run] | None = None,
) -> dict[str, Any]:
    """Do a run and return its report; `clean` says whether anything was broken. `bug`: one of PLANTS, for good.

    `recovery` is a list; `shown` makes it what people read. `form`: another class of runs.
    """
    try:
        with ExitStack() as cleanup:
            directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="mqchaos-", dir=best_place())))
            directory.chmod(0o755)
            return (form or Run)(directory, seed, cleanup, bug, audits, length.pause_s).play(length)
    finally:
        # Histories of millions of records hang in cycles: collected in the middle of the next run, they would hold all
        # lines to the servers up for seconds, since the proxies are threads of this process.
        gc.collect()


def shown(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report as it is printed."""
    return {**report, "recovery": summary(report["recovery"], longest=5)}


def total(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several runs are together."""
    kinds, changes = Counter[str](), Counter[str]()
    for report in reports:
        kinds.update(report["faults_by_kind"])
        changes.update(report["route_changes"])
    numbers = {
        name: sum(report[name] for report in reports)
        for name in ("seconds", "messages", "delivered", "redelivered", "faults")
    }
    return {
        "pieces": len(reports),
        "seeds": [report["seed"] for report in reports],
        "clean": all(report["clean"] for report in reports),
        **numbers,
        "seconds": round(numbers["seconds"], 1),
        "route_changes": dict(changes),
        "faults_by_kind": dict(kinds),
        "recovery": summary([one for report in reports for one in report["recovery"]], longest=5),
    }


class Run:
    """Servers, processes, a nemesis, and what they leave."""

    cast: Mapping[str, int] = CAST
    writers: Sequence[str] = ("publisher", "driver")
    """Those that end first, so that what is left can be handled."""
    partitions = 4
    environment: Mapping[str, str] = {}
    """More of its processes."""
    kinds: ClassVar[Mapping[str, int]] = KINDS
    _nemesis_class = Nemesis

    def __init__(
        self, directory: Path, seed: int, cleanup: ExitStack, bug: str, audits: Iterable[Audit], pause_s: float
    ) -> None:
        if bug:
            plant(bug)
        self._audits = audits
        self._seed, self._rng = seed, random.Random(f"{seed}/pace")
        self._histories = directory / "histories"
        self._histories.mkdir()
        self._site = DatabaseSite(directory, cleanup)
        self._migrate()
        self._nodes = self._make_nodes(directory, cleanup)
        broker = cleanup.enter_context(RedisServer(directory / "broker", options={"appendonly": "no"}))
        self._settings = Settings(dsn=SecretStr(self._site.dsn), key_prefix="chaos")
        with psycopg.connect(self._site.direct_dsn, autocommit=True) as connection:
            connection.execute(SINK)
        self._database = cleanup.enter_context(Database(self._site.direct_dsn))
        self._scene = self._make_scene()
        self._history = cleanup.enter_context(History(self._histories, "nemesis"))
        # This process arms nodes and buries partitions too, at the end.
        cleanup.callback(observe_retiring(self._history, TOPIC))
        environment = {
            "MQLAYER_TEST_KEYS": str(KEYS), "MQLAYER_CHAOS_SEED": str(seed), "MQLAYER_TEST_PAUSE_S": str(pause_s),
            "MQLAYER_TEST_DRIVE_EVERY_S": "4", "MQLAYER_LEASE_S": str(LEASE_S), "MQLAYER_BROKER_URL": broker.url,
            "MQLAYER_TEST_FAILING": "199", "MQLAYER_TEST_PLANT": bug, "MQLAYER_TEST_BATCHES": json.dumps(BATCHES),
            "MQLAYER_TEST_BATCH_LIMIT": "50", "MQLAYER_TEST_PART": "25", "MQLAYER_TEST_HANDLERS": "24",
        }  # fmt: skip
        self._play = self._make_play({**environment, **self.environment})
        cleanup.callback(self._play.kill_all)
        self._nemesis = self._nemesis_class(
            self._play, self._nodes, self._site, self._histories,
            seed=seed, lease_s=LEASE_S, kinds=PLANTS[bug].kinds if bug else self.kinds, fell_back=self._fell_back,
        )  # fmt: skip

    def _make_nodes(self, directory: Path, cleanup: ExitStack) -> list[NodeSite]:
        nodes: list[NodeSite] = [NodeSite(directory, "n0", cleanup), PairSite(directory, "n1", cleanup)]
        if noter := build_sync_noter(directory):
            nodes.append(PowerSite(directory, "n2", cleanup, noter))
        return nodes

    def _migrate(self) -> None:
        migrate(self._site.direct_dsn)

    def _make_scene(self) -> Scene:
        return Scene(self._database, self._nodes, self._settings, self._histories, partitions=self.partitions)

    def _make_play(self, environment: dict[str, str]) -> Play:
        return Play(self._settings, self._histories, **environment)

    def play(self, length: Length) -> dict[str, Any]:
        began, stuck, unsettled = time.monotonic(), "", list[str]()
        for role, count in self.cast.items():
            for number in range(count):
                self._play.start(f"{role}-{number}")
        wait_until(lambda: self._scene.committed() > 100, timeout_s=60, what="a first message of many")
        if found := self._strike(length):
            return self._caught(found, time.monotonic() - began)
        struck_s = time.monotonic() - began
        try:
            self._let_go(length)
            settled_s = time.monotonic() - began - struck_s
            for role in ("pair", "relay", "worker", "beat"):
                self._play.end(role)
        except (AssertionError, pytest.fail.Exception) as error:
            stuck, settled_s = str(error), time.monotonic() - began - struck_s
            unsettled = list(self._unsettled())
            self._play.kill_all()
        self._scene.witness()
        return self._report(struck_s, settled_s, stuck, unsettled)

    def _strike(self, length: Length) -> Verdict | None:
        """Break things; return what a look at it found, where one did."""
        began = looked = time.monotonic()
        while not self._has_lasted(length, time.monotonic() - began):
            # Nothing breaks for so long: the pace of faults is part of the experiment.
            self._nemesis.let_pass(self._rng.uniform(0.2, 1.8) * length.every_s)
            self._nemesis.strike()
            if time.monotonic() - looked > length.poll_interval_s:
                verdict = judge_so_far(self._scene)
                if not verdict.clean:
                    return verdict
                looked = time.monotonic()
        return None

    def _has_lasted(self, length: Length, lasted_s: float) -> bool:
        if lasted_s < length.seconds or len(self._nemesis.struck) < length.faults:
            return False
        # On a machine that others keep busy it takes longer, but not for ever.
        if lasted_s > 4 * max(60.0, length.seconds):
            return True
        try:
            return self._scene.changes().total() >= length.changes and self._scene.committed() >= length.messages
        except MqlayerError:
            return False

    def _let_go(self, length: Length) -> None:
        self._nemesis.rest()
        assert self._play.ended() == [], "nobody ended these"
        assert self._nemesis.late == [], f"these did not end when told to: {self._nemesis.late}"
        for role in self.writers:
            self._play.end(role)
        what = f"all that was committed is settled, {self._seed=}"
        progress = Progress(self._scene, length.stall_s)
        wait_until(
            lambda: progress.has_ended() or self._is_settled(),
            timeout_s=length.settling_s, longest_s=SETTLED_ASKED_S, what=what,
        )  # fmt: skip
        assert not progress.has_ended(), f"nothing changed for {length.stall_s:g} s: {what}"

    def _caught(self, verdict: Verdict, struck_s: float) -> dict[str, Any]:
        """Report what was found while it ran: nobody waits for the rest."""
        self._play.kill_all()
        return self._facts(verdict, struck_s) | {
            "clean": False, "stuck": "", "unsettled": [], "settled_s": 0.0, "differences": [],
        }  # fmt: skip

    def _is_settled(self) -> bool:
        try:
            rearm_lost_nodes(runtime_of(self._database, self._settings.key_prefix, application=self._database))
            finish_changes(
                runtime_of(self._database, self._settings.key_prefix, application=self._database), topic=TOPIC
            )
            return self._scene.is_settled()
        except MqlayerError as error:
            raise AssertionError(f"{type(error).__name__}: {error}") from error

    def _unsettled(self) -> Iterator[str]:
        """Say where a run is stuck."""
        try:
            yield from self._scene.without_effect(limit=10)
            yield from self._scene.unsettled()
            yield from self._scene.unowned()
        except MqlayerError as error:
            yield f"{type(error).__name__}: {error}"

    def _fell_back(self, site: NodeSite) -> None:
        """Write down that what was settled on a node may come again."""
        # Of those that are buried all is known.
        rows = self._scene.rows("SELECT partition_id, node_id FROM mqlayer.partition WHERE retired_at IS NULL")
        number = self._nodes.index(site) + 1
        for partition, node_id in rows:
            if node_id == number:
                self._history.note(FallBack(topic=TOPIC, partition=partition))

    def _differences(self, *, stuck: bool) -> Iterator[str]:
        """Say what is wrong with what is left, by those who know nothing of histories."""
        prefix = self._settings.key_prefix
        for one in verify(runtime_of(self._database, prefix, application=self._database), TOPIC, deep=True):
            # A group that drained a partition whose node lost the last acks is told as a warning, and no fault.
            if one.verdict != "ok" and (one.check, one.verdict) != ("group", "warning"):
                yield f"{one.check} {one.subject}: {one.seen}"
        if stuck:
            return
        try:
            archive_all(self._database, prefix=prefix)
        except pytest.fail.Exception as error:
            yield f"archive: {error}"
            return
        self._scene.emptied = any(one.kind in ("wipe", "shard_wipe") for one in self._nemesis.struck)
        for audit in (Scene.leftovers, *self._audits):
            yield from audit(self._scene)

    def _report(self, struck_s: float, settled_s: float, stuck: str, unsettled: list[str]) -> dict[str, Any]:
        records = read_histories(self._histories)
        verdict = check(records, flows=[(group, TOPIC) for group in self._scene.groups])
        differences = list(self._differences(stuck=bool(stuck)))
        return self._facts(verdict, struck_s) | {
            "clean": verdict.clean and not differences and not stuck,
            "stuck": stuck,
            "unsettled": unsettled,
            "settled_s": round(settled_s, 1),
            "recovery": recoveries(records, self._nemesis.struck),
            "differences": differences,
        }

    def _facts(self, verdict: Verdict, struck_s: float) -> dict[str, Any]:
        struck = self._nemesis.struck
        return {
            "seed": self._seed,
            "seconds": round(struck_s, 1),
            "messages": verdict.messages,
            "delivered": verdict.delivered,
            "redelivered": verdict.redelivered,
            "route_changes": dict(self._scene.changes()),
            "faults": len(struck),
            "faults_by_kind": dict(Counter(one.kind for one in struck)),
            "violations": {str(breach): count for breach, count in verdict.counts.items() if count},
            "examples": [str(violation) for violation in verdict.violations],
        }
