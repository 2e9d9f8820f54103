"""Planted bugs are hunted here, one after the other: each in a process of its own, since it stays there."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.chaos.harness.plants import HARMLESS, PLANTS
from tests.chaos.harness.races import RACES, race
from tests.chaos.harness.run import Length, run
from tests.fixtures.forked_programs import ask_python

ROOT: Final = Path(__file__).parents[3]
HUNT: Final = Length(seconds=15, faults=8, every_s=1.0, settling_s=40.0, stall_s=12.0, poll_interval_s=3.0)
PIECES: Final = 6
LONGEST_S: Final = 3600.0
NAMES: Final = (*RACES, *PLANTS)


def hunt(name: str, seed: int) -> dict[str, Any]:
    """Run with a bug until it is caught, or long enough; say by what, and after how many seconds.

    `as_expected`: it was caught, or is one that must not matter and was not.
    """
    found = race(name) if name in RACES else _hunt_by_chaos(name, seed)
    says = RACES[name].says if name in RACES else PLANTS[name].says
    return found | {"detail": says, "as_expected": bool(found["caught"]) != (name in HARMLESS)}


def _hunt_by_chaos(name: str, seed: int) -> dict[str, Any]:
    """Do pieces with servers of their own; their starts count."""
    began, pieces = time.monotonic(), 1
    report = run(seed, HUNT, bug=name)
    while report["clean"] and pieces < PIECES:
        report = run(seed + pieces, HUNT, bug=name)
        pieces += 1
    seconds = round(time.monotonic() - began, 1)
    facts = {fact: report[fact] for fact in ("violations", "stuck", "unsettled", "examples", "differences")}
    return {
        "plant": name, "seed": seed, "seconds": seconds, "rounds": pieces, "caught": not report["clean"],
        "by": _seen_by(report), **facts,
    }  # fmt: skip


def _seen_by(report: dict[str, Any]) -> str:
    """Say in a few words what gave a bug away."""
    words = [f"{count} {breach}" for breach, count in report["violations"].items()]
    words += ["stuck"] * bool(report["stuck"]) + ["verify"] * bool(report["differences"])
    return ", ".join(words)


def hunt_all(names: Sequence[str], seed: int) -> Iterator[dict[str, Any]]:
    """Hunt bugs, each in a process of its own."""
    for name in names:
        words = "--seed", str(seed), "--plant", name
        ended = ask_python("tests.chaos", *words, cwd=ROOT, env=os.environ, timeout=LONGEST_S)
        sys.stderr.write(ended.stderr)
        lines = ended.stdout.splitlines()
        broken = {"plant": name, "detail": "", "seconds": 0.0, "caught": False, "by": "no report", "as_expected": False}
        yield json.loads(lines[-1]) if lines else broken


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return what came of all hunts, as a table of Markdown."""
    lines = ["| plant | detail | caught by | seconds |", "|---|---|---|---|"]
    for one in found:
        by = one["by"] or ("not caught, as it must not be" if one["as_expected"] else "NOT CAUGHT")
        lines.append(f"| `{one['plant']}` | {one['detail']} | {by.replace('_', ' ')} | {one['seconds']:.0f} |")
    seconds = sorted(one["seconds"] for one in found if one["caught"])
    if seconds:
        lines.append(f"\n{len(seconds)} of {len(found)} caught, median {seconds[len(seconds) // 2]:.0f} s.")
    return "\n".join(lines)
