"""The one way in which tests wait."""

from __future__ import annotations

import pytest

from tests.fixtures.wait import wait_until


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
