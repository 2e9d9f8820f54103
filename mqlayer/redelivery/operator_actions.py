"""Operators' acts on parked keys and dead messages.

Each act is a transaction under the group's lock with an audit row; discards take one per AT_ONCE messages. After a
crash, repeat the act.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mqlayer.domain.message import NO_KEY, Identity
from mqlayer.domain.names import encode_key
from mqlayer.domain.routing import lp_of
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.events import Event, emit
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, find_group
from mqlayer.groups.rebalance import change_group
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.act_notes import count_action, emit_action, raise_parking_version
from mqlayer.runtime.runtime import Runtime

AT_ONCE: Final = 500


def release_parked(
    runtime: Runtime, topic: str, group: str, *, key: str | None = None, message: Identity | None = None
) -> None:
    """Retry a parked key now, with all attempts; name it by `key` or a waiting `message`.

    Raises NotFound if it is not parked, Conflict if it is paused.
    """
    found, place = parked_place(runtime.control, topic, group, key=key, message=message)

    def work(connection: Connection) -> None:
        connection.execute(query("parked_hold"), place)
        if not release_keys(connection, found.group_id, [(place["lp"], place["name"])]):
            refuse_paused(connection, found, place)
            raise not_parked(found, place)
        write_audit(connection, runtime.actor, "parked release", audit_target(found), {"key": key_label(place)})
        count_action(connection, found.group_id, "released")
        raise_parking_version(connection, found.group_id, [(place["lp"], place["name"])])
        failpoint("release.before_commit")

    change_group(runtime.control, found.group_id, work)
    emit_action("released", found, lp=place["lp"], actor=runtime.actor)


def release_keys(connection: Connection, group_id: int, keys: Sequence[tuple[int, bytes]]) -> int:
    """Retry locked parked keys now, but for paused ones; return how many."""
    named = {"group_id": group_id, "lps": [lp for lp, _ in keys], "names": [name for _, name in keys]}
    count = len(connection.execute(query("parked_release"), named).fetchall())
    if count:
        failed = connection.execute(query("parked_heads_failed"), named).fetchall()
        heads = [{"group_id": group_id, "lp": lp, "source": source, "seq": seq} for lp, source, seq in failed]
        # One by one: a join with the messages would read all of the group's where statistics are late.
        connection.cursor().executemany(query("parked_head_reset"), heads)
    return count


def discard_parked(
    runtime: Runtime,
    topic: str,
    group: str,
    *,
    key: str | None = None,
    message: Identity | None = None,
    head: bool = False,
    reason: str,
) -> int:
    """Make a parked key's messages dead, or only its `head`; return how many.

    Bodies are kept for a redrive; messages that arrive meanwhile stay. Raises InvalidInput for an empty reason,
    NotFound.
    """
    check_reason(reason)
    found, place = parked_place(runtime.control, topic, group, key=key, message=message)
    facts = place | {"reason": reason, "actor": runtime.actor, "limit": 1 if head else AT_ONCE}
    upto: int | None = None

    def work(connection: Connection) -> tuple[int, int]:
        if connection.execute(query("parked_hold"), place).fetchone() is None:
            raise not_parked(found, place)
        end = _end(connection, place) if upto is None else upto
        gone = discard_first(connection, found, facts | {"upto": end}, act="parked discard")
        count_action(connection, found.group_id, "discarded", gone)
        failpoint("discard.before_commit")
        return end, gone

    count = 0
    while True:
        try:
            upto, gone = change_group(runtime.control, found.group_id, work)
        except NotFound:
            # The previous part removed the last message and the key's row.
            if upto is None:
                raise
            return count
        count += gone
        emit_action("discarded", found, lp=place["lp"], count=gone, actor=runtime.actor)
        if head or gone < AT_ONCE:
            return count


def discard_first(connection: Connection, group: Group, facts: dict[str, Any], *, act: str) -> int:
    """Make a locked parked key's first messages dead; return how many.

    `facts`: the key's place, `reason`, `actor`, `limit`, `upto` (the last place).
    """
    gone = [row[0] for row in connection.execute(query("parked_discard"), facts).fetchall()]
    if facts["limit"] == 1 or len(gone) < facts["limit"]:
        # Set the next head only when the discard is complete, so no owner starts it before.
        connection.execute(query("parked_head_next"), facts)
    connection.execute(query("parked_key_end"), facts)
    # Of many, the first and the last: those between share reason and actor.
    named = gone if len(gone) <= 2 else [min(gone), max(gone)]
    said = {"key": key_label(facts), "messages": len(gone), "dead_ids": named, "reason": facts["reason"]}
    write_audit(connection, facts["actor"], act, audit_target(group), said)
    raise_parking_version(connection, group.group_id, [(facts["lp"], facts["name"])])
    return len(gone)


def discard_dead(runtime: Runtime, dead_id: int, *, reason: str) -> None:
    """Record why a dead message stays dead; a redrive can still return it.

    Raises InvalidInput for an empty reason, NotFound.
    """
    check_reason(reason)

    def work(connection: Connection) -> tuple[str, str]:
        rows = keep_dead(connection, [dead_id], reason=reason, actor=runtime.actor)
        if not rows:
            raise NotFound(
                "dead message", str(dead_id), "it was given back, or never was: mqlayer dead list --redriven"
            )
        before, (group_id, topic, name) = rows[0][:2], rows[0][2:5]
        said = {"reason": reason, "before": {"cause": before[0], "reason": before[1]}}
        write_audit(connection, runtime.actor, "dead discard", str(dead_id), said)
        count_action(connection, group_id, "kept_dead")
        return str(topic), str(name)

    topic, group = runtime.control.transaction(work)
    emit(Event("kept_dead", topic, group, actor=runtime.actor))


def keep_dead(connection: Connection, dead_ids: Sequence[int], *, reason: str, actor: str) -> list[Any]:
    """Record why dead messages stay so, in the caller's transaction.

    Return each with its former cause and reason, group id, topic, group, dead id.
    """
    facts = {"dead_ids": list(dead_ids), "reason": reason, "actor": actor}
    return connection.execute(query("dead_keep"), facts).fetchall()


def parked_place(
    database: Database, topic: str, group: str, *, key: str | None, message: Identity | None
) -> tuple[Group, dict[str, Any]]:
    """Return a group, and a key's place in its parked keys. Raises NotFound, InvalidInput."""
    found = find_group(database, topic, group)
    if key is not None and message is None:
        name = encode_key(key)
        return found, {"group_id": found.group_id, "lp": int(lp_of(name)), "name": name}
    if message is None or key is not None:
        raise InvalidInput("name one: a key, or a message that waits in it")
    facts = {"group_id": found.group_id} | message._asdict()
    with database.connection() as connection:
        row = connection.execute(query("parked_name_of"), facts).fetchone()
    if row is None:
        raise NotFound("parked message", f"{topic}/{group}/{message}", f"mqlayer parked list {topic} {group}")
    return found, {"group_id": found.group_id, "lp": message.lp, "name": bytes(row[0])}


