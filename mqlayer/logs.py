"""Log formats: an event with fields, without secrets."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

from mqlayer.errors import redact
from mqlayer.escaping import escape, json_line

# Attributes of every record; all others are the event's fields. `data` is Celery's.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "data"}
_NEEDS_QUOTES: Final = frozenset(" \t\r\n\"'=")


class EventFormatter(logging.Formatter):
    """`time level event field=value …`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return text without secrets."""
        return redact(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's name
        """Return the line."""
        shown = (f" {name}={_quote(value)}" for name, value in fields_of(record).items())
        return escape(super().formatMessage(record) + "".join(shown))

    def formatException(self, ei: Any) -> str:  # noqa: N802  # the base class's name
        """Return the escaped trace."""
        return escape(super().formatException(ei), lines=True)

    def formatStack(self, stack_info: str) -> str:  # noqa: N802  # the base class's name
        """Return the escaped stack."""
        return escape(super().formatStack(stack_info), lines=True)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: `at`, `level`, `logger`, `event`, the fields, `trace` of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        """Return JSON without secrets."""
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= fields_of(record)
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return redact(json_line(line))


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the event's fields."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _quote(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or _NEEDS_QUOTES.intersection(text) else text
