"""Spans of a relay's appends, linked to those of the messages' inserts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from mqlayer.relay.lp_cursors import RelayBatch, Row
from mqlayer.relay.relay_nodes import AppendRequest, PendingWrite
from mqlayer.traces import TRACE_MARK, Tracing, sampled_parent
from mqlayer.traces.tracing import COUNT, PARTITION

NO_FACTS: Final[tuple[bytes, ...]] = ()


class RelaySpans:
    """Makes a span per answered append that has sampled messages."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        # Of the rows that are planned now: facts with a trace, by chain and seq.
        self._traced: dict[int, dict[int, bytes]] = {}

    def note(self, rows: Sequence[Row]) -> None:
        """Note rows before they are planned."""
        self._traced = {}
        for _, chain, seq, facts, *_ in [row for row in rows if TRACE_MARK in row[3]]:
            self._traced.setdefault(chain, {})[seq] = facts

    def facts_of(self, batch: RelayBatch) -> Sequence[bytes]:
        """Return the traced messages' facts of a batch."""
        if not self._traced:
            return NO_FACTS
        found: list[bytes] = []
        for cursor, first, messages in batch.runs:
            traced = self._traced.get(cursor.chain, {})
            found += [facts for seq, facts in traced.items() if first <= seq < first + len(messages)]
        return found

    def appended(self, topic: str, write: PendingWrite, append: AppendRequest, error: str) -> None:
        """Make the span of an answered append. `error`: class of its refusal."""
        parents = [parent for facts in append.traced if (parent := sampled_parent(facts)) is not None]
        if parents:
            count = sum(count for _, _, count in append.runs)
            facts = {COUNT: count, PARTITION: str(append.target.partition)}
            seconds = time.monotonic() - write.sent_at
            self._tracing.record("send", topic, facts, self._tracing.links(parents), seconds=seconds, error=error)
