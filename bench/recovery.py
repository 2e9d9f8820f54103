"""How long it takes after a fault until everything flows again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.registry import Line, bench, note
from bench.stage import Stage

ROOT: Final = Path(__file__).parents[1]
SEED: Final = 7
LIMIT_MS: Final = 5_000.0


@bench("recovery")
def recovery(_stage: Stage) -> Iterator[Line]:
    """p99 in ms over the faults of a short chaos run, of all kinds, from the end of a fault until in all sets of LPs
    something committed after it is handled; the run has servers of its own. Raises where the run is not clean."""
    command = [sys.executable, "-m", "tests.chaos", "--short", "--seed", str(SEED)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    note(ended.stdout)
    if ended.returncode:
        raise RuntimeError(f"no figure: the chaos run was not clean; repeat it with {' '.join(command[1:])}")
    yield line(json.loads(ended.stdout))


def line(report: dict[str, Any]) -> Line:
    """Return a line whose target is in ms."""
    value = round(report["recovery"]["p99_s"] * 1e3, 1)
    return Line(name="recovery", value=value, unit="ms", baseline=None, ratio=None, target=LIMIT_MS)
