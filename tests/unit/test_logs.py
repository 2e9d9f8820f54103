"""How log records are shown."""

from __future__ import annotations

import json
import logging
import sys

from mqlayer.logs import EventFormatter, JsonFormatter


def record(event: str, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": event, "levelname": "INFO", "name": "mqlayer.relay", **fields})


def test_a_value_with_blanks_is_quoted_on_one_line() -> None:
    line = EventFormatter().format(record("reading_waits", reason='it said "no"\nand left', empty=""))
    assert line.endswith(r'reading_waits reason="it said \"no\"\nand left" empty=""')


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
