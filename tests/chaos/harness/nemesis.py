"""Breaks one thing after the other, by a seed, and notes what it was and when it was over."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg

from tests.chaos.harness.play import Play
from tests.chaos.harness.sites import DatabaseSite, NodeSite, PairSite, PowerSite, Site
from tests.fixtures.forked_programs import is_stopped
from tests.proof.failpoint_names import failpoint_names

PLACES: Final = {
    "driver": ("change.", "drop.", "retire."),
    "pilot": ("auto.", "change.", "retire."),
    "pair": ("drained.", "acquire.", "rearm.", "repair.", "ack.", "release.", "member.", "read.", "park"),
    "relay": ("relay.", "rearm.", "repair."),
    "worker": ("archive.", "rearm.", "repair.", "retire.", "change."),
}
"""Where processes of a role are broken between two writes."""
MORTAL: Final = ("publisher", "relay", "pair", "pair", "driver", "driver", "worker", "beat", "pilot", "shopper")
DEPLOYED: Final = ("publisher", "relay", "pair", "pair", "driver", "worker", "beat", "pilot", "shopper")
DEPLOYED_WITHIN_S: Final = 60.0
"""How long a process that is told to end may go on with what it has in hand; who needs longer is to be looked at."""
STOPPABLE: Final = (
    "pair",
    "pair",
    "pair",
    "relay",
    "relay",
    "driver",
    "worker",
    "publisher",
    "beat",
    "pilot",
    "shopper",
)
VISITOR: Final = "pair-visitor"
"""A member of both groups that comes and goes."""
KINDS: Final = {
    "kill": 45, "restart": 6, "stop": 15, "network": 25, "node": 4, "postgres": 2, "backends": 3, "scripts": 2,
    "memory": 2, "clock": 2, "far_clock": 1, "fail_over": 2, "power_cut": 2, "wipe": 2, "membership": 8,
}  # fmt: skip
"""How often each kind of fault is chosen, once each of them has struck."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault: its kind, what it hit, and from when to when, in ns of CLOCK_MONOTONIC."""

    kind: str
    target: str
    began_ns: int
    ended_ns: int


REVIVE_EVERY_S: Final = 0.25
"""How often it is looked who died, or is stuck, at a place."""


