"""Problems over time: a row from the first look that found one to the first that did not; kept for a week.

Bounded: at most ROWS_LIMIT rows; of one look, its PROBLEMS_LIMIT most urgent problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from mqlayer.errors import NotFound
from mqlayer.metrics.alerts import ALERTS, Alert, Severity
from mqlayer.postgres.bounded_delete import forget_rows
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

KEPT_S: Final = 7 * 86_400.0
ROWS_LIMIT: Final = 10_000
PROBLEMS_LIMIT: Final = 500
DAY_S: Final = 86_400.0
TEXT_BYTES: Final = 4_096
NAME_BYTES: Final = 255


class ProblemPlace(NamedTuple):
    """Names a problem: two of one place are one. `item`: of several of an alert at one place."""

    alert: str
    topic: str
    group: str
    node: str
    item: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A condition that holds now. `since`: None if unknown; `after`: the last sign that it did not hold yet.

    `effect`: who waits for what; `command`: one that helps, to be pasted; `rearms`: arming the node may end it;
    `part`: of the look; `number`: its row in the history.
    """

    alert: Alert
    text: str
    since: datetime | None = None
    topic: str = ""
    group: str = ""
    node: str = ""
    change: int | None = None
    advice: str = ""
    rearms: bool = False
    effect: str = ""
    command: str = ""
    after: datetime | None = None
    partition: int | None = None
    item: str = ""
    part: str = ""
    number: int | None = None

    @property
    def place(self) -> ProblemPlace:
        """Its name in the history."""
        item = self.item or next((str(one) for one in (self.change, self.partition) if one is not None), "")
        return ProblemPlace(
            self.alert.name, *(_cut(one, NAME_BYTES) for one in (self.topic, self.group, self.node, item))
        )


class OpenProblem(NamedTuple):
    """A noted problem that has not ended."""

    number: int
    since: datetime | None
    first_seen_at: datetime
    last_seen_at: datetime
    part: str


@dataclass(frozen=True, slots=True)
class NotedProblem:
    """A problem of the history; `ended_at`: None while it lasts. Times are of looks, one a minute, but `since`."""

    number: int
    name: str
    severity: Severity
    topic: str
    group: str
    node: str
    item: str
    text: str
    effect: str
    since: datetime | None
    first_seen_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None

    @property
    def title(self) -> str:
        """In a few words."""
        return ALERTS[self.name].title if self.name in ALERTS else self.name

    @property
    def began_at(self) -> datetime:
        """When it began, else the first look that found it."""
        return self.first_seen_at if self.since is None else min(self.since, self.first_seen_at)

    @property
    def ended_between(self) -> bool:
        """Whether its end lies between two looks some seconds apart."""
        return self.ended_at is not None and self.ended_at - self.last_seen_at > timedelta(seconds=5)

    @property
    def lasted_s(self) -> float:
        """Seconds until its end, or now."""
        return ((self.ended_at or datetime.now(UTC)) - self.began_at).total_seconds()


def open_problems(database: Database) -> Mapping[ProblemPlace, OpenProblem]:
    """Return the noted problems that have not ended. Raises StoreUnavailable, PermissionDenied."""
    with database.connection() as connection:
        rows = connection.execute(query("problems_open"), {"limit": ROWS_LIMIT}).fetchall()
    return {ProblemPlace(*row[1:6]): OpenProblem(row[0], *row[6:]) for row in rows}


def ended_problems(
    database: Database,
    *,
    last_s: float = DAY_S,
    severities: Sequence[Severity] = ("critical", "warning"),
    before: int | None = None,
    limit: int = 50,
) -> list[NotedProblem]:
    """Return problems that ended within the last `last_s` seconds, the last one first, from before one on."""
    facts = {"last_s": last_s, "severities": list(severities), "before": before, "limit": limit}
    with database.connection() as connection:
        return [NotedProblem(*row) for row in connection.execute(query("problem_list"), facts).fetchall()]


def noted_problem(database: Database, number: int) -> NotedProblem:
    """Return one problem of the history. Raises NotFound."""
    with database.connection() as connection:
        row = connection.execute(query("problem_one"), {"problem_id": number}).fetchone()
    if row is None:
        raise NotFound("problem", number, "they are kept for a week: mqlayer problems --ended lists them")
    return NotedProblem(*row)


def put_problems(database: Database, at_s: float, problems: Iterable[Problem], unread: Sequence[str]) -> int:
    """Note the problems of a look that began at `at_s` by the database's clock; return how many others ended.

    Those of `unread` parts do not end. A look that began before a noted one changes nothing.
    """
    forget_rows(database, query("problems_clean"), {"kept_s": KEPT_S, "rows": ROWS_LIMIT})
    found = list({one.place: one for one in list(problems)[:PROBLEMS_LIMIT]}.values())
    facts = {"at": at_s, "unread": list(unread), **_columns(found)}

    def put(connection: Any) -> int:
        if found:
            connection.execute(query("problems_put"), facts)
        return int(connection.execute(query("problems_end"), facts).fetchone()[0])

    return database.transaction(put)


def _columns(found: Sequence[Problem]) -> dict[str, list[Any]]:
    return {
        "alert": [one.alert.name for one in found],
        "severity": [one.alert.severity for one in found],
        "part": [one.part for one in found],
        "topic": [one.place.topic for one in found],
        "group": [one.place.group for one in found],
        "node": [one.place.node for one in found],
        "item": [one.place.item for one in found],
        "text": [_cut(one.text, TEXT_BYTES) for one in found],
        "effect": [_cut(one.effect, TEXT_BYTES) for one in found],
        "since": [one.since for one in found],
    }


def _cut(text: str, limit: int) -> str:
    return text.replace("\0", "").encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")
