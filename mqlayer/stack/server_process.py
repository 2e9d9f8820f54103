"""A local server process that belongs to a directory."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, NoReturn, Self

from mqlayer.stack import processes
from mqlayer.stack.errors import ServerFailed
from mqlayer.stack.process_record import ProcessRecord


class ServerProcess(ABC):
    """One server on 127.0.0.1. Any process can find, stop or restart it by its directory."""

    log_name: ClassVar[str]

    def __init__(self, directory: Path, software: object) -> None:
        self.directory, self._software = directory, software

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._software} {self.directory} port={self.port}>"

    @property
    def port(self) -> int:
        """Port of this or the last run, else 0."""
        return self._record.port

    @property
    def pid(self) -> int | None:
        """The running process's pid, else None."""
        return self._record.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive, also under SIGSTOP."""
        return self._record.running

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self.directory / self.log_name

    @abstractmethod
    def start(self) -> None:
        """Return when the server answers, on its last port if free. Raises ServerFailed."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the server; data stay."""

    def kill(self) -> None:
        """Kill the server."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Restart: same port and data."""
        self.stop()
        self.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        if process := self._record.process:
            processes.send(process, number)

    @property
    def _record(self) -> ProcessRecord:
        return ProcessRecord.load(self.directory)

    def _end(self, by: signal.Signals) -> None:
        record = self._record
        if record.process is not None:
            processes.stop(record.process, by=by)
            record.with_process(None).save(self.directory)

    def _give_up(self, within_s: float) -> NoReturn:
        reason = f"was not ready within {within_s:g} s" if self.running else "ended at once"
        self.kill()
        raise ServerFailed(str(self._software), reason, self.log, processes.last_lines(self.log))
