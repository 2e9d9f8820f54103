"""Logs of the commands: an event name and its fields, one line each, on standard error."""

from __future__ import annotations

import logging
from typing import Final

import typer

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
# What every record has by itself; the rest are the fields that the event was logged with.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class EventFormatter(logging.Formatter):
    """`time level event field=value …`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's name
        """Return the line, its fields in the order in which they were given."""
        fields = (f" {name}={value}" for name, value in vars(record).items() if name not in _STANDARD)
        return super().formatMessage(record) + "".join(fields)


def configure_logging(level: str) -> None:
    """Send the logs of this process to standard error."""
    if level.upper() not in LEVELS:
        raise typer.BadParameter(f"{level!r}: use one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
