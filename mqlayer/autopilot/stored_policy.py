"""Policies in Postgres."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from mqlayer.autopilot.policy import RoutePolicy, check_policy, format_quiet
from mqlayer.domain.names import check_name
from mqlayer.errors import NotFound
from mqlayer.failpoints import failpoint
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime


def set_policy(runtime: Runtime, topic: str, **changes: Any) -> RoutePolicy:
    """Change fields of a topic's policy; return it. With `mode`, a topic that the autopilot stopped begins anew.

    Raises InvalidInput, NotFound.
    """

    def work(connection: Connection) -> RoutePolicy:
        row = connection.execute(query("topic_lock"), {"name": check_name("topic", topic)}).fetchone()
        if row is None or row[4] is None:
            raise NotFound("topic", topic, f"create it: mqlayer topic create {topic}")
        stored = connection.execute(query("policy_of"), {"topic_id": row[0]}).fetchone()
        policy = check_policy(replace(policy_from(stored) if stored else RoutePolicy(), **changes))
        facts = asdict(policy) | {"quiet": format_quiet(policy.quiet)}
        quiet_from, quiet_to = policy.quiet or (None, None)
        put = {"topic_id": row[0], "actor": runtime.actor, "quiet_from": quiet_from, "quiet_to": quiet_to}
        connection.execute(query("policy_put"), asdict(policy) | put | {"begin": "mode" in changes})
        write_audit(connection, runtime.actor, "route auto", topic, facts)
        failpoint("auto.before_policy_commit")
        return policy

    return runtime.control.transaction(work)


def policy_from(row: Sequence[Any]) -> RoutePolicy:
    """Return the policy of a row that begins as `policy_of`'s."""
    mode, fewest, most, capacity, budget, cool, rest, quiet_from, quiet_to = row[:9]
    return RoutePolicy(
        mode, fewest, most, capacity, budget, cool, rest, None if quiet_from is None else (quiet_from, quiet_to)
    )
