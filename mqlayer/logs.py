"""Log lines: an event with fields, without secrets; with any logging configuration, plain or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from mqlayer.arguments import explain
from mqlayer.errors import InvalidInput, redact
from mqlayer.escaping import escape, json_line

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
TRACE: Final = "trace"
"""The field that holds a traceback."""
# Attributes of every record; all others are the event's fields. `data` is Celery's.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "data"}
_NEEDS_QUOTES: Final = frozenset(" \t\r\n\"'=")
_trace_ids: Final[list[Callable[[], Mapping[str, str]]]] = []


def carry_trace_ids(read: Callable[[], Mapping[str, str]]) -> None:
    """Have lines carry the current span's ids."""
    _trace_ids[:] = [read]


class EventText:
    """The message of a log record: its text is `event field=value …`, and below it the traceback if it has one."""

    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: Mapping[str, Any]) -> None:
        self.event, self.fields = event, fields

    def __str__(self) -> str:
        shown = (f" {name}={_quote(value)}" for name, value in self.fields.items() if name != TRACE)
        trace = self.fields.get(TRACE)
        line = escape(self.event + "".join(shown))
        return redact(f"{line}\n{escape(str(trace), lines=True)}" if trace else line)


class EventLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs an event with fields: `log.warning("node_away", extra={"node": name})`.

    The fields are in the text, for handlers that know nothing of mqlayer, and attributes of the record.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log an event; `args` are put into its name, never into its fields' text."""
        if self.isEnabledFor(level):
            extra = kwargs.get("extra") or {}
            for read in _trace_ids:
                extra = {**read(), **extra}
            text = EventText(str(msg) % args if args else str(msg), extra)
            # The line that is told is the caller's, not this one.
            told = {**kwargs, "extra": extra, "stacklevel": kwargs.get("stacklevel", 1) + 1}
            self.logger.log(level, text, **told)


def is_reported(failures: int) -> bool:
    """Whether a failure, the how many-th in a row, gets a line: the first, the fifth, and each thirtieth."""
    return failures in (1, 5) or failures % 30 == 0


def event_logger(name: str) -> EventLogger:
    """Return a module's logger."""
    return EventLogger(logging.getLogger(name))


class EventFormatter(logging.Formatter):
    """`time level event field=value …`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002
        """Return the time in UTC: a framework may set another zone for its process."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(" ", timespec="milliseconds")
        return at.replace("+00:00", "Z")

    def format(self, record: logging.LogRecord) -> str:
        """Return text without secrets."""
        return redact(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's name
        """Return the line."""
        if isinstance(record.msg, EventText):
            return super().formatMessage(record)
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
            "event": event_of(record),
        }
        line |= fields_of(record)
        if record.exc_info:
            line[TRACE] = self.formatException(record.exc_info)
        return redact(json_line(line))


class StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        self.stream = sys.stderr
        # Of other loggers; this is still the thread that logs.
        for read in _trace_ids if not isinstance(record.msg, EventText) else ():
            vars(record).update({name: value for name, value in read().items() if name not in vars(record)})
        super().emit(record)


@explain
def configure_logging(level: str = "INFO", *, style: Literal["text", "json"] = "text") -> None:
    """Log everything from `level` on to standard error; other handlers stay, and a second call replaces the first.

    Raises InvalidInput for another level or style.
    """
    if level.upper() not in LEVELS:
        raise InvalidInput(f"{level!r} is no level: use one of {', '.join(LEVELS)}")
    if style not in ("text", "json"):
        raise InvalidInput(f"{style!r} is no style: use 'text' or 'json'")
    handler = StandardErrorHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else EventFormatter())
    root = logging.getLogger()
    root.handlers[:] = [other for other in root.handlers if not isinstance(other, StandardErrorHandler)] + [handler]
    root.setLevel(level.upper())


def event_of(record: logging.LogRecord) -> str:
    """Return a record's event, of other loggers their text."""
    return record.msg.event if isinstance(record.msg, EventText) else record.getMessage()


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the event's fields."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _quote(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or _NEEDS_QUOTES.intersection(text) else text
