"""The command itself: how it fails, what it logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

import mqlayer
from mqlayer.cli.errors import ErrorPrintingGroup
from mqlayer.cli.main import app
from mqlayer.errors import StoreUnavailable
from mqlayer.logs import EventFormatter


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands configure the root logger; tests share it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def failing_app(error: Exception) -> typer.Typer:
    failing = typer.Typer(cls=ErrorPrintingGroup, pretty_exceptions_enable=False)
    group = typer.Typer()
    failing.add_typer(group, name="group")

    @group.command()
    def fail() -> None:
        raise error

    return failing


def test_an_error_of_ours_is_one_line_on_standard_error() -> None:
    error = StoreUnavailable("redis://:s3cret@127.0.0.1:1/0", "refused [bold]" + " and so on" * 30)
    result = CliRunner().invoke(failing_app(error), ["group", "fail"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"mqlayer: {error}\n"
    assert "s3cret" not in result.stderr


def test_a_bug_is_not_hidden() -> None:
    result = CliRunner().invoke(failing_app(ZeroDivisionError()), ["group", "fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_the_version_is_shown() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{mqlayer.__version__}\n"


def test_an_unknown_log_level_is_refused() -> None:
    result = CliRunner().invoke(app, ["--log-level", "loud", "status"])
    assert result.exit_code == 2
    assert "use one of DEBUG, INFO, WARNING, ERROR" in " ".join(result.stderr.split())


def test_a_log_line_shows_the_event_and_its_fields() -> None:
    record = logging.makeLogRecord({"msg": "relay_started", "levelname": "INFO", "lps": 1024, "source": "bank"})
    assert EventFormatter().format(record).endswith("INFO relay_started lps=1024 source=bank")
