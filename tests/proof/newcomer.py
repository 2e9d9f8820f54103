"""A newcomer follows a page: each step is pasted into a shell, on a clock that counts reading too.

`python -m tests.proof.newcomer` follows the tutorial from a wheel, in an empty environment; `tests/integration/
test_tutorial.py` follows it on the servers of the tests.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from mqlayer.testing import wait_until
from tests.fixtures.pages import BLOCK
from tests.fixtures.plain_install import LOCKS, ROOT, build_wheel, copy_pip, environment, pip

TUTORIAL: Final = ROOT / "docs" / "tutorial" / "ordered-consumer.md"
WORDS_PER_MINUTE: Final = 200
STEP_WITHIN_S: Final = 240.0
LISTENS_ON_S: Final = 10.0
SAVED: Final = re.compile(r"Save this as `(\S+)`[^\n]*:\n\n$")


class Step(NamedTuple):
    """A block that is pasted. `words`: those of the page up to its end; `file`: what it is saved as."""

    words: int
    text: str
    file: str | None
    left_out: bool
    """The page says that tests don't run it."""


class Milestone(NamedTuple):
    """What a newcomer waits for: after a step with the words `typed`, a line with `said`."""

    name: str
    typed: str
    said: str
    limit_s: float


MILESTONES: Final = (
    # Two workers may print at once: the line of one may begin in the middle of the other's.
    Milestone("first ordered message", "mqlayer consume", r"booked order 1 of ", 5 * 60),
    Milestone("service with a test", "pytest -q", r"\b1 passed", 10 * 60),
)


class Reached(NamedTuple):
    """When a step was over, or a milestone reached: time to read so far, and the machine's."""

    name: str
    reading_s: float
    machine_s: float

    @property
    def total_s(self) -> float:
        """Both: what a clock on the wall shows."""
        return self.reading_s + self.machine_s


def steps_of(page: Path) -> list[Step]:
    """Return what a page has one type or save."""
    text = page.read_text("utf-8")
    found, end = [], 0
    for block in BLOCK.finditer(text):
        name = SAVED.search(text[end : block.start()])
        if block["language"] == "bash" or name:
            words = len(text[: block.end()].split())
            found.append(Step(words, block["text"], name[1] if name else None, bool(block["mark"])))
        end = block.end()
    return found


@dataclass
class Shell:
    """One shell for all steps, as the page asks for."""

    process: subprocess.Popen[str]
    home: Path
    lines: list[str]

    @classmethod
    @contextmanager
    def opened(cls, home: Path, variables: Mapping[str, str]) -> Iterator[Self]:
        """Lend a shell; what it left running in the background ends with it."""
        with subprocess.Popen(
            ["/bin/bash", "-c", "set -eE; trap 'kill $(jobs -p)' ERR; while read -r next; do eval \"$next\"; done"],
            cwd=home, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            shell = cls(process, home, [])
            listener = threading.Thread(target=shell._listen, name="newcomer", daemon=True)
            listener.start()
            try:
                yield shell
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                listener.join(LISTENS_ON_S)

    def do(self, step: Step, number: int) -> None:
        """Save a file, or run a block to its end. Raises AssertionError where it fails."""
        if step.file is not None:
            (self.home / step.file).write_text(step.text, "utf-8")
            return
        block, over = self.home / f".step-{number}", f"step {number} is over"
        block.write_text(step.text, "utf-8")
        assert self.process.stdin is not None
        self.process.stdin.write(f". ./{block.name} </dev/null; echo {shlex.quote(over)}\n")
        self.process.stdin.flush()
        # A killed program may have left half a line before it.
        self.wait_for(rf"{over}$")

    def wait_for(self, said: str) -> None:
        """Wait until a line says something. Raises AssertionError with all that was printed."""
        pattern = re.compile(said)
        try:
            wait_until(lambda: self._says(pattern), timeout_s=STEP_WITHIN_S)
        except TimeoutError as error:
            raise AssertionError(f"no line says {said}: {self.output}") from error

    @property
    def output(self) -> str:
        """All that was printed."""
        return "".join(self.lines)

    def _says(self, pattern: re.Pattern[str]) -> bool:
        if any(pattern.search(line) for line in list(self.lines)):
            return True
        assert self.process.poll() is None, self.output
        return False

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)


def follow(
    steps: Sequence[Step], shell: Shell, *, before_s: float = 0.0, show: Callable[[Reached], None] = lambda _: None
) -> dict[str, Reached]:
    """Do all steps; return when each milestone was reached. `before_s`: what the machine took already."""
    began, waited_for, reached = time.monotonic() - before_s, list(MILESTONES), {}
    for number, step in enumerate(steps, 1):

        def now(name: str, words: int = step.words) -> Reached:
            return Reached(name, words / WORDS_PER_MINUTE * 60, time.monotonic() - began)

        shell.do(step, number)
        show(now(f"{step.file} saved" if step.file else step.text.splitlines()[0]))
        if waited_for and waited_for[0].typed in step.text:
            one = waited_for.pop(0)
            shell.wait_for(one.said)
            reached[one.name] = now(one.name)
    return reached


def too_late(reached: Mapping[str, Reached]) -> list[str]:
    """Return the milestones that were reached too late, or never."""
    return [one.name for one in MILESTONES if one.name not in reached or reached[one.name].total_s >= one.limit_s]


def main() -> int:
    """Follow the tutorial from a wheel in an empty environment; print the clock."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as directory:
        place = Path(directory)
        # The account of Postgres must be able to enter.
        place.chmod(0o755)
        for name in ("sources", "wheels"):
            (place / name).mkdir()
        wheels = build_wheel(place / "sources", place / "wheels").parent
        downloaded_s = download(wheels)
        with environment(place) as plain:
            copy_pip(plain)
            # No registry is asked for ours: a package of this name there would be somebody else's.
            variables = plain.variables(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(wheels))
            try:
                with Shell.opened(plain.home, variables) as shell:
                    reached = follow(steps_of(TUTORIAL), shell, before_s=downloaded_s, show=show)
            finally:
                # Also where a step failed.
                plain.run(plain.programs / "mqlayer", "down", "--erase")
    for one in MILESTONES:
        say(f"{clock(reached[one.name].total_s)}  {one.name}; the limit is {clock(one.limit_s)}")
    return 1 if too_late(reached) else 0


def download(wheels: Path) -> float:
    """Load what the steps install into a folder; return the seconds that it took."""
    began = time.monotonic()
    pip("download", "--no-cache-dir", "--require-hashes", "--requirement", LOCKS / "embedded.lock", "--dest", wheels)
    pip("download", "--no-cache-dir", "pytest", "--dest", wheels)
    show(Reached("(the packages are loaded)", 0.0, time.monotonic() - began))
    return time.monotonic() - began


def show(one: Reached) -> None:
    """Print a step: the clock, of it reading and machine, and what was typed."""
    times = f"{clock(one.total_s)}  read {clock(one.reading_s)}, machine {one.machine_s:5.1f} s"
    say(f"{times}  {one.name:.46}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60:2}:{int(seconds) % 60:02}"


if __name__ == "__main__":
    sys.exit(main())
