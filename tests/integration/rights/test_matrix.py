"""Everything there is, tried as every role, is allowed where matrix.txt beside this file says so, else denied."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from mqlayer.postgres.rights import Right
from tests.fixtures.rights_matrix import COLUMNS, matrix
from tests.fixtures.roles import Roles

MATRIX = Path(__file__).with_name("matrix.txt")
SOME = ("consume", "view", "operate")
"""Of these each line is tried always, of all roles with `--full`: a column takes two seconds of a core."""


@pytest.fixture
def dsns(roles: Roles) -> dict[str, str]:
    """A role per column."""
    given = {"nothing": roles.login()}
    given["topic"] = roles.login(Right.PUBLISH, scopes=["orders"])
    given["group"] = roles.login(Right.CONSUME, scopes=["orders/ledger"])
    return given | {right: roles.login(right) for right in Right if right is not Right.MIGRATE}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("columns", [SOME, pytest.param(COLUMNS, marks=pytest.mark.full)], ids=["some", "all"])
def test_every_role_may_do_what_the_matrix_says_and_nothing_else(
    database_dsn: str, dsns: dict[str, str], columns: tuple[str, ...]
) -> None:
    assert set(dsns) == set(COLUMNS)
    writes = bool(os.environ.get("MQLAYER_WRITE_MATRIX"))
    expected = MATRIX.read_text(encoding="utf-8") if MATRIX.exists() else ""
    found = matrix({name: dsns[name] for name in (COLUMNS if writes else columns)}, database_dsn, expected)
    if writes:
        MATRIX.write_text(found, encoding="utf-8")
        expected = found
    changed = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "matrix.txt", "the server", lineterm="", n=0
    )
    assert found == expected, "\n".join(["MQLAYER_WRITE_MATRIX=1 writes it down, for a review:", *changed])
