"""The processes of `bench.consumer_process`, and what they note."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench.consumer_notes import NOTE
from bench.latency import await_line
from bench.stage import System

PATIENCE_S: Final = 60.0
CONSUME: Final = ("-m", "mqlayer", "consume", "bench.consumer_process:app")


class Note(NamedTuple):
    """A message that was handled."""

    partition: int
    at_ns: int


class Notes:
    """What one process has handled."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    @property
    def handled(self) -> int:
        """How many messages it has handled."""
        return self._notes.stat().st_size // NOTE.size if self._notes.exists() else 0

    def notes(self, since_ns: int = 0) -> list[Note]:
        """Return what it has handled since a time."""
        count = self.handled
        found = self._notes.read_bytes()[: count * NOTE.size] if count else b""
        # A binary search costs little: a measurement runs beside it.
        first = bisect_left(range(count), since_ns, key=lambda number: NOTE.unpack_from(found, number * NOTE.size)[1])
        return [Note(*note) for note in NOTE.iter_unpack(found[first * NOTE.size :])]

    def partitions(self, since_ns: int) -> set[int]:
        """Return the partitions of which it has handled messages since a time."""
        return {note.partition for note in self.notes(since_ns)}


class Worker(Notes):
    """One process, and its notes."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], notes: Path, place: Path | None = None
    ) -> None:
        super().__init__(notes)
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **environment, "BENCH_NOTES": str(notes), "MQLAYER_LOG_LEVEL": "ERROR"},
            cwd=place,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_ready(self) -> None:
        """Wait until it says so."""
        await_line(self.process)

    def go(self) -> None:
        """Let it join."""
        if self.process.stdin is not None:
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def child(self, pid: int) -> Notes:
        """Return the notes of a child, with `BENCH_EACH`."""
        return Notes(self._notes.with_name(f"{self._notes.name}.{pid}"))

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal; return when that was, in ns."""
        at_ns = time.monotonic_ns()
        self.process.send_signal(number)
        return at_ns


class ConsumerGroup:
    """The processes of one group."""

    def __init__(self, system: System, directory: Path, facts: Mapping[str, str]) -> None:
        self.group = f"g{uuid.uuid4().hex[:8]}"
        self.workers: list[Worker] = []
        self._directory, self._started = directory, 0
        self._environment = {"MQLAYER_DSN": system.dsn, "BENCH_GROUP": self.group, **facts}

    def start(self, *arguments: str, place: Path | None = None, path: str = "") -> Worker:
        """Start one more; of another release where `place` and `path` (PYTHONPATH) say so."""
        self._started += 1
        environment = self._environment | ({"PYTHONPATH": path} if path else {})
        notes = self._directory / f"{self.group}-{self._started}"
        worker = Worker(arguments or CONSUME, environment, notes, place)
        self.workers.append(worker)
        return worker

    def end(self, worker: Worker, number: signal.Signals = signal.SIGTERM) -> int:
        """Send one a signal, and count it out; return when that was, in ns."""
        self.workers.remove(worker)
        return worker.end(number)

    def await_balance(self, partitions: int) -> None:
        """Wait until all handle messages of their equal shares of the partitions."""

        def balanced() -> bool:
            since_ns = time.monotonic_ns() - int(0.5e9)
            shares = [worker.partitions(since_ns) for worker in self.workers]
            sizes = [len(share) for share in shares]
            return max(sizes) - min(sizes) <= 1 and sum(sizes) == len(set[int]().union(*shares)) == partitions

        wait_until(balanced)

    def close(self) -> None:
        """End all, at once."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.communicate()


@contextmanager
def consumer_group(system: System, **facts: object) -> Iterator[ConsumerGroup]:
    """Lend a new group; `facts` are of the environment of its processes."""
    with tempfile.TemporaryDirectory(prefix="mqlayer-bench-") as directory:
        members = ConsumerGroup(system, Path(directory), {name: str(fact) for name, fact in facts.items()})
        try:
            yield members
        finally:
            members.close()


def wait_until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition, not for ever."""
    until = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"it did not come about within {patience_s:g} s")
        time.sleep(0.02)
