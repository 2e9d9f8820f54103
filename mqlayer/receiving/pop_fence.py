"""The fence of ordered pop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mqlayer.errors import AlreadyApplied, OutOfOrder, StaleOwner, StaleToken
from mqlayer.groups.group import Group
from mqlayer.postgres.caller_connections import caller_errors, run_one, run_one_async
from mqlayer.postgres.queries import query
from mqlayer.receiving.key_order import KeyOrder
from mqlayer.receiving.pop_message import PopMessage

Row = tuple[Any, ...]


class PopFence:
    """Fences a message and its key's earlier one; see `Receiver.fence`."""

    def __init__(self, group: Group, key_order: KeyOrder) -> None:
        self._group, self._key_order = group, key_order

    def fence(self, connection: Any, message: PopMessage) -> None:
        """Check in the effect's own transaction."""
        before = self._before(message)
        with caller_errors(connection):
            first = run_one(connection, query("fence"), self._facts(before)) if before else None
            self._check_order(message, before, first)
            self._judge(message, run_one(connection, query("fence"), self._facts(message)))

    async def afence(self, connection: Any, message: PopMessage) -> None:
        """`fence` on an async connection."""
        before = self._before(message)
        with caller_errors(connection):
            first = await run_one_async(connection, query("fence"), self._facts(before)) if before else None
            self._check_order(message, before, first)
            self._judge(message, await run_one_async(connection, query("fence"), self._facts(message)))

    def _before(self, message: PopMessage) -> PopMessage | None:
        if self._key_order.is_void(message):
            token = message.token
            raise StaleToken(self._group.name, self._group.topic, [(token.partition, token.offset)])
        return self._key_order.before(message)

    def _facts(self, message: PopMessage) -> Mapping[str, Any]:
        source, lp, seq = message.identity
        return {
            "group_id": self._group.group_id,
            "lp": lp,
            "source": source,
            "key": message.key,
            "seq": seq,
            "epoch": message.token.epoch,
            "replay": message.replay,
        }

    def _check_order(self, message: PopMessage, before: PopMessage | None, first: Row | None) -> None:
        if before is None or first is None or first[0] == "applied":
            return
        if first[0] == "stale":
            self._judge(message, first)
        token = message.token
        raise OutOfOrder(self._group.name, self._group.topic, token.partition, token.offset, before.token.offset)

    def _judge(self, message: PopMessage, row: Row) -> None:
        answer, epoch = row
        lp, seq = message.identity.lp, message.identity.seq
        if answer == "applied":
            raise AlreadyApplied(self._group.name, self._group.topic, lp, seq)
        if answer == "stale":
            raise StaleOwner(self._group.name, self._group.topic, lp, message.token.epoch, epoch)
