"""A batch's fence, and its messages' order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic

from mqlayer.consuming.api.batch_messages import BatchKind, BatchMessage, Body, MessageMark
from mqlayer.errors import HandlerFault, InvalidInput, StaleOwner
from mqlayer.failpoints import failpoint
from mqlayer.postgres.caller_connections import Statement, Statements
from mqlayer.postgres.queries import query


class BatchFence(Generic[Body]):
    """Marks messages as the fence answers; none once `closed`."""

    __slots__ = ("_ahead", "_all", "_group", "_kind", "_topic", "closed")

    def __init__(self, kind: BatchKind, topic: str, group: str, messages: list[BatchMessage[Body]]) -> None:
        self._kind, self._topic, self._group, self._all = kind, topic, group, messages
        self.closed = False
        # Of one key: how many leading messages are done or fenced.
        self._ahead = 0

    def statements(
        self, visible: Sequence[BatchMessage[Body]], messages: Iterable[BatchMessage[Body]] | None
    ) -> Statements[list[BatchMessage[Body]]]:
        """Run the fence; return the messages to apply. Raises as `Batch.fence`."""
        chosen = self.choose(visible, messages)
        failpoint("fence.before")
        if chosen:
            answers, epochs = yield Statement(query("fence_many"), _facts_of(chosen), in_transaction=True)
            self.judge(chosen, answers, epochs)
        failpoint("fence.after")
        return [message for message in chosen if message.fenced]

    def choose(
        self, visible: Sequence[BatchMessage[Body]], messages: Iterable[BatchMessage[Body]] | None
    ) -> list[BatchMessage[Body]]:
        """Return messages to fence; default: unmarked visible ones."""
        if messages is None:
            chosen = self.own(m for m in self._ahead_of_failed(visible) if m.mark is MessageMark.OPEN)
        else:
            # A message named twice would be answered "applied" before anything is committed.
            chosen = [m for m in dict.fromkeys(self.own(messages)) if not m.is_done]
        if any(message.fenced for message in chosen):
            raise HandlerFault("the fence was called twice for one message: call it once, in one transaction")
        if any(message.mark is MessageMark.FAILED for message in chosen):
            raise InvalidInput("a message that is marked as failed is not to be applied: leave it out of the fence")
        self.check_order(chosen)
        return chosen

    def _ahead_of_failed(self, visible: Sequence[BatchMessage[Body]]) -> Iterator[BatchMessage[Body]]:
        for message in visible:
            if message.mark is not MessageMark.FAILED:
                yield message
            elif self._kind == "key":
                return

    def judge(self, chosen: list[BatchMessage[Body]], answers: list[str | None], epochs: list[int | None]) -> None:
        """Take over Postgres' answers. Raises StaleOwner."""
        for message, answer, epoch in zip(chosen, answers, epochs, strict=True):
            if answer == "stale":
                # All messages of the lost partition fail.
                for other in self._all:
                    if other.owned is message.owned and not other.is_done:
                        other.mark, other.error = MessageMark.FAILED, self._stale(message, epoch or 0)
                raise self._stale(message, epoch or 0)
        for message, answer in zip(chosen, answers, strict=True):
            if answer == "applied":
                message.mark = MessageMark.APPLIED
            else:
                message.fenced = True

    def _stale(self, message: BatchMessage[Body], epoch: int) -> StaleOwner:
        return StaleOwner(self._group, self._topic, message.identity.lp, message.epoch, epoch)

    def own(self, messages: Iterable[BatchMessage[Body]]) -> list[BatchMessage[Body]]:
        """Check messages. Raises HandlerFault once closed, InvalidInput for another batch's."""
        found = list(messages)
        if self.closed:
            raise HandlerFault("the batch's handler has ended: nothing more is marked or fenced of it")
        for message in found:
            if not (message.index < len(self._all) and self._all[message.index] is message):
                raise InvalidInput("the message is of another batch")
        return found

    def check_order(self, messages: list[BatchMessage[Body]]) -> None:
        """Raise InvalidInput for a message behind an unfinished one of its key."""
        if self._kind == "distinct" or not messages:
            return
        named = {message.index for message in messages}
        for before in self._all[self._ahead : max(named)]:
            passed = before.mark is not MessageMark.FAILED and (before.is_done or before.fenced)
            if passed and before.index == self._ahead:
                self._ahead += 1
            elif not passed and before.index not in named:
                raise InvalidInput(
                    f"message {before.index} of the batch comes before message {max(named)}, of the same key, and is "
                    "not done: go through them in order, and leave what follows a failed one to its next turn"
                )


def _facts_of(messages: list[BatchMessage[Any]]) -> dict[str, Any]:
    facts = [message.fence_facts() for message in messages]
    columns = {"lps": "lp", "sources": "source", "keys": "key", "seqs": "seq", "epochs": "epoch", "replays": "replay"}
    found = {name: [f[of] for f in facts] for name, of in columns.items()}
    # Postgres gets an array of only nulls as text, which array_nulls=off breaks; no array means all null.
    keys = None if all(key is None for key in found["keys"]) else found["keys"]
    return {"group_id": facts[0]["group_id"], **found, "keys": keys}
