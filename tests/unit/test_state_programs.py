"""What chance found is played again as it was, and CI looks for more."""

from __future__ import annotations

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fixtures.forked_programs import ask_python
from tests.fixtures.state_programs import drawn, play


class Counter(RuleBasedStateMachine):
    """Counts, up to where it breaks."""

    log: list[str]

    @initialize()
    def begin(self) -> None:
        self.count = 0

    @rule(step=st.integers(1, 3))
    def add(self, step: int) -> None:
        self.count += step

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.count -= data.draw(st.integers(1, self.count))

    @invariant()
    def is_small(self) -> None:
        self.log.append(f"looked at {self.count}")
        assert self.count < 5

    def teardown(self) -> None:
        self.log.append("torn down")


@pytest.fixture(autouse=True)
def _log() -> None:
    Counter.log = []


def test_every_step_is_checked_and_the_machine_torn_down() -> None:
    def program(state: Counter) -> None:
        state.begin()
        state.add(step=3)
        state.remove(data=drawn(2))

    play(Counter, program)
    assert Counter.log == ["looked at 0", "looked at 3", "looked at 1", "torn down"]


def test_a_step_that_breaks_an_invariant_fails() -> None:
    def program(state: Counter) -> None:
        state.begin()
        state.add(step=3)
        state.add(step=3)
        state.remove(data=drawn(3))

    with pytest.raises(AssertionError):
        play(Counter, program)
    assert Counter.log[-2:] == ["looked at 6", "torn down"]


def test_a_step_that_is_not_possible_any_more_fails() -> None:
    def program(state: Counter) -> None:
        state.begin()
        state.remove(data=drawn(1))

    with pytest.raises(AssertionError, match="can't go on with remove"):
        play(Counter, program)


def test_ci_tries_other_examples_each_time_and_tells_how_a_failing_one_is_made_again() -> None:
    program = "import tests.conftest, hypothesis; d = hypothesis.settings(); print(d.derandomize, d.print_blob)"
    said = ask_python("-c", program, env=os.environ | {"CI": "true"})
    assert said.stdout == "False True\n", said.stderr
