"""The fence of ordered pop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mqlayer.errors import AlreadyApplied, OutOfOrder, StaleOwner, StaleToken
from mqlayer.groups.group import Group
from mqlayer.postgres.caller_connections import Row, Statement, Statements
from mqlayer.postgres.queries import query
from mqlayer.receiving.key_order import KeyOrder
from mqlayer.receiving.pop_message import PopMessage


class PopFence:
    """Fences a message and its key's earlier one; see `Receiver.fence`."""

    def __init__(self, group: Group, key_order: KeyOrder) -> None:
        self._group, self._key_order = group, key_order

    def check(self, message: PopMessage) -> Statements[None]:
        """Check in the effect's own transaction."""
        before = self._before(message)
        if before is not None:
            self._check_order(message, before, (yield self._statement(before)))
        self._judge(message, (yield self._statement(message)))

    def _before(self, message: PopMessage) -> PopMessage | None:
        if self._key_order.is_void(message):
            token = message.token
            raise StaleToken(self._group.name, self._group.topic, [(token.partition, token.offset)])
        return None if message.claimed is not None else self._key_order.before(message)

    def _statement(self, message: PopMessage) -> Statement:
        source, lp, seq = message.identity
        redriven = message.claimed is not None and message.claimed.redriven
        facts: Mapping[str, Any] = {
            "group_id": self._group.group_id,
            "lp": lp,
            "source": source,
            # Later messages of its key may have been applied before a redriven one.
            "key": None if redriven else message.key,
            "seq": seq,
            "epoch": message.token.epoch,
            "replay": message.replay,
        }
        return Statement(query("fence"), facts, in_transaction=True)

    def _check_order(self, message: PopMessage, before: PopMessage, first: Row) -> None:
        if first[0] == "applied":
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
