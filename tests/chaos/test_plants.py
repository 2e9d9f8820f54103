"""The hunt for planted bugs itself: a judge that never finds anything proves nothing.

With `--long` all bugs are hunted, as by `python -m tests.chaos --plant all`, else those that are caught at once. Each
in a process of its own, since it stays there. And the same races without a bug.
"""

from __future__ import annotations

import psycopg
import pytest

from mqlayer.postgres.migrations import migrate
from tests.chaos.harness.plant_hunt import NAMES, hunt_all, table
from tests.chaos.harness.plants import HARMLESS, PLANTS, Plant, check_texts, readers
from tests.chaos.harness.races import RACES, race
from tests.fixtures.variants import some_of

BUGS: dict[str, Plant] = {**PLANTS, **{name: one.bug for name, one in RACES.items()}}
QUICK = ("by_id", "no_new_epochs", "any_seal", "early_gate")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_planted_bugs_are_caught_and_told_in_a_table(request: pytest.FixtureRequest) -> None:
    names = NAMES if request.config.getoption("--long", default=False) else QUICK
    found = list(hunt_all(names, seed=1))
    told = table(found)
    assert [one["plant"] for one in found if not one["as_expected"]] == [], told
    assert all(f"| `{name}` |" in told for name in names)


@pytest.mark.usefixtures("quick_initdb")
@pytest.mark.parametrize(
    "name", some_of(["number_before_lock", "fence_without_epoch", "no_new_epochs", "any_seal", "early_gate"], 3)
)
def test_without_its_bug_a_race_is_clean(name: str) -> None:
    found = race(name, planted=False, most_rounds=1)
    assert not found["caught"], found


@pytest.mark.parametrize("name", NAMES)
def test_what_a_bug_changes_is_still_there(name: str) -> None:
    """A bug whose guard was written anew would be hunted in vain."""
    check_texts(BUGS[name])


MIGRATED = [name for name, bug in BUGS.items() if any(text.startswith("sql/migrations/") for text in bug.texts)]
DEFINITIONS = """
    SELECT pg_get_functiondef(p.oid) AS text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname LIKE 'mqlayer%'
    UNION ALL SELECT definition FROM pg_views WHERE schemaname LIKE 'mqlayer%' ORDER BY text
"""


@pytest.mark.parametrize("name", [*MIGRATED, ""])
def test_no_later_migration_takes_a_bug_out_again(
    name: str, database_dsn: str, empty_database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, reader, reads in readers(BUGS[name]) if name else ():
        monkeypatch.setattr(module, reader, reads)
    migrate(empty_database_dsn)
    assert (definitions(empty_database_dsn) != definitions(database_dsn)) == bool(name)


def definitions(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute(DEFINITIONS)]


def test_every_bug_has_one_name() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert set(NAMES) >= HARMLESS
