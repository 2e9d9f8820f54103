"""What is left out for something that the machine lacks is said, and fails where CI is set. Case 79."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.fixtures.forked_programs import ask_python

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = """
import pytest
from tests.fixtures.missing_tools import import_or_leave_out, leave_out, leave_out_part

def test_whole():
    leave_out("no such server")

def test_package():
    import_or_leave_out("no_such_package")

def test_part(request):
    leave_out_part(request, "no such judge")
"""
REASONS: Final = ("no such server", "No module named 'no_such_package'", "no such judge")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite whose tests each lack something, with the hook of ours that sums up."""
    (tmp_path / "test_missing_tools.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.fixtures.missing_tools import pytest_terminal_summary\n")
    return tmp_path


def run(suite: Path, *options: str, ci: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options, str(suite)]
    # Plugins that the suite has no use for would take most of its time.
    environment = os.environ | {"CI": ci, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "in two processes"])
def test_what_is_left_out_is_said_at_the_end(suite: Path, options: tuple[str, ...]) -> None:
    ended = run(suite, *options, ci="")
    assert ended.returncode == 0, ended.stdout
    _, _, summary = ended.stdout.partition("parts left out")
    assert "test_part: no such judge" in summary
    assert all(reason in ended.stdout for reason in REASONS)
    assert "1 passed, 2 skipped" in summary


def test_where_ci_is_set_each_of_them_fails(suite: Path) -> None:
    ended = run(suite, ci="true")
    assert ended.returncode == 1
    assert all(f"left out, where CI is set: {reason}" in ended.stdout for reason in REASONS)
    assert "3 failed" in ended.stdout


def test_the_judge_of_the_chaos_run_is_missed_in_ci_where_there_is_no_java(tmp_path: Path) -> None:
    """Case 79: the run is not begun without it."""
    environment = os.environ | {"CI": "true", "JAVA_HOME": str(tmp_path)}
    options = ("-q", "-p", "no:cacheprovider", "tests/chaos/test_chaos.py")
    ended = ask_python("pytest", *options, env=environment, cwd=ROOT)
    assert ended.returncode == 1
    assert "left out, where CI is set: Spark's order audit" in ended.stdout
    assert "JAVA_HOME has no bin/java: install Java 17 or newer" in ended.stdout
