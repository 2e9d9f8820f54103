"""A run through an upgrade: each process that starts is of the previous release or of this one, by a phase's share.

Old schema and old code; this release's `migrate`; both releases; old code alone, as after a way back; both again; a
finalization with `--drain`; new code alone. Faults strike all the time.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, ClassVar, Final

from mqlayer.errors import MqlayerError
from mqlayer.maintenance.upgrades import UpgradeStatus, finalize, run_contracts, upgrade_status
from mqlayer.postgres.migrations import SCHEMAS, migrate
from mqlayer.settings import Settings
from tests.chaos.actors import TOPIC
from tests.chaos.harness.nemesis import DEPLOYED_WITHIN_S, Nemesis
from tests.chaos.harness.play import Play
from tests.chaos.harness.run import Length, Run
from tests.chaos.harness.scene import Scene
from tests.fixtures.forked_programs import Process
from tests.fixtures.previous_release import PreviousRelease
from tests.proof.checker import Verdict
from tests.proof.runtimes import runtime_of

FINALIZE_S: Final = 120.0
"""How long older processes may drain; a killed relay counts for half a minute."""
CONTRACT_S: Final = 90.0
LOOK_S: Final = 0.5
PHASES: Final = (("both", 0.5), ("back", 1.0), ("both again", 0.5))
"""Between the migration and the finalization: how likely a process that starts is of the previous release."""


class MixedPlay(Play):
    """Processes of both releases; `former`: the names of those that are of the previous one."""

    def __init__(
        self,
        release: PreviousRelease,
        rng: random.Random,
        settings: Settings,
        histories: Path,
        environment: dict[str, str],
    ) -> None:
        super().__init__(settings, histories, **environment)
        self._release, self._rng = release, rng
        self.share = 1.0
        self.former: set[str] = set()

    def _run(self, name: str, words: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> Process:
        self.former.discard(name)
        if self._rng.random() >= self.share:
            return super()._run(name, words, environment, log)
        self.former.add(name)
        return self._release.start(*words, env=environment, log=log)


class MadeScene(Scene):
    """A scene whose nodes and topic are there."""

    def make(self, partitions: int) -> None:
        """Do nothing."""


class UpgradeNemesis(Nemesis):
    """Kills no worker: one in a job would hold the finalization up for ten minutes."""

    mortal = ("publisher", "relay", "pair", "pair", "driver", "beat")


class UpgradeRun(Run):
    """A chaos run with an upgrade in it. `former`: put there before one is made."""

    former: ClassVar[PreviousRelease]
    kinds: ClassVar[Mapping[str, int]] = {
        "kill": 45,
        "restart": 20,
        "stop": 12,
        "network": 8,
        "membership": 8,
        "backends": 3,
        "scripts": 2,
    }
    _nemesis_class = UpgradeNemesis
    _play: MixedPlay

    def _migrate(self) -> None:
        self._formerly("migrate")

    def _make_scene(self) -> Scene:
        for number, node in enumerate(self._nodes):
            self._formerly("node", "register", f"n{number}", node.url)
        self._formerly("topic", "create", TOPIC, "--partitions", str(self.partitions), "--archived")
        return MadeScene(self._database, self._nodes, self._settings, self._histories)

    def _formerly(self, *words: str) -> None:
        """Run a command of the previous release: this one's need its schema."""
        environment = os.environ | {"MQLAYER_DSN": self._site.direct_dsn, "MQLAYER_KEY_PREFIX": "chaos"}
        with (self._histories / "former.log").open("ab") as log:
            assert self.former.start("mqlayer", *words, env=environment, log=log).wait(60) == 0, words

    def _make_play(self, environment: dict[str, str]) -> Play:
        return MixedPlay(
            self.former, random.Random(f"{self._seed}/releases"), self._settings, self._histories, environment
        )

    def _strike(self, length: Length) -> Verdict | None:
        """Go through the phases, with faults of `length` in each."""
        self._runtime = runtime_of(self._database, settings=self._settings, application=self._database)
        self._break(length)
        migrate(self._site.direct_dsn)
        for _phase, share in PHASES:
            self._play.share = share
            self._roll()
            self._break(length)
        assert self._play.former, "no process of the previous release is left to be drained"
        self._play.share = 0.0
        self._finalize()
        self._roll(only=set(self._play.former))
        self._break(length)
        self._contract()
        return None

    def _break(self, length: Length) -> None:
        """Let as many faults strike as a phase has."""
        super()._strike(replace(length, faults=len(self._nemesis.struck) + length.faults))

    def _roll(self, only: set[str] | None = None) -> None:
        """Replace processes one by one, as a deployment does."""
        for name in sorted(set(self._play.processes) if only is None else only):
            self._nemesis.armed.pop(name, None)
            assert self._play.restart(name, DEPLOYED_WITHIN_S, meanwhile=self._nemesis.revive), f"{name} did not end"

    def _finalize(self) -> None:
        """Drain the older processes, while faults go on."""
        until = time.monotonic() + FINALIZE_S
        while self._tried(lambda: finalize(self._runtime, drain=True)) != "finalized":
            assert time.monotonic() < until, [str(one) for one in upgrade_status(self._runtime).blockers]
            self._nemesis.let_pass(LOOK_S)
            self._nemesis.strike()

    def _contract(self) -> None:
        until, dsns = time.monotonic() + CONTRACT_S, dict.fromkeys(SCHEMAS, self._site.direct_dsn)
        while self._tried(lambda: run_contracts(self._runtime, dsns) and None) or self._status().contracts:
            assert time.monotonic() < until, [str(one) for one in self._status().behind]
            self._nemesis.let_pass(LOOK_S)

    def _status(self) -> UpgradeStatus:
        return upgrade_status(self._runtime)

    @staticmethod
    def _tried(act: Callable[[], object]) -> object:
        """Return an answer, or the error of a store that a fault hit."""
        try:
            return act()
        except MqlayerError as error:
            return error
