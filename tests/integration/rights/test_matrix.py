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


@pytest.fixture
def dsns(roles: Roles) -> dict[str, str]:
    """A role per column."""
    given = {"nothing": roles.login()}
    given["topic"] = roles.login(Right.PUBLISH, scopes=["orders"])
    given["group"] = roles.login(Right.CONSUME, scopes=["orders/ledger"])
    return given | {right: roles.login(right) for right in Right if right is not Right.MIGRATE}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_role_may_do_what_the_matrix_says_and_nothing_else(database_dsn: str, dsns: dict[str, str]) -> None:
    assert set(dsns) == set(COLUMNS)
    found = matrix(dsns, database_dsn)
    if os.environ.get("MQLAYER_WRITE_MATRIX"):
        MATRIX.write_text(found, encoding="utf-8")
    expected = MATRIX.read_text(encoding="utf-8") if MATRIX.exists() else ""
    changed = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "matrix.txt", "the server", lineterm="", n=0
    )
    assert found == expected, "\n".join(["MQLAYER_WRITE_MATRIX=1 writes it down, for a review:", *changed])
