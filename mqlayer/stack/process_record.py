"""Port and process of a directory's server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import msgspec

from mqlayer.stack.errors import DirectoryRefused
from mqlayer.stack.private_files import write_closed
from mqlayer.stack.processes import ProcessId, is_running

FILE_NAME = "process.json"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Port, process and container of a server."""

    port: int = 0
    process: ProcessId | None = None
    container: str = ""

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read the record, if any. Raises DirectoryRefused."""
        try:
            return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except msgspec.MsgspecError as error:
            raise DirectoryRefused(directory, f"{FILE_NAME} is not readable ({error}): remove it") from error

    def save(self, directory: Path) -> None:
        """Write the record atomically."""
        write_closed(directory / FILE_NAME, msgspec.json.format(msgspec.json.encode(self)))

    def with_process(self, process: ProcessId | None) -> Self:
        """Return a copy with another process."""
        return replace(self, process=process)

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self.process is not None and is_running(self.process)

    @property
    def pid(self) -> int | None:
        """The live process's pid, else None."""
        return self.process.pid if self.process is not None and is_running(self.process) else None
