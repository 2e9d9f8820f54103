"""No failpoint without a test that kills a process there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proof.failpoint_names import failpoint_names
from tests.proof.kills import killed_at, kills_in

TESTS = Path(__file__).parents[1]


def test_a_process_is_killed_at_each_failpoint() -> None:
    assert failpoint_names() - killed_at(TESTS) == set()


def test_no_test_kills_at_a_place_that_is_not_there() -> None:
    """It would wait for it in vain, or pass without a kill."""
    assert killed_at(TESTS) - failpoint_names() == set()


def test_only_names_that_a_kill_is_armed_at_count() -> None:
    """A name that a test mentions, lets fail or stops at is not killed at."""

    def literal() -> str:
        return "one.place=kill@2,two.place=raise"

    @pytest.mark.parametrize("name", ["three.place@40", "four.place"])
    @pytest.mark.parametrize("nth", [1])
    def given(name: str, nth: int) -> str:
        return f"{name}=kill@{nth}"

    @pytest.mark.parametrize(("name", "nth"), [("five.place", 1)])
    def stopped(name: str, nth: int) -> str:
        return f"{name}=stop@{nth}"

    assert kills_in(literal) == {"one.place"}
    assert kills_in(given) == {"three.place", "four.place"}
    assert kills_in(stopped) == set()
