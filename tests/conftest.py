"""Loads the fixture plugins and gives every test the mark of its folder."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

pytest_plugins = [
    "tests.fixtures.archived",
    "tests.fixtures.commands",
    "tests.fixtures.consuming",
    "tests.fixtures.outboxes",
    "tests.fixtures.servers",
    "tests.fixtures.spark",
]

TESTS = Path(__file__).parent
MARKED_FOLDERS = {"unit", "property", "integration", "chaos"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="let chaos and races go on for minutes, not for seconds")


def pytest_configure() -> None:
    # Started in the background of a script, processes ignore SIGINT, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
