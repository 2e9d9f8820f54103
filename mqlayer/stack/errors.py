"""Errors of the local stack."""

from __future__ import annotations

from pathlib import Path

from mqlayer.errors import MqlayerError


class StackError(MqlayerError):
    """A server of the local stack cannot run."""


class NoServerProgram(StackError):
    """No address, program, Docker or wheel is available."""

    def __init__(self, kind: str, hint: str) -> None:
        super().__init__(kind, hint)
        self.kind, self.hint = kind, hint

    def __str__(self) -> str:
        return f"no {self.kind} server found: {self.hint}"


class ServerFailed(StackError):
    """A process ended or was not ready in time."""

    def __init__(self, name: str, reason: str, log: Path, last_lines: str = "") -> None:
        super().__init__(name, reason, log, last_lines)
        self.name, self.reason, self.log, self.last_lines = name, reason, log, last_lines

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}; see {self.log}" + (f":\n{self.last_lines}" if self.last_lines else "")


class DirectoryRefused(StackError):
    """A directory is unsafe or unusable for a server."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory, self.reason = directory, reason

    def __str__(self) -> str:
        return f"{self.directory}: {self.reason}"
