"""Set how long a topic's streams keep records, and its messages live: `docs/design/retention.md`, `time-to-live.md`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Final

from mqlayer.domain.retention import Retention, UnsettledRule
from mqlayer.domain.time_to_live import ExpiredRule
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

TIMEOUTS: Final = {"lock_wait": "5s", "idle": "30s"}


def set_stream_retention(
    runtime: Runtime,
    name: str,
    *,
    retain_s: int | None = None,
    retain_bytes: int | None = None,
    retain_messages: int | None = None,
    retain_unsettled: UnsettledRule | None = None,
    message_ttl_s: int | None = None,
    expired: ExpiredRule | None = None,
) -> bool:
    """Change fields of a topic's `Retention`; return whether that changed anything. Audited.

    The next trimming pass follows, within 10 s; members follow a time to live with their next heartbeat.
    Raises NotFound, InvalidInput, Conflict.
    """
    said = {
        "retain_s": retain_s,
        "retain_bytes": retain_bytes,
        "retain_messages": retain_messages,
        "retain_unsettled": retain_unsettled,
        "message_ttl_s": message_ttl_s,
        "expired": expired,
    }
    changes: dict[str, Any] = {field: value for field, value in said.items() if value is not None}
    if not changes:
        raise InvalidInput("nothing to set: name an age, bytes, messages, a time to live, or what becomes of messages")

    def work(connection: Connection) -> bool:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        row = connection.execute(query("topic_retain_lock"), {"name": name}).fetchone()
        if row is None:
            raise NotFound("topic", name, f"create it: mqlayer topic create {name}")
        topic_id, deleting, *values = row
        if deleting:
            raise Conflict(f"topic {name!r} is being deleted", f"finish that first: mqlayer topic delete {name} --yes")
        before = Retention(*values)
        after = replace(before, **changes)
        after.check()
        if after == before:
            return False
        connection.execute(query("topic_retain_set"), asdict(after) | {"topic_id": topic_id})
        write_audit(connection, runtime.actor, "topic set", name, asdict(after) | {"before": asdict(before)})
        return True

    return runtime.control.transaction(work)
