"""Operators open and close a group's circuit breaker. Each act is one transaction with an audit row."""

from __future__ import annotations

from typing import Literal

from mqlayer.errors import InvalidInput
from mqlayer.events import Event, emit
from mqlayer.groups.breaker import FIRST_PROBE_S
from mqlayer.groups.group import Group, find_group
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime


def trip_breaker(runtime: Runtime, topic: str, name: str) -> bool:
    """Open a group's breaker by hand; probes close it again. False: it was open.

    Raises NotFound, InvalidInput for a group without a breaker.
    """
    return _operate(runtime, topic, name, "breaker_trip", "breaker open")


def reset_breaker(runtime: Runtime, topic: str, name: str) -> bool:
    """Close a group's breaker by hand, at full speed. False: it was closed. Raises as `trip_breaker`."""
    return _operate(runtime, topic, name, "breaker_reset", "breaker close")


def _operate(runtime: Runtime, topic: str, name: str, statement: str, act: str) -> bool:
    group = find_group(runtime.control, topic, name)
    _check_has_breaker(group)
    facts = {"group_id": group.group_id, "actor": runtime.actor, "first_s": FIRST_PROBE_S}

    def work(connection: Connection) -> bool:
        if not connection.execute(query(statement), facts).fetchall():
            return False
        write_audit(connection, runtime.actor, act, f"{topic}/{name}", {})
        return True

    done = bool(runtime.control.transaction(work))
    if done:
        opened = statement == "breaker_trip"
        kind: Literal["breaker_opened", "breaker_closed"] = "breaker_opened" if opened else "breaker_closed"
        emit(Event(kind, topic, name, cause="operator", count=0, actor=runtime.actor))
    return done


def _check_has_breaker(group: Group) -> None:
    if group.rules.breaker_share is None:
        raise InvalidInput(
            f"group {group.name!r} of topic {group.topic!r} has no circuit breaker: mqlayer group set {group.topic} "
            f"{group.name.partition('@')[0]} --breaker 0.5, or pause it: mqlayer group pause {group.topic} {group.name}"
        )
