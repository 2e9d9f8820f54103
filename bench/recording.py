"""The record of figures: one file in `bench/results` for each saved run, and the facts that a reader needs.

A run repeats its benches N times, each time on new servers, one bench after the other: a drift of the machine is in
the spread of a line's samples then, not in the difference of two lines. The file is written after each repetition, so
that a run that is cut short leaves the complete ones.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

import mqlayer
from bench.registry import Line
from mqlayer.stack import NoServerProgram, best_postgres, best_redis

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "results"
OPTIONS: Final = "BENCH_"
"""Environment variables that change the size of benches begin so."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run was made: what figures depend on, and nothing that names the machine."""

    processor: str
    cores: int
    system: str
    python: str
    redis: str
    postgres: str


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """A line's figures of all repetitions; `baselines` and `ratios` are empty where it has no baseline."""

    bench: str
    name: str
    unit: str
    target: float | None
    values: tuple[float, ...]
    baselines: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str]:
        """A line in another unit is another line."""
        return self.name, self.unit

    @property
    def compared(self) -> tuple[float, ...]:
        """The figures that two runs are compared by: ratios, else values."""
        return self.ratios or self.values

    def median(self) -> Line:
        """Return the line of the medians."""
        ratio = statistics.median(self.ratios) if self.ratios else None
        baseline = statistics.median(self.baselines) if self.baselines else None
        value = statistics.median(self.values)
        return Line(name=self.name, value=value, unit=self.unit, baseline=baseline, ratio=ratio, target=self.target)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """A run. `loads` are load averages of a minute: before the run, and after each repetition.

    `changed` says that the tree had other changes than the commit; `options` are the `BENCH_…` variables.
    """

    format: Literal[1] = 1
    version: str
    commit: str
    changed: bool
    began_at: datetime
    machine: Machine
    options: Mapping[str, str]
    loads: tuple[float, ...]
    lines: tuple[Samples, ...] = ()

    @property
    def file_name(self) -> str:
        """Files are sorted by time when they are sorted by name."""
        return f"{self.began_at:%Y-%m-%dT%H%M%S}Z-{self.commit[:8]}.json"

    def with_repetition(self, taken: Iterable[tuple[str, Line]], load: float) -> Recording:
        """Return a recording with one repetition more: the lines by the names of their benches."""
        lines = {samples.key: samples for samples in self.lines}
        for bench, line in taken:
            key = line.name, line.unit
            before = lines.get(key) or Samples(
                bench=bench, name=line.name, unit=line.unit, target=line.target, values=(), baselines=(), ratios=()
            )
            lines[key] = msgspec.structs.replace(
                before,
                values=(*before.values, line.value),
                baselines=(*before.baselines, *given(line.baseline)),
                ratios=(*before.ratios, *given(line.ratio)),
            )
        return msgspec.structs.replace(self, loads=(*self.loads, load), lines=tuple(lines.values()))

    def write(self, folder: Path) -> Path:
        """Write the file; one of the same run is replaced as a whole."""
        folder.mkdir(exist_ok=True)
        path = folder / self.file_name
        beside = path.with_suffix(".part")
        beside.write_text(encode(self), "utf-8")
        return beside.replace(path)


def given(figure: float | None) -> tuple[float, ...]:
    """Return a figure that is there."""
    return () if figure is None else (figure,)


def new_recording(began_at: datetime) -> Recording:
    """Return a recording of this tree on this machine, without lines."""
    commit, changed = tree()
    options = {name: text for name, text in sorted(os.environ.items()) if name.startswith(OPTIONS)}
    return Recording(
        version=mqlayer.__version__,
        commit=commit,
        changed=changed,
        began_at=began_at.astimezone(UTC).replace(microsecond=0),
        machine=this_machine(),
        options=options,
        loads=(load(),),
    )


def read(path: Path) -> Recording:
    """Read a file. Raises ValueError with its name where it is no recording."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recording)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path.name}: {error}") from error


def all_of(folder: Path) -> list[Recording]:
    """Return all recordings, the earliest first."""
    return sorted((read(path) for path in folder.glob("*.json")), key=lambda one: one.began_at)


def encode(recording: Recording) -> str:
    """Return a file's text: a row for each fact and each line, so that a difference of two files can be read."""
    facts: dict[str, Any] = msgspec.to_builtins(recording)
    rows = ",\n".join(f"    {json.dumps(samples)}" for samples in facts.pop("lines"))
    head = "".join(f"  {json.dumps(name)}: {json.dumps(fact)},\n" for name, fact in facts.items())
    return f'{{\n{head}  "lines": [\n{rows}\n  ]\n}}\n'


def this_machine() -> Machine:
    """Return the facts of this machine."""
    return Machine(
        processor=processor(),
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        redis=program_name(best_redis),
        postgres=program_name(best_postgres),
    )


def program_name(best: Callable[[], object]) -> str:
    """Return the flavour and version of the server that a stage starts."""
    try:
        return str(best())
    except NoServerProgram:
        return "none"


def processor() -> str:
    """Return the model of the processor, else its architecture."""
    try:
        facts = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        facts = []
    models = (line.partition(":")[2].strip() for line in facts if line.startswith("model name"))
    return next(models, platform.machine())


def tree() -> tuple[str, bool]:
    """Return the commit of this tree, and whether files that git knows differ from it."""
    try:
        commit = git("rev-parse", "HEAD").strip()
        return commit, bool(git("status", "--porcelain", "--untracked-files=no").strip())
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def git(*words: str) -> str:
    """Ask git about this tree."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout


def load() -> float:
    """Return the load average of the last minute."""
    return round(os.getloadavg()[0], 1)
