"""A program that tests fork off is as one that was started: environment, outputs, how it ends, and its failpoints."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python, run_python, start_python
from tests.fixtures.wait import wait_until

PROGRAM = """
import os, sys, threading
from mqlayer.failpoints import failpoint
print(__name__, sys.argv[1:], os.environ["OF_THE_TEST"], os.getcwd(), threading.active_count(), flush=True)
if sys.argv[1] == "wait":
    threading.Event().wait()
failpoint("a.place")
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """The name of a module in the test's directory."""
    (tmp_path / "program_of_a_test.py").write_text(PROGRAM)
    return "program_of_a_test"


def environment(tmp_path: Path, failpoints: str = "") -> dict[str, str]:
    return {**os.environ, "OF_THE_TEST": "yes", "PYTHONPATH": str(tmp_path), **armed(failpoints)}


def test_it_has_what_it_was_given_and_ends_with_its_own_code(program: str, tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as said:
        code = run_python(program, "go", "7", env=environment(tmp_path), cwd=tmp_path, stdout=said, timeout=20)
    assert code == 7
    assert (tmp_path / "said").read_text() == f"__main__ ['go', '7'] yes {tmp_path} 1\n"


def test_its_failpoints_are_its_own(program: str, tmp_path: Path) -> None:
    armed = environment(tmp_path, "a.place=kill")
    assert run_python(program, "go", "0", env=armed, timeout=20) == -signal.SIGKILL
    assert run_python(program, "go", "0", env=environment(tmp_path), timeout=20) == 0


def test_it_is_killed_as_any_process_and_waited_for_with_a_limit(program: str, tmp_path: Path) -> None:
    process = start_python(program, "wait", env=environment(tmp_path), stdout=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.kill()
    assert process.wait(20) == process.returncode == -signal.SIGKILL
    process.kill()


def test_an_error_of_it_is_told_as_python_tells_it(program: str, tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as said:
        code = run_python(program, "go", env=environment(tmp_path), stderr=said, stdout=said, timeout=20)
    assert code == 1
    assert "IndexError" in (tmp_path / "said").read_text()


def test_what_it_says_is_handed_back_and_a_text_runs_as_a_module_does(tmp_path: Path) -> None:
    text = "import sys; print(__name__, sys.argv); print('no', file=sys.stderr); sys.exit(3)"
    done = ask_python("-c", text, "ä", env=environment(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (3, "__main__ ['-c', 'ä']\n", "no\n")
    armed = environment(tmp_path, "a.place=kill")
    text = "from mqlayer.failpoints import failpoint; failpoint('a.place')"
    assert ask_python("-c", text, env=armed).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import atexit; atexit.register(print, 'bye')", 0, ("bye\n", "")),
        ("import threading, time; threading.Timer(0.05, print, ['last']).start()", 0, ("last\n", "")),
        ("raise SystemExit", 0, ("", "")),
        ("raise SystemExit('why')", 1, ("", "why\n")),
        ("raise SystemExit(257)", 1, ("", "")),
        ("import sys; sys.stdout.write('no line')", 0, ("no line", "")),
    ],
)
def test_it_ends_as_an_interpreter_does(text: str, code: int, said: tuple[str, str], tmp_path: Path) -> None:
    done = ask_python("-c", text, env=environment(tmp_path))
    assert (done.returncode, (done.stdout, done.stderr)) == (code, said)


def test_it_has_a_session_of_its_own_where_that_is_asked(program: str, tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as said:
        process = start_python(program, "wait", env=environment(tmp_path), stdout=said, new_session=True)
    wait_until((tmp_path / "said").read_text, what="it runs")
    assert os.getsid(process.pid) == process.pid
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
