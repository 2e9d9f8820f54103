"""Numbers and times: every column that publishers and consumers may write takes so much and no more.

Statements of jobs and lists add to these columns, or show them, over the rows of all groups: one value at the end of
its type would fail them for all.
"""

from __future__ import annotations

from contextlib import closing
from typing import Final

import psycopg
import pytest

from mqlayer.postgres.rights import Right
from tests.fixtures.column_bounds import NUMBERS_AND_TIMES, ColumnCopy, by_table, written_columns

LIMITED: Final = [right for right in Right if right not in (Right.RELAY, Right.WORK, Right.OPERATE, Right.MIGRATE)]
"""Rights whose roles may harm no more than their own topics and groups."""
EXTREMES: Final[dict[str, list[str]]] = {
    "smallint": ["32767", "-32768"],
    "integer": ["2147483647", "-2147483648"],
    "bigint": ["9223372036854775807", "-9223372036854775808"],
    "double precision": ["1e300", "-1e300", "Infinity", "-Infinity", "NaN"],
    "timestamp with time zone": ["infinity", "-infinity", "4713-01-01 BC", "294276-12-31", "10000-01-01"],
}
USUAL: Final = dict.fromkeys(("smallint", "integer", "bigint", "double precision"), "1") | {
    "timestamp with time zone": "2026-01-01"
}
COMPARED: Final = "[<>]="
"""What a check that bounds a number has in it."""
UNBOUNDED: Final = {
    ("mqlayer.member", "lease_until"): "-infinity, the only extreme that it takes, is for a member that is gone",
    ("mqlayer_archive.outcome_queue", "topic_id"): "the policy compares it with the group's",
    ("mqlayer_archive.outcome_queue", "group_id"): "the policy compares it with the role's groups",
    ("mqlayer_archive.outcome_queue", "partition_id"): "the policy compares its topic with the group's",
} | dict.fromkeys(
    [("mqlayer.node", "created_at"), ("mqlayer.partition", "created_at"), ("mqlayer_archive.topic", "last_pass_at")],
    "for locks of rows: the policy lets a consumer change nothing",
)


def test_every_number_and_time_that_a_limited_right_may_write_is_bounded(database_dsn: str) -> None:
    found = written_columns(database_dsn, LIMITED, NUMBERS_AND_TIMES)
    assert len(found) > 60
    unbounded = set()
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        for table, columns in by_table(found):
            copy = ColumnCopy(connection, table, checks=COMPARED)
            for _, column, type_ in columns:
                assert copy.takes(column, type_, USUAL[type_]), (table, column)
                if any(copy.takes(column, type_, value) for value in EXTREMES[type_]):
                    unbounded.add((table, column))
    assert unbounded == set(UNBOUNDED)


@pytest.mark.parametrize("column", ["version", "settings_version", "seek", "replay"])
def test_what_counts_one_by_one_has_room_for_the_next_one(database_dsn: str, column: str) -> None:
    """A statement over all groups adds one to each."""
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        copy = ColumnCopy(connection, "mqlayer.consumer_group", checks=COMPARED)
        assert copy.takes(column, "integer", "1000000000")
        assert not copy.takes(column, "integer", "1000000001")
