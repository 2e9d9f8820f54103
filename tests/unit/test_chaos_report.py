"""What a chaos run reports: how long things took to flow again, and what several runs are together."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.chaos.harness.nemesis import Nemesis, Struck
from tests.chaos.harness.recovery import SECOND_NS, Recovery, recoveries, summary
from tests.chaos.harness.run import total
from tests.fixtures.forked_programs import is_stopped
from tests.fixtures.wait import wait_until
from tests.proof.history import Deliver, Event, Publish, Record


def line(second: float, event: Event) -> Record:
    return Record(process="p", pid=1, operation=1, phase="ok", at_ns=int(second * SECOND_NS), event=event)


def message(lp: int, seq: int, *, committed: float, **handled: float) -> list[Record]:
    """Return a message's commit, and when each group handled it."""
    facts: dict[str, Any] = {"topic": "t", "source": 1, "lp": lp, "seq": seq}
    delivered = [line(at, Deliver(group=group, partition=1, **facts)) for group, at in handled.items()]
    return [line(committed, Publish(**facts)), *delivered]


def struck(kind: str, ended: float) -> Struck:
    return Struck(kind, "it", 0, int(ended * SECOND_NS))


def test_a_fault_is_over_when_every_group_handles_new_messages_of_every_set_of_lps() -> None:
    records = [
        *message(0, 1, committed=0.5, g=0.6, h=0.6),
        *message(0, 2, committed=1.5, g=9.0, h=9.0),  # held up by its key
        *message(1, 1, committed=1.6, g=2.0, h=3.0),  # the same set
        *message(1023, 1, committed=1.2, g=2.5, h=2.5),
    ]
    found = recoveries(records, [struck("kill", 1.0), struck("stop", 0.0), struck("node", 10.0)])
    assert found == [
        Recovery(2.0, "kill", "it", "h from LP 0"),
        Recovery(2.5, "stop", "it", "g from LP 960"),
        Recovery(0.0, "node", "it"),
    ]
    times = {"p50_s": 2.0, "p99_s": 2.0, "longest_s": 2.5, "longest": ["2.5 s stop it, g from LP 960"]}
    assert summary(found, longest=1) == {**times, "while_refilling": 0, "otherwise": times}


def test_what_strikes_while_an_emptied_node_is_filled_up_again_is_told_apart() -> None:
    records = [*message(0, 1, committed=2.0, g=8.0), *message(0, 2, committed=9.0, g=9.5)]
    wipe = Struck("wipe", "n1", int(1.0 * SECOND_NS), int(1.5 * SECOND_NS))
    found = recoveries(records, [struck("kill", 0.5), wipe, struck("stop", 1.8), struck("node", 8.6)])
    assert [one.refilling for one in found] == [True, True, True, False]
    told = summary(found, longest=0)
    assert (told["longest_s"], told["while_refilling"], told["otherwise"]["longest_s"]) == (7.5, 3, 0.9)


def test_several_runs_are_summed_up_over_all_of_their_faults() -> None:
    def report(seed: int, *, clean: bool, took: list[float]) -> dict[str, Any]:
        return {
            "seed": seed, "clean": clean, "seconds": 1.2, "messages": 10, "delivered": 20, "redelivered": 1,
            "faults": len(took), "route_changes": {"move": 1}, "faults_by_kind": {"kill": len(took)},
            "recovery": [Recovery(seconds, "kill", "it") for seconds in took],
        }  # fmt: skip

    found = total([report(7, clean=True, took=[1.0, 2.0]), report(8, clean=False, took=[3.0])])
    assert (found["pieces"], found["seeds"], found["clean"]) == (2, [7, 8], False)
    assert (found["seconds"], found["messages"], found["faults"]) == (2.4, 20, 3)
    assert (found["faults_by_kind"], found["route_changes"]) == ({"kill": 3}, {"move": 2})
    assert (found["recovery"]["p50_s"], found["recovery"]["longest_s"]) == (2.0, 3.0)


class TriedNemesis(Nemesis):
    """Breaks nothing; the rare kind can't be done at its first turns."""

    patience = 3

    def _often(self) -> str:
        return "it"

    def _rare(self) -> str:
        self.patience -= 1
        return "" if self.patience else "it"

    def _never(self) -> str:
        return ""


def test_each_kind_of_fault_strikes_as_soon_as_it_can_be_done_then_all_go_by_weight() -> None:
    nowhere: Any = None
    nemesis = TriedNemesis(
        nowhere, [], nowhere, Path(), seed=1, lease_s=1.0,
        kinds={"often": 10_000, "rare": 1, "never": 1}, fell_back=nowhere,
    )  # fmt: skip
    for _ in range(10):
        nemesis.strike()
    kinds = [one.kind for one in nemesis.struck]
    assert len(kinds) == 10
    assert "rare" in kinds[:4]
    assert set(kinds) == {"often", "rare"}


def test_who_stands_at_a_place_is_woken_while_another_fault_lasts() -> None:
    """The one that the fault is about stays as it is."""
    stands = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    names = ("relay-0", "relay-1")
    processes = {name: subprocess.Popen([sys.executable, "-c", stands]) for name in names}
    play: Any = SimpleNamespace(processes=processes, start=lambda name: None)
    nemesis = TriedNemesis(play, [], play, Path(), seed=1, lease_s=0.1, kinds={}, fell_back=play)
    try:
        for name, process in processes.items():
            nemesis.armed[name] = "relay.after_append=stop@1"
            wait_until(partial(is_stopped, process), what=f"{name} is stuck")

        def ended() -> bool:
            nemesis.let_pass(0.1, but="relay-1")
            return processes["relay-0"].poll() == 0

        wait_until(ended, what="the other one is woken")
        assert is_stopped(processes["relay-1"])
        assert [one.target for one in nemesis.struck] == ["relay-0 relay.after_append=stop@1"]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
