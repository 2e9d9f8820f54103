"""Bugs on purpose: each a guard taken out of the system that a run is to notice.

Most are a change of a script's or a statement's text, made where a process reads it; a few replace a method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Final

from mqlayer import resources
from mqlayer.postgres import migrations, queries
from mqlayer.redis import scripts
from mqlayer.relay.lp_cursors import LpCursor
from mqlayer.relay.sender import Sender
from mqlayer.workers import job_claims

CONTROL: Final = "sql/migrations/control/0001_expand_baseline.sql"
APPLICATION: Final = "sql/migrations/application/0001_expand_baseline.sql"
"""The last migrations that write out the functions and views below: a later definition would take a bug out again."""
PLAIN: Final = {"kill": 6, "stop": 6, "network": 2}


@dataclass(frozen=True, slots=True)
class Plant:
    """A bug: what is changed in which files, `lua/<name>` or `sql/<path>`, and the faults under which it shows."""

    says: str
    texts: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    code: Callable[[], None] = lambda: None
    kinds: Mapping[str, int] = field(default_factory=lambda: PLAIN)


def _no_rewind() -> None:
    def pass_on(_sender: Sender, cursor: LpCursor, mark: int) -> None:
        del mark
        cursor.advance(cursor.sent)

    Sender._rewind_to = pass_on  # type: ignore[assignment,method-assign]


def _no_claims() -> None:
    setattr(job_claims, "claimed", lambda control, job, name: 1)  # noqa: B010


MADE_ANEW: Final = (
    "meta, state = {'open', '0', '1024', '1'}, 'open' call('HSET', meta_key, 'state', 'open', 'topic', 'orders', "
    "'lp_from', '0', 'lp_to', '1024', 'next', '1', 'first', '1')"
)
JUMPS: Final = (
    "\ncommitted = math.max(committed, top) "
    "redis.call('HSET', lock_key, 'committed', string.format('%d', committed), 'base', string.format('%d', committed))"
)
MOVES: Final = {"kill": 8, "stop": 3}

PLANTS: Final[dict[str, Plant]] = {
    "no_chain": Plant(
        "a partition takes whatever comes, whether it continues the chain or not",
        {"lua/log_append": (("firsts[i] ~= (marks[i] or 0) + 1", "false"),)},
    ),
    "no_ownership": Plant(
        "a partition that is sealed, or does not serve the LP, takes it all the same: a stale route is believed",
        {
            "lua/log_append": (
                ("if state ~= 'open' then return", "if state == 'deleted' then return"),
                ("lp < lp_from or lp >= lp_to or", "false or"),
            )
        },
        kinds=MOVES,
    ),
    "no_gate": Plant(
        "successors are given out whether their parents are drained or not",
        {CONTROL: (("AND parent.state <> 'deleted' AND", "AND false AND"),)},
        kinds=MOVES,
    ),
    "marks_left_behind": Plant(
        "a successor does not get its parents' marks",
        {"lua/partition_open": (("for i = 3, #ARGV, 2 do", "for i = 3, 0, 2 do"),)},
        kinds=MOVES,
    ),
    "no_rewind": Plant(
        "a relay goes on behind a gap in place of going back to the mark",
        code=_no_rewind,
        kinds={"fail_over": 8, "kill": 3, "stop": 3},
    ),
    "committed_jumps": Plant(
        "committed goes to the last offset that is settled",
        {
            "lua/offsets_settle": (
                ("  'top', string.format('%d', top))", f"  'top', string.format('%d', top)){JUMPS}"),
            )
        },
    ),
    "absent_is_new": Plant(
        "a partition that is not there is made on the spot, empty and open",
        {
            "lua/log_append": (
                ("if not state then return {'absent'} end", f"if not state then {MADE_ANEW} end"),
            )
        },
        kinds={"wipe": 6, "kill": 2},
    ),
    "no_claims": Plant(
        "every worker runs every periodic job, without claiming it",
        code=_no_claims,
        kinds={"kill": 6, "stop": 3, "fail_over": 2, "wipe": 2},
    ),
    "no_bug": Plant(
        "nothing is planted, under the faults of all of these",
        kinds={**PLAIN, "fail_over": 4, "wipe": 3},
    ),
}  # fmt: skip
HARMLESS: Final = frozenset({"no_claims", "no_bug"})
"""What must not matter: each step of a job is guarded by what it changes. All pieces have to be clean."""


def plant(name: str) -> None:
    """Have a bug in this process from now on. Raises where what is to be changed is not there any more."""
    plant_this(PLANTS[name])


def plant_this(chosen: Plant) -> None:
    """Do the same for a bug without a name."""
    for module, name, reads in readers(chosen):
        setattr(module, name, reads)
    chosen.code()


def readers(chosen: Plant) -> Iterator[tuple[ModuleType, str, Callable[[str], str]]]:
    """Yield what the library reads its texts with, by module and name, and what gives it the changed ones."""
    for module, name in ((scripts, "lua_source"), (queries, "sql_source"), (migrations, "sql_source")):
        yield module, name, _changed(getattr(resources, name), name.removesuffix("_source"), chosen.texts)


def check_texts(chosen: Plant) -> None:
    """Fail where a bug changes what is not there any more."""
    for name in chosen.texts:
        folder, _, rest = name.partition("/")
        _changed(getattr(resources, f"{folder}_source"), folder, chosen.texts)(rest)


def _changed(
    read: Callable[[str], str], folder: str, texts: Mapping[str, tuple[tuple[str, str], ...]]
) -> Callable[[str], str]:
    def changed(name: str) -> str:
        text = read(name)
        for old, new in texts.get(f"{folder}/{name}", ()):
            assert old in text, f"{old!r} is not in {folder}/{name}"
            text = text.replace(old, new)
        return text

    return changed
