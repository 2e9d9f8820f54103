"""Layouts for each power of ten of messages per second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Final

from bench.model.predict import Layout, heartbeats, needed, predict

RATES: Final = (1_000, 10_000, 100_000, 1_000_000)
GROUPS: Final = 3
HANDLER_MS: Final = 5.0
TOPIC_PARTITIONS: Final = 1_024
"""The most that a topic has."""


def ladder() -> Iterator[tuple[str, ...]]:
    """Yield a row per rate: units that are busy for seven tenths of their time, and what bounds them."""
    yield ("messages/s", "outboxes", "relays", "nodes", "partitions", "members", "topics", "heartbeats", "bottleneck")
    for rate in RATES:
        layout = fitted(Layout(rate=rate, groups=GROUPS, handler_ms=HANDLER_MS, outboxes=1, transaction=10))
        found = predict(layout)
        yield (
            f"{rate:,}",
            f"{layout.outboxes}",
            f"{layout.outboxes * layout.relays}",
            f"{layout.nodes}",
            f"{layout.partitions:,}",
            f"{layout.members * layout.groups:,}",
            f"{ceil(layout.partitions / TOPIC_PARTITIONS)}",
            f"{heartbeats(layout):.1f} cores",
            f"{found.bottleneck}, {found.throughput:,.0f}/s",
        )


def fitted(layout: Layout) -> Layout:
    """Return the layout with the units that its rate needs, and two partitions for each member."""
    for _ in range(10):
        needs = needed(layout)
        slots = needs["handlers"] / layout.concurrency / 0.9
        members = max(1, needs["consumers"], ceil(slots))
        outboxes = max(1, ceil(needs.get("outbox Postgres", 0) / layout.postgres_cores))
        layout = replace(
            layout,
            nodes=max(1, needs["nodes"]),
            members=members,
            partitions=max(layout.nodes, 2 * members),
            outboxes=outboxes,
            relays=max(1, ceil(needs.get("relays", 0) / outboxes)),
        )
    return layout
