"""Statements that claim so many rows claim no more, whatever the planner knows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mqlayer.postgres.queries import queries

LIMITED = re.compile(r"\bLIMIT\b[^()]*(?:\([^()]*\)[^()]*)*\bFOR (?:NO KEY )?(?:UPDATE|SHARE)\b")
CHANGES = re.compile(r"^\s*(?:UPDATE|DELETE)\b", re.MULTILINE)


def limited_subqueries(text: str) -> Iterator[str]:
    """Yield what stands before each parenthesis that holds a limited, locking SELECT."""
    for found in LIMITED.finditer(text):
        depth = 0
        for at in range(found.start(), -1, -1):
            depth += {")": 1, "(": -1}.get(text[at], 0)
            if depth < 0:
                yield text[:at].rstrip()
                break


def test_a_limited_choice_of_rows_to_change_is_made_once() -> None:
    """A join may run a subquery once per row, and each time it locks other rows; PostgreSQL runs a CTE once."""
    looked_at, wrong = set(), []
    for name, text in queries().items():
        for before in limited_subqueries(text) if CHANGES.search(text) else ():
            looked_at.add(name)
            if not re.search(r"\bAS(?: MATERIALIZED)?$", before):
                wrong.append(name)
    assert wrong == []
    assert looked_at >= {"lp_set_take", "pop_parked_claim", "redriven_claim", "source_try_closed", "version_alarms"}
