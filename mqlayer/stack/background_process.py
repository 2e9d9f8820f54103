"""mqlayer's own background processes of a stack."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mqlayer.stack import processes
from mqlayer.stack.errors import ServerFailed
from mqlayer.stack.private_files import FILE_MODE, closed_directory
from mqlayer.stack.process_record import ProcessRecord
from mqlayer.stack.wait import comes_true

READY_WITHIN_S = 60.0


@dataclass(frozen=True)
class BackgroundProcess:
    """A Python process that belongs to a directory."""

    directory: Path
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    ready_line: str

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return ProcessRecord.load(self.directory).running

    @property
    def pid(self) -> int | None:
        """The running process's pid, else None."""
        return ProcessRecord.load(self.directory).pid

    @property
    def log(self) -> Path:
        """The process's log file."""
        return self.directory / f"{self.directory.name}.log"

    def start(self) -> None:
        """Return when the process is ready. Raises ServerFailed."""
        if self.running:
            return
        closed_directory(self.directory)
        self.log.touch(mode=FILE_MODE)
        seen = self.log.stat().st_size
        process = processes.spawn([sys.executable, *self.arguments], log=self.log, environment=self.environment)
        ProcessRecord(process=process).save(self.directory)
        comes_true(lambda: self._is_ready(seen) or not self.running, within_s=READY_WITHIN_S)
        if not self._is_ready(seen):
            self._give_up()

    def stop(self) -> None:
        """Stop the process (SIGTERM)."""
        record = ProcessRecord.load(self.directory)
        if record.process is not None:
            processes.stop(record.process, by=signal.SIGTERM)
            record.with_process(None).save(self.directory)

    def erase(self) -> None:
        """Stop the process, remove its log and state."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _is_ready(self, seen: int) -> bool:
        with self.log.open("rb") as log:
            log.seek(seen, os.SEEK_SET)
            return self.ready_line.encode() in log.read()

    def _give_up(self) -> None:
        reason = f"was not ready within {READY_WITHIN_S:g} s" if self.running else "ended at once"
        self.stop()
        raise ServerFailed(self.directory.name, reason, self.log, processes.last_lines(self.log))
