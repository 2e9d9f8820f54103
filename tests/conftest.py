"""Loads the fixture plugins and gives every test the mark of its folder."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mqlayer.redis.access import forget_access
from tests.fixtures.missing_tools import parts_left_out

pytest_plugins = [
    "tests.fixtures.archived",
    "tests.fixtures.commands",
    "tests.fixtures.consumers",
    "tests.fixtures.dead_nodes",
    "tests.fixtures.outboxes",
    "tests.fixtures.plain_install",
    "tests.fixtures.poolers",
    "tests.fixtures.power",
    "tests.fixtures.servers",
    "tests.fixtures.spark",
    "tests.fixtures.worker_stores",
]

TESTS = Path(__file__).parent
SLOW = {
    "test_chaos.py",
    "test_consumer_ownership.py",
    "test_demo.py",
    "test_failing_keys.py",
    "test_parking_kills.py",
    "test_periodic_jobs.py",
    "test_power_cut.py",
    "test_node_sender.py",
    "test_receiver_kills.py",
    "test_relay_chaos.py",
    "test_route_machine.py",
    "test_models.py",
    "test_tutorial.py",
}
"""Files with tests of ten seconds and more."""
MARKED_FOLDERS = {"unit", "property", "integration", "chaos"}


# Where CI is set, Hypothesis tries the same examples each time, and keeps to itself how a failing one is made again.
settings.register_profile("ci", settings.get_profile("default"), derandomize=False, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """What one test lets the process log in as, or find in MQLAYER_* variables, no other test of the process meets."""
    before = {name: value for name, value in os.environ.items() if name.startswith("MQLAYER_")}
    yield
    forget_access()
    for name in [name for name in os.environ if name.startswith("MQLAYER_") and name not in before]:
        del os.environ[name]
    os.environ.update(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="let chaos and races go on for minutes, not for seconds")


def pytest_configure() -> None:
    # Started in the background of a script, processes ignore SIGINT, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end which parts of tests were left out: the reasons of whole ones come with `-rs`, see pyproject."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    if lines := parts_left_out(reports):
        terminalreporter.section("parts left out")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
    yield
    # After they were shuffled.
    items[:] = slow_ones_early(items)


def slow_ones_early(items: list[pytest.Item]) -> list[pytest.Item]:
    """Spread the tests of slow files over the first half: at the end one worker would wait for another's."""
    slow = [item for item in items if item.path.name in SLOW]
    others = [item for item in items if item.path.name not in SLOW]
    apart = max(1, len(others) // 2 // max(1, len(slow)))
    ordered: list[pytest.Item] = []
    for number, item in enumerate(slow):
        ordered += [*others[number * apart : (number + 1) * apart], item]
    return ordered + others[len(slow) * apart :]
