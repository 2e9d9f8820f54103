"""The chaos run's short form on each pair of server versions, ten minutes on the newest one, and their table.

Each pair runs as a program of its own, with the pair's servers first in PATH, like a row of the matrix.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.matrix.plan import PAIRS, MatrixRow
from tests.matrix.programs import ProgramMissing, UnpackedSeries
from tests.matrix.runs import ROOT, chosen_versions, row_environment

FIRST_SEED: Final = 2500
LONG_MINUTES: Final = "10"
PIECE_WITHIN_S: Final = 1800.0


@dataclass(frozen=True, slots=True)
class PairResult:
    """What chaos came to on a pair; `trouble` says why there is no report."""

    name: str
    versions: str = ""
    report: dict[str, Any] | None = None
    seconds: float = 0.0
    trouble: str = ""

    @property
    def good(self) -> bool:
        """Whether a run was clean."""
        return self.report is not None and bool(self.report["clean"])


def pairs(names: Iterable[str] = ()) -> list[MatrixRow]:
    """Return the pairs of these names, or all."""
    wanted = set(names)
    return [pair for pair in PAIRS if not wanted or pair.name in wanted]


def run_pair(pair: MatrixRow, cache: Path) -> PairResult:
    """Run chaos on a pair: the short form, or ten minutes where the pair is the newest."""
    try:
        for series in pair.series:
            UnpackedSeries(series, cache).ensure()
    except (ProgramMissing, OSError, subprocess.SubprocessError) as error:
        return PairResult(pair.name, trouble=str(error))
    python = Path(sys.executable).parent
    with tempfile.TemporaryDirectory(prefix="mqlayer-matrix-") as scratch:
        environment = row_environment(pair, cache, python, Path(scratch))
        versions, trouble = chosen_versions(pair, python, environment)
        versions = versions.rpartition(", Python")[0]
        if trouble:
            return PairResult(pair.name, versions, trouble=trouble)
        length = ["--minutes", LONG_MINUTES] if pair.long else ["--short"]
        seed = str(FIRST_SEED + [one.name for one in PAIRS].index(pair.name))
        begun = time.monotonic()
        command = [str(python / "python"), "-m", "tests.chaos", "--seed", seed, *length]
        answer = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PIECE_WITHIN_S, check=False
        )
    seconds = time.monotonic() - begun
    line = next((line for line in reversed(answer.stdout.splitlines()) if line.startswith("{")), "")
    if not line:
        return PairResult(pair.name, versions, seconds=seconds, trouble=answer.stderr.strip()[-600:])
    report = json.loads(line)
    trouble = "" if report["clean"] else (line + answer.stderr[-1000:])
    return PairResult(pair.name, versions, report, seconds, trouble)


def chaos_table(results: Iterable[PairResult]) -> str:
    """Return the table, as Markdown."""
    lines = [
        "| servers | sent | delivered | repeated | route changes | faults | p50 / p99 / longest recovery | verdict |",
        "|-|-|-|-|-|-|-|-|",
    ]
    for result in results:
        report = result.report
        if report is None or "messages" not in report:
            lines.append(f"| {result.versions or result.name} | | | | | | | {result.trouble} |")
            continue
        changes = sum(report["route_changes"].values())
        counts = [*(report[name] for name in ("messages", "delivered", "redelivered")), changes, report["faults"]]
        shown = " / ".join(str(report["recovery"][name]) for name in ("p50_s", "p99_s", "longest_s"))
        verdict = "clean" if report["clean"] else "not clean"
        cells = " | ".join(f"{count:,}" for count in counts)
        lines.append(f"| {result.versions} | {cells} | {shown} | {verdict} |")
    return "\n".join(lines)
