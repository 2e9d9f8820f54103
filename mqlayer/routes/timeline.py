"""A topic's route over its versions: partitions with the versions that they lived in, and the changes between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mqlayer.domain.names import check_any_topic
from mqlayer.errors import NotFound
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.routes.status import RouteChange
from mqlayer.runtime.route_cache import node_names


@dataclass(frozen=True, slots=True)
class PlannedChange(RouteChange):
    """A route change. `reason`: as its actor gave it."""

    reason: str | None


@dataclass(frozen=True, slots=True)
class PartitionSpan:
    """A partition in versions [first, ended); `ended` None: in force."""

    partition: int
    node: str
    lp_from: int
    lp_to: int
    state: str
    first: int
    ended: int | None


@dataclass(frozen=True, slots=True)
class RouteTimeline:
    """Versions [since, upto] of a route. `newest`: a planned one counts; `changes`: the newest first."""

    since: int
    upto: int
    newest: int
    changes: Sequence[PlannedChange]
    spans: Sequence[PartitionSpan]


def route_timeline(database: Database, topic: str, *, upto: int | None = None, versions: int = 30) -> RouteTimeline:
    """Return the last `versions` versions up to one, default the newest. Raises NotFound."""
    names = node_names(database)
    facts: dict[str, object] = {"topic": check_any_topic(topic)}
    with database.connection() as connection:
        row = connection.execute(query("route_newest"), facts).fetchone()
        if row is None:
            raise NotFound("topic", topic, "see those that there are: mqlayer topic list")
        newest = int(row[0] or 0)
        last = newest if upto is None else max(1, min(upto, newest))
        since = max(1, last - versions + 1)
        facts |= {"upto": last, "since": since, "limit": 2 * versions}
        changes = [PlannedChange(*one) for one in connection.execute(query("route_changes_page"), facts).fetchall()]
        rows = connection.execute(query("route_partitions_between"), facts).fetchall()
    spans = [PartitionSpan(one[0], names[one[1]], *one[2:]) for one in rows]
    return RouteTimeline(since, last, newest, [one for one in changes if one.version >= since], spans)
