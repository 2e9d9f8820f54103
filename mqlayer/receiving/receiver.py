"""Receivers of ordered pop: no membership, no assignment.

```python
with mqlayer.Receiver("orders", group="mailer") as receiver:
    while running:
        for message in receiver.receive(max_messages=32, visibility_timeout_s=30):
            send_mail(message.body)
            receiver.ack([message])
```
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self

from mqlayer.domain.names import check_name
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.groups.group import Group, GroupSettings, Scope, check_settings, check_start, ensure_group
from mqlayer.groups.start_positions import Start
from mqlayer.idempotency import InboxEntry, arecord_effect, record_effect
from mqlayer.postgres.caller_connections import run, run_async
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.notifications import GROUP, NotificationListener
from mqlayer.postgres.rights import Right, require
from mqlayer.receiving.fetcher import Fetcher
from mqlayer.receiving.key_order import KeyOrder
from mqlayer.receiving.node_pool import NodePool
from mqlayer.receiving.partition_cache import PartitionCache
from mqlayer.receiving.pop_fence import PopFence
from mqlayer.receiving.pop_message import PopMessage
from mqlayer.receiving.settler import PopSettler
from mqlayer.redis.access import use_access
from mqlayer.redis.pop_scripts import BATCH_LIMIT, ReceiveRequest
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.settings import Settings

BATCH_BYTES: Final = 4_000_000
"""A batch ends when keys and bodies reach it."""
LONGEST_S: Final = 12 * 3600.0


@dataclass(frozen=True, slots=True)
class _ReceiverParts:
    group: Group
    fetcher: Fetcher
    settler: PopSettler
    fence: PopFence
    key_order: KeyOrder


class Receiver:
    """Receives and settles messages of a topic for a group with ordered pop.

    Any number may run in any process; a dead one delays its messages by their visibility timeout. The first creates the
    group: `scope` is withheld while a message is out ("key", the default, or "partition"); `start` as in
    `App.consumer`. One thread at a time receives, any settles. Opening raises Conflict for a group of members, or
    another scope.
    """

    def __init__(
        self,
        topic: str,
        *,
        group: str,
        settings: Settings | None = None,
        scope: Scope | None = None,
        start: Start | None = None,
    ) -> None:
        self._topic, self._group = check_name("topic", topic), check_name("group", group)
        check_start(start)
        self._wanted = GroupSettings(start, mode="pop", scope=scope)
        check_settings(self._wanted)
        self._settings = settings
        self._cleanup = ExitStack()
        self._parts: _ReceiverParts | None = None
        self._receiving = threading.Lock()

    def open(self) -> Self:
        """Connect; create a missing group. Raises the stores' errors."""
        if self._parts is not None:
            raise Conflict("the receiver is open", "close it first")
        with ExitStack() as cleanup:
            self._parts = self._open(cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def close(self) -> None:
        """Disconnect. Messages stay out until their visibility timeout: `nack` them before."""
        self._parts = None
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def group(self) -> Group:
        """The group at opening."""
        return self._open_parts().group

    @property
    def fetch_count(self) -> int:
        """Calls to partitions."""
        return self._open_parts().fetcher.fetch_count

    def receive(
        self,
        max_messages: int = 32,
        *,
        visibility_timeout_s: float = 30.0,
        wait_s: float = 20.0,
        attempt_id: str | None = None,
    ) -> list[PopMessage]:
        """Return the next batch, of one partition, in order; empty after `wait_s`.

        Other receivers get neither these messages nor later ones of their scope until they are settled or time out.
        Handle a key's in turn; on failure `nack`, skip the rest of the key. After a lost reply, the same `attempt_id`
        (a-z, then a-z 0-9 _ . -) returns the same messages, uncounted, from nodes that answer. Raises InvalidInput for
        bad bounds (max_messages 1 to 500), StoreUnavailable if no partition could be asked.
        """
        check_bounds(max_messages, visibility_timeout_s, wait_s)
        attempt = f"r{uuid.uuid4().hex}" if attempt_id is None else check_name("attempt", attempt_id)
        request = ReceiveRequest(attempt, max_messages, BATCH_BYTES, max(1, round(visibility_timeout_s * 1000)))
        until = time.monotonic() + wait_s
        parts = self._open_parts()
        with self._receiving:
            found = parts.fetcher.repeat(request) if attempt_id is not None else []
            if not found:
                found = _fetch_until(parts.fetcher, request, until, repeat=attempt_id is None)
            parts.key_order.delivered(found)
            return found

    def ack(self, messages: Iterable[PopMessage]) -> None:
        """Settle messages of any batches; idempotent.

        Raises StaleToken for redelivered messages (the rest is settled), InvalidInput for unknown offsets,
        StoreUnavailable: call again.
        """
        parts, wanted = self._open_parts(), list(messages)
        parts.settler.settle("ack", [message.token for message in wanted])
        parts.key_order.settled(wanted)

    def nack(self, message: PopMessage, *, delay_s: float = 0.0) -> None:
        """Return a message and all behind it in its scope; they come again after the delay, in order.

        Tokens of those behind are void. Raises as `ack`; repeated after StoreUnavailable, StaleToken means that the
        first call succeeded.
        """
        check_duration("the delay", delay_s, least=0.0)
        parts = self._open_parts()
        parts.key_order.returned(message)
        parts.settler.settle("nack", [message.token], ms=round(delay_s * 1000))

    def extend(self, message: PopMessage, seconds: float) -> None:
        """Withhold a message for `seconds` from now. Raises as `ack`."""
        check_duration("the visibility timeout", seconds, least=0.0)
        self._open_parts().settler.settle("extend", [message.token], ms=round(seconds * 1000))

    def fence(self, connection: Any, message: PopMessage) -> None:
        """Check, in the effect's own transaction, that the message is not applied and its epoch is current.

        Call it first, once per message, on the effect's connection. Roll back on AlreadyApplied, StaleOwner, StaleToken
        and OutOfOrder; after AlreadyApplied, `ack`. The seq per key makes the effect happen once, since receivers share
        the epoch. If an earlier message of the key is in hand without its effect: OutOfOrder.
        """
        run(connection, self._open_parts().fence.check(message))

    async def afence(self, connection: Any, message: PopMessage) -> None:
        """`fence` on an async connection."""
        await run_async(connection, self._open_parts().fence.check(message))

    def inbox(self, connection: Any, message: PopMessage, *, name: str | None = None) -> None:
        """Record the effect in its own transaction: once, in any order, whatever the token. After AlreadyApplied,
        `ack`."""
        record_effect(connection, self._entry(message, name))

    async def ainbox(self, connection: Any, message: PopMessage, *, name: str | None = None) -> None:
        """`inbox` on an async connection."""
        await arecord_effect(connection, self._entry(message, name))

    def _entry(self, message: PopMessage, name: str | None) -> InboxEntry:
        group = self._open_parts().group
        return InboxEntry(group.group_id, group.name, group.topic, message.identity, name, message.replay)

    def _open_parts(self) -> _ReceiverParts:
        if self._parts is None:
            raise Conflict("the receiver is not open", "use it as a context manager, or call open()")
        return self._parts

    def _open(self, cleanup: ExitStack) -> _ReceiverParts:
        settings = self._settings or Settings()
        use_access(settings)
        wait_s, prefix = settings.connect_timeout_s, settings.key_prefix
        name = "mqlayer receiver"
        control = settings.control_dsn()
        database = cleanup.enter_context(Database(control, application=name, max_size=3, timeout_s=wait_s))
        effects = Database(settings.application_dsn(), application=name, max_size=1, timeout_s=wait_s)
        application = cleanup.enter_context(effects)
        with database.connection() as connection:
            require(connection, "control", Right.CONSUME, f"{self._topic}/{self._group}")
            check_schema(connection, "control", database.address)
        routes = RouteCache(database)
        cleanup.callback(routes.close)
        group = ensure_group(
            database,
            routes,
            topic=self._topic,
            name=self._group,
            prefix=prefix,
            settings=self._wanted,
            unsafe=settings.allow_unsafe_redis,
        )
        cache = PartitionCache(database, group, routes, prefix=prefix)
        cleanup.callback(cache.close)
        asking, telling = NodePool(routes, settings), NodePool(routes, settings)
        cleanup.callback(asking.close)
        cleanup.callback(telling.close)
        settler = PopSettler(group, cache, telling, routes, prefix=prefix, name=f"r-{uuid.uuid4().hex}")
        fetcher = Fetcher(
            group, cache, asking, settler,
            settings=settings, database=database, application=application, routes=routes,
        )  # fmt: skip
        key_order = KeyOrder()

        def hear(group_id: str) -> None:
            if group_id in ("", str(group.group_id)):
                fetcher.refresh_soon()

        notices = NotificationListener(database, GROUP, hear)
        notices.start()
        cleanup.callback(notices.close)
        return _ReceiverParts(group, fetcher, settler, PopFence(group, key_order), key_order)


def _fetch_until(fetcher: Fetcher, request: ReceiveRequest, until: float, *, repeat: bool) -> list[PopMessage]:
    fetcher.wait_for_wakeup(0.0)
    while True:
        found = fetcher.fetch(request, repeat=repeat)
        left_s = until - time.monotonic()
        if found or left_s <= 0:
            if not found and fetcher.last_error is not None:
                raise fetcher.last_error
            return found
        fetcher.wait_for_wakeup(left_s)


def check_bounds(max_messages: int, visibility_timeout_s: float, wait_s: float) -> None:
    """Raise InvalidInput for arguments of `receive`."""
    if not 1 <= max_messages <= BATCH_LIMIT:
        raise InvalidInput(f"max_messages is {max_messages}: a batch has 1 to {BATCH_LIMIT} messages")
    check_duration("the visibility timeout", visibility_timeout_s, least=0.001)
    if not 0 <= wait_s < math.inf:
        raise InvalidInput(f"wait_s is {wait_s}: wait for 0 seconds or more")


def check_duration(what: str, seconds: float, *, least: float) -> None:
    """Raise InvalidInput unless `least` to 12 hours."""
    if not least <= seconds <= LONGEST_S:
        raise InvalidInput(f"{what} is {seconds:g} s: say {least:g} to {LONGEST_S:,.0f} seconds")
