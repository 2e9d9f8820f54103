"""Loads the fixture plugins and gives every test the mark of its folder."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import redis.utils
from _pytest.nodeid import NodeId
from hypothesis import HealthCheck, settings

from mqlayer.failpoints import disarm_all
from mqlayer.large_bodies.options import forget_options
from mqlayer.redis.access import forget_access
from tests.fixtures.kept_connections import close_kept_connections
from tests.fixtures.missing_tools import pytest_terminal_summary as pytest_terminal_summary  # noqa: PLC0414  # a hook
from tests.fixtures.traces import no_provider_kept

pytest_plugins = [
    "tests.fixtures.archive_scenes",
    "tests.fixtures.archived",
    "tests.fixtures.browser",
    "tests.fixtures.clusters",
    "tests.fixtures.commands",
    "tests.fixtures.consumers",
    "tests.fixtures.gate_scenes",
    "tests.fixtures.kill_scenes",
    "tests.fixtures.next_release",
    "tests.fixtures.object_stores",
    "tests.fixtures.order_audit",
    "tests.fixtures.outboxes",
    "tests.fixtures.plain_install",
    "tests.fixtures.poolers",
    "tests.fixtures.power",
    "tests.fixtures.previous_release",
    "tests.fixtures.receivers",
    "tests.fixtures.reused_sessions",
    "tests.fixtures.servers",
    "tests.fixtures.spark",
    "tests.fixtures.spark_cluster",
    "tests.fixtures.stages",
    "tests.fixtures.threads",
    "tests.fixtures.worker_stores",
    "tests.fixtures.worlds",
]

# Each client of a test asks for the driver's version, which is read from its package's files: that takes longer than
# to connect.
vars(redis.utils)["get_lib_version"] = cache(redis.utils.get_lib_version)

# A failing assert of these shows both values, as in a test module.
pytest.register_assert_rewrite("tests.proof")

# Commands fold no lines for files and pipes, and a test is one; xdist says 80.
os.environ.pop("COLUMNS", None)

TESTS = Path(__file__).parent
SPARK_TIMEOUT_S = 600
# Hypothesis tries hundreds of examples, ten seconds of work that a busy machine makes minutes of.
PROPERTY_TIMEOUT_S = 400
# Half a minute of an idle machine, as the console's pages in a browser, is four of one that five workers share.
SLOW_TIMEOUT_S = 400
MARKED_FOLDERS = {"unit", "property", "integration", "chaos"}


# Where CI is set, Hypothesis tries the same examples each time, and keeps to itself how a failing one is made again.
# Hypothesis judges no example by its time: a stall of the machine lasts longer than its 200 ms.
_unhurried = settings(settings.get_profile("default"), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", _unhurried)
settings.register_profile("ci", _unhurried, derandomize=False, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "suite")


@pytest.fixture(autouse=True)
def process_as_before(no_thread_left: None) -> Iterator[None]:
    """What one test arms, starts, logs in as, traces with, or puts into MQLAYER_* variables, no other test meets."""
    before = {name: value for name, value in os.environ.items() if name.startswith("MQLAYER_")}
    with no_provider_kept():
        yield
    disarm_all()
    close_kept_connections()
    forget_access()
    forget_options()
    for name in [name for name in os.environ if name.startswith("MQLAYER_") and name not in before]:
        del os.environ[name]
    os.environ.update(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full`, too: more variants of a case")
    parser.addoption("--long", action="store_true", help="let chaos and races go on for minutes, not for seconds")


def pytest_configure() -> None:
    # The servers of tests have neither TLS nor Kerberos unless a test says so: asking each for both costs a sixth of a
    # connection.
    os.environ.setdefault("PGSSLMODE", "disable")
    os.environ.setdefault("PGGSSENCMODE", "disable")
    # Started in the background of a script, processes ignore SIGINT, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if not config.getoption("--full"):
        leave_out(config, [item for item in items if item.get_closest_marker("full")], items)
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if folder == "property":
            item.add_marker(pytest.mark.timeout(PROPERTY_TIMEOUT_S))
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
            # The first of them starts the session, which takes a minute of a busy machine; a session that a limit
            # interrupts serves no other test.
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
        if not item.get_closest_marker("timeout") and any(item.get_closest_marker(mark) for mark in ("slow", "full")):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
    yield
    let_groups_be_groups(items)
    # After they were shuffled.
    items[:] = long_ones_early(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    # Collected tests stay until the end; each full garbage collection would look at all of them again. So does the
    # little garbage among them: to find it takes a tenth of collecting.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # A test makes more objects than Python's first 700.
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # The last look for garbage that matters: ten more of pytest's follow, and some at the interpreter's end, each over
    # all that tests left, two seconds of a core.
    gc.collect()
    gc.freeze()


def leave_out(config: pytest.Config, some: list[pytest.Item], items: list[pytest.Item]) -> None:
    """Take some of the tests out of a run, and say so."""
    if some:
        config.hook.pytest_deselected(items=some)
        left = set(some)
        items[:] = [item for item in items if item not in left]


def let_groups_be_groups(items: list[pytest.Item]) -> None:
    """Give grouped tests the ids that pytest-xdist 3.8 means: pytest 9.2 keeps them in another attribute."""
    for item in items:
        if named := vars(item).get("_nodeid"):
            item._id = NodeId.parse(named)


def long_ones_early(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put groups, each of which one worker runs, first, and spread slow tests over the first half.

    At the end one worker would wait for another's.
    """
    kinds: dict[str, list[pytest.Item]] = {"xdist_group": [], "slow": [], "": []}
    for item in items:
        kinds[next((mark for mark in ("xdist_group", "slow") if item.get_closest_marker(mark)), "")].append(item)
    grouped, slow, others = kinds.values()
    apart = max(1, len(others) // 2 // max(1, len(slow)))
    ordered: list[pytest.Item] = []
    for number, item in enumerate(slow):
        ordered += [*others[number * apart : (number + 1) * apart], item]
    return grouped + ordered + others[len(slow) * apart :]
