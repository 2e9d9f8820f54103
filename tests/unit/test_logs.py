"""How log records are shown."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from typing import Literal

import pytest

import mqlayer
from mqlayer.errors import InvalidInput
from mqlayer.logs import EventFormatter, EventText, JsonFormatter, event_logger, is_reported


def record(event: str, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": event, "levelname": "INFO", "name": "mqlayer.relay", **fields})


def test_a_value_with_blanks_is_quoted_on_one_line() -> None:
    line = EventFormatter().format(record("reading_waits", reason='it said "no"\nand left', empty=""))
    assert line.endswith(r'reading_waits reason="it said \"no\"\nand left" empty=""')


def test_a_line_has_its_time_in_utc_whatever_zone_a_framework_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/Chicago")
    time.tzset()
    try:
        line = EventFormatter().format(record("relay_started", created=0.25))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert line == "1970-01-01 00:00:00.250Z INFO relay_started"


def test_json_lines_have_the_event_and_its_fields() -> None:
    line = json.loads(JsonFormatter().format(record("partition_acquired", partition=3, reason="a b")))
    assert line.pop("at").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "logger": "mqlayer.relay",
        "event": "partition_acquired",
        "partition": 3,
        "reason": "a b",
    }


def test_a_trace_stays_in_its_json_line() -> None:
    try:
        raise ValueError("redis://:s3cret@host/0")
    except ValueError:
        failed = record("member_failed", exc_info=sys.exc_info())
    text = JsonFormatter().format(failed)
    assert "\n" not in text
    assert "ValueError" in json.loads(text)["trace"]


def test_no_password_of_an_address_is_shown() -> None:
    waits = record("settling_waits", reason="redis://user:s3cret@host/0 and password=s3cret host=h")
    for formatter in (EventFormatter(), JsonFormatter()):
        assert "s3cret" not in formatter.format(waits)


def test_any_configuration_of_logging_shows_the_fields() -> None:
    log, shown = event_logger("mqlayer.test"), io.StringIO()
    handler = logging.StreamHandler(shown)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(message)s"))
    log.logger.addHandler(handler)
    try:
        log.warning("handler_failed", extra={"topic": "orders", "error": "redis://:s3cret@host \x1b[2J"})
    finally:
        log.logger.removeHandler(handler)
    assert shown.getvalue() == 'WARNING:handler_failed topic=orders error="redis://***@host \\u001b[2J"\n'


def test_a_traceback_stands_below_the_line_and_in_its_own_json_field() -> None:
    fields = {"topic": "orders", "trace": "  File one\nValueError: a\x1bb"}
    failed = record("", **fields)
    failed.msg = EventText("handler_failed", fields)
    assert (
        EventFormatter().format(failed).endswith("INFO handler_failed topic=orders\n  File one\nValueError: a\\u001bb")
    )
    line = json.loads(JsonFormatter().format(failed))
    assert (line["event"], line["trace"]) == ("handler_failed", fields["trace"])


@pytest.mark.parametrize("style", ["text", "json"])
def test_logging_is_configured_by_one_call_and_anew_by_the_next(
    style: Literal["text", "json"], capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        mqlayer.configure_logging(style="text")
        mqlayer.configure_logging("warning", style=style)
        event_logger("mqlayer.test").warning("node_away", extra={"node": "n-1"})
        event_logger("mqlayer.test").info("not_shown")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["node"] == "n-1" if style == "json" else line.endswith("WARNING node_away node=n-1")


def test_another_level_or_style_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidInput, match="DEBUG, INFO, WARNING, ERROR"):
        mqlayer.configure_logging("loud")
    with pytest.raises(InvalidInput, match="'text' or 'json'"):
        mqlayer.configure_logging(style="xml")  # type: ignore[arg-type]


def test_a_name_may_be_put_together_and_a_field_never_is_a_format() -> None:
    log, shown = event_logger("mqlayer.test"), io.StringIO()
    handler = logging.StreamHandler(shown)
    handler.setFormatter(logging.Formatter("%(module)s %(message)s"))
    log.logger.addHandler(handler)
    try:
        log.warning("%s_%s", "reading", "waits", extra={"reason": "100 %s of it"})
    finally:
        log.logger.removeHandler(handler)
    assert shown.getvalue() == 'test_logs reading_waits reason="100 %s of it"\n'


def test_of_failures_in_a_row_few_are_told() -> None:
    assert [failures for failures in range(1, 100) if is_reported(failures)] == [1, 5, 30, 60, 90]