class Nemesis:
    """Strikes; what takes a while is over when `strike` returns."""

    mortal: tuple[str, ...] = MORTAL

    def __init__(
        self,
        play: Play,
        nodes: list[NodeSite],
        database: DatabaseSite,
        directory: Path,
        *,
        seed: int,
        lease_s: float,
        kinds: Mapping[str, int],
        fell_back: Callable[[NodeSite], None],
    ) -> None:
        self._kinds, self._due = kinds, list(kinds)
        self._play, self._nodes, self._database, self._directory = play, nodes, database, directory
        self._rng, self._lease_s, self._fell_back = random.Random(seed), lease_s, fell_back
        self._rng.shuffle(self._due)
        self.armed: dict[str, str] = {}
        self._stopped_since: dict[str, float] = {}
        self.struck: list[Struck] = []
        self.late: list[str] = []

    def strike(self) -> None:
        """Break something, in each way once, then by weight; where that can't be now, in another way."""
        while not any(self._does(kind) for kind in [*self._due, self._by_weight()]):
            pass
        self.revive()

    def let_pass(self, seconds: float, *, but: str = "") -> None:
        """Let time go by; who died at a place meanwhile is started again, who stands there wakes up; all `but` one."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(left_s, REVIVE_EVERY_S))
            self.revive(but=but)

    def revive(self, *, but: str = "") -> None:
        """Start again what died at its place; wake up what has stood there for longer than a lease; all `but` one."""
        for name, place in list(self.armed.items()):
            if name == but:
                continue
            process = self._play.processes[name]
            if process.poll() is not None:
                self._at_place(name, place)
                self._play.start(name)
            elif not is_stopped(process):
                self._stopped_since.pop(name, None)
            elif time.monotonic() - self._stopped_since.setdefault(name, time.monotonic()) > 1.5 * self._lease_s:
                self._at_place(name, place)
                process.send_signal(signal.SIGCONT)

    def rest(self) -> None:
        """Let go: from here on nothing breaks; who may still be broken at a place is replaced."""
        self.revive()
        for name in self.armed:
            self._play.kill(name)
        self.armed.clear()
        for site in (*self._nodes, self._database):
            site.proxy.heal()

    def _by_weight(self) -> str:
        return self._rng.choices(list(self._kinds), list(self._kinds.values()))[0]

    def _does(self, kind: str) -> bool:
        began = time.monotonic_ns()
        target = getattr(self, f"_{kind}")()
        if target:
            self.struck.append(Struck(kind, target, began, time.monotonic_ns()))
            self._due = [one for one in self._due if one != kind]
        return bool(target)

    def _at_place(self, name: str, place: str) -> None:
        del self.armed[name]
        self._stopped_since.pop(name, None)
        now = time.monotonic_ns()
        self.struck.append(Struck(f"{'stop' if '=stop' in place else 'kill'} at a place", f"{name} {place}", now, now))

    def _kill(self) -> str:
        name = self._one_of(self.mortal)
        role = name.partition("-")[0]
        self.armed.pop(name, None)
        if role in PLACES and self._rng.random() < 0.5:
            place = self._rng.choice(sorted(n for n in failpoint_names() if n.startswith(PLACES[role])))
            self.armed[name] = f"{place}={self._rng.choice(['kill', 'kill', 'stop'])}@{self._rng.randint(1, 2)}"
        self._play.kill(name, self.armed.get(name, ""))
        return name

    def _restart(self) -> str:
        name = self._one_of(DEPLOYED)
        self.armed.pop(name, None)
        if not self._play.restart(name, DEPLOYED_WITHIN_S, meanwhile=self.revive):
            self.late.append(name)
        return name

    def _membership(self) -> str:
        if VISITOR not in self._play.processes:
            self._play.start(VISITOR)
            return f"{VISITOR} joins"
        self.armed.pop(VISITOR, None)
        if not self._play.leave(VISITOR, DEPLOYED_WITHIN_S, meanwhile=self.revive):
            self.late.append(VISITOR)
        return f"{VISITOR} leaves"

    def _stop(self) -> str:
        name = self._one_of(STOPPABLE)
        process = self._play.processes[name]
        process.send_signal(signal.SIGSTOP)
        self.let_pass(self._lease_s * self._rng.uniform(1.2, 1.8), but=name)
        process.send_signal(signal.SIGCONT)
        return name

    def _network(self) -> str:
        return self._break_lines(self._rng.choice([*self._nodes, *self._nodes, self._database]))

    def _break_lines(self, site: Site) -> str:
        name = self._rng.choice(["slow", "silent", "deaf", "reset", "cut", "cut", "cut", "unreachable", "half_open"])
        getattr(self, f"_line_{name}")(site)
        site.proxy.heal()
        return f"{name} {site.name}"

    def _line_slow(self, site: Site) -> None:
        site.proxy.delay(self._rng.uniform(0.02, 0.2), jitter_s=0.1)
        self.let_pass(self._rng.uniform(0.5, 1.5))

    def _line_silent(self, site: Site) -> None:
        site.proxy.blackhole()
        self.let_pass(self._rng.uniform(0.3, 1.5 * self._lease_s))

    def _line_deaf(self, site: Site) -> None:
        site.proxy.blackhole("server_to_client")
        self.let_pass(self._rng.uniform(0.3, 1.5 * self._lease_s))

    def _line_reset(self, site: Site) -> None:
        site.proxy.reset_all()

    def _line_cut(self, site: Site) -> None:
        # The server did the work, and its answer is lost in the middle.
        site.proxy.cut_after(server_bytes=self._rng.choice([0, 0, 1, 7, 200, 5_000]), times=self._rng.randint(1, 4))
        self.let_pass(self._rng.uniform(0.1, 0.5))

    def _line_unreachable(self, site: Site) -> None:
        site.proxy.refuse_new()
        site.proxy.reset_all()
        self.let_pass(self._rng.uniform(0.3, 1.0))

    def _line_half_open(self, site: Site) -> None:
        site.proxy.half_open()
        site.proxy.reset_all()
        self.let_pass(self._rng.uniform(0.3, 1.0))
        site.proxy.heal()
        site.proxy.reset_all()

    def _node(self) -> str:
        site = self._rng.choice(self._nodes)
        if isinstance(site, PowerSite):
            # It syncs every second: what it has answered may not even be written.
            self._fell_back(site)
        site.kill()
        if isinstance(site, PowerSite):
            self._fell_back(site)
        return site.name

    def _fail_over(self) -> str:
        pairs = [site for site in self._nodes if isinstance(site, PairSite)]
        if not pairs:
            return ""
        site = self._rng.choice(pairs)

        def note() -> None:
            self._fell_back(site)
            self.revive()

        # Whatever is settled from here on may come again.
        self._fell_back(site)
        lag_s, overlap_s = self._rng.uniform(0.0, 0.5), self._rng.uniform(0.0, 1.5 * self._lease_s)
        done = site.fail_over(lag_s=lag_s, overlap_s=overlap_s, meanwhile=note)
        self._fell_back(site)
        return site.name if done else ""

    def _power_cut(self) -> str:
        sites = [site for site in self._nodes if isinstance(site, PowerSite)]
        if not sites:
            return ""
        site = self._rng.choice(sites)
        self._fell_back(site)
        site.cut_power(self._rng)
        self._fell_back(site)
        return site.name

    def _wipe(self) -> str:
        site = self._rng.choice(self._nodes)
        self._fell_back(site)
        site.client().flushall()
        self._fell_back(site)
        return site.name

    def _postgres(self) -> str:
        self._database.kill()
        return self._database.name

    def _backends(self) -> str:
        end_backends(self._database.direct_dsn)
        return self._database.name

    def _scripts(self) -> str:
        site = self._rng.choice(self._nodes)
        site.client().script_flush()
        return site.name

    def _memory(self) -> str:
        site = self._rng.choice(self._nodes)
        site.client().config_set("maxmemory", 1)
        self.let_pass(self._rng.uniform(0.5, 2.0))
        site.client().config_set("maxmemory", 0)
        return site.name

    def _clock(self) -> str:
        return self._turn_clock(("pair",), 60)

    def _far_clock(self) -> str:
        return self._turn_clock(("pair", "relay", "publisher"), 3600)

    def _turn_clock(self, roles: tuple[str, ...], seconds: int) -> str:
        name, off = self._one_of(roles), self._rng.choice([-seconds, seconds])
        # Read by the process itself: see `skew_clock` of the actors.
        (self._directory / f"{name}.skew").write_text(str(off))
        return f"{name} {off:+} s"

    def _one_of(self, roles: tuple[str, ...]) -> str:
        roles = tuple(role for role in roles if self._play.names(role))
        return self._rng.choice(self._play.names(self._rng.choice(roles)))


def end_backends(dsn: str) -> None:
    """End all connections to a database."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