def not_parked(group: Group, place: dict[str, Any]) -> NotFound:
    """Return the error for a key that is not parked."""
    hint = f"see those that are: mqlayer parked list {group.topic} {group.name}"
    return NotFound("parked key", f"{audit_target(group)}/{key_label(place)}", hint)


def refuse_paused(connection: Connection, group: Group, place: dict[str, Any]) -> None:
    """Raise Conflict for a paused key."""
    row = connection.execute(query("key_paused"), place).fetchone()
    if row is not None:
        raise Conflict(
            f"key {key_label(place)!r} of {audit_target(group)} is paused since {row[0]:%Y-%m-%d %H:%M:%S}",
            f"mqlayer key resume {group.topic} KEY --group {group.name}",
        )


def check_reason(reason: str) -> None:
    """Raise InvalidInput for an empty reason (invariant 16)."""
    if not reason.strip():
        raise InvalidInput("say why: people who find the message later have only this reason")


def key_label(place: dict[str, Any]) -> str:
    """Return a parked key's text, or a keyless message's identity."""
    name: bytes = place["name"]
    return name.removeprefix(NO_KEY).decode(errors="replace")


def audit_target(group: Group) -> str:
    """Return a group's name in audit rows."""
    return f"{group.topic}/{group.name}"


def _end(connection: Connection, place: dict[str, Any]) -> int:
    row = connection.execute(query("parked_end"), place).fetchone()
    return int(row[0]) if row is not None else 0
