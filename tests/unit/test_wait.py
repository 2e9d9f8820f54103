"""The one way in which tests wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures.wait import LONGEST_TICK_S, wait_until

TESTS = Path(__file__).parents[1]
STOOD_STILL = """
import os, signal
from tests.fixtures.wait import awake_s, wait_until

began = awake_s()
wait_until(lambda: awake_s() > began, what="the clock ticks")
began = awake_s()
os.kill(os.getpid(), signal.SIGSTOP)
wait_until(lambda: awake_s() > began, what="the clock ticks again")
print(awake_s() - began)
"""


def test_the_first_true_value_is_returned() -> None:
    answers = iter([0, "", "here"])
    assert wait_until(lambda: next(answers), what="an answer") == "here"


def test_a_failed_assertion_counts_as_not_yet() -> None:
    answers = iter([1, 2, 3])

    def is_three() -> bool:
        assert next(answers) == 3
        return True

    assert wait_until(is_three, what="three")


def test_a_passed_deadline_fails_and_says_what_was_waited_for() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"not within 0.01 s: the end of days \(last: False\)"):
        wait_until(lambda: False, timeout_s=0.01, what="the end of days")


def test_another_error_is_raised_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 / 0, what="a miracle")


def test_a_time_in_which_a_process_stood_still_does_not_count() -> None:
    still_s = 3 * LONGEST_TICK_S
    with subprocess.Popen(
        [sys.executable, "-c", STOOD_STILL], stdout=subprocess.PIPE, text=True, cwd=TESTS.parent
    ) as child:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > still_s, what="it stands still")
        child.send_signal(signal.SIGCONT)
        told = float(child.communicate(timeout=30)[0])
    assert 0 < told < still_s


def test_no_test_has_an_upper_limit_by_the_wall_clock() -> None:
    """A machine may stand still for ten seconds: `awake_s` is for limits."""
    limit = re.compile(r"assert .*\b(monotonic|perf_counter|clock|time)\(\) - \w+ <")
    found = [
        f"{path.relative_to(TESTS)}:{number}"
        for path in TESTS.rglob("test_*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if limit.search(line)
    ]
    assert found == []
