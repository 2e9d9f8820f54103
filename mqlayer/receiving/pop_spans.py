"""Spans of a receiver's calls to nodes, linked to those of its messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mqlayer.receiving.pop_message import PopMessage
from mqlayer.traces import Tracing, current_parent, sampled_parent_of
from mqlayer.traces.tracing import COUNT, GROUP, PARTITION, Operation


class PopSpans:
    """One receiver's spans."""

    def __init__(self, tracing: Tracing, topic: str, group: str) -> None:
        self._tracing, self._topic, self._group = tracing, topic, {GROUP: group}

    def received(self, messages: Sequence[PopMessage], seconds: float) -> None:
        """Make the span of an answered call, if a message is traced."""
        self._record("receive", messages, seconds)

    def settling(self, messages: Sequence[PopMessage], settle: Callable[[], None]) -> None:
        """Settle messages, in a span if one is traced."""
        began, error = time.perf_counter(), ""
        try:
            settle()
        except Exception as raised:
            error = type(raised).__name__
            raise
        finally:
            self._record("settle", messages, time.perf_counter() - began, error)

    def _record(self, operation: Operation, messages: Sequence[PopMessage], seconds: float, error: str = "") -> None:
        parents = [parent for one in messages if (parent := sampled_parent_of(one.headers)) is not None]
        if parents:
            facts: dict[str, Any] = {COUNT: len(messages), **self._group}
            partitions = {message.token.partition for message in messages}
            if len(partitions) == 1:
                facts[PARTITION] = str(*partitions)
            links = self._tracing.links(parents)
            self._tracing.record(
                operation, self._topic, facts, links, seconds=seconds, error=error, parent=current_parent()
            )
