"""The hunt for planted bugs itself: a judge that never finds anything proves nothing.

All bugs are hunted by `python -m tests.chaos --plant all`; here those that are caught at once, each in a process of its
own, since it stays there, and the same races without a bug.
"""

from __future__ import annotations

import pytest

from tests.chaos.harness.hunting import NAMES, hunt_all, table
from tests.chaos.harness.plants import HARMLESS, PLANTS, Plant, check_texts
from tests.chaos.harness.races import RACES, race

QUICK = ("by_id", "no_new_epochs")


def test_planted_bugs_are_caught_and_told_in_a_table() -> None:
    found = list(hunt_all(QUICK, seed=1))
    assert [one["caught"] for one in found] == [True] * len(QUICK), found
    assert all(f"| `{name}` |" in table(found) for name in QUICK)


@pytest.mark.parametrize("name", ["number_before_lock", "fence_without_epoch", "no_new_epochs"])
def test_without_its_bug_a_race_is_clean(name: str) -> None:
    found = race(name, planted=False, most_rounds=1)
    assert not found["caught"], found


@pytest.mark.parametrize("name", NAMES)
def test_what_a_bug_changes_is_still_there(name: str) -> None:
    """A bug whose guard was written anew would be hunted in vain."""
    bug: Plant = RACES[name].bug if name in RACES else PLANTS[name]
    check_texts(bug)


def test_every_bug_has_one_name() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(NAMES) >= HARMLESS
