"""Run of all rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final

from mqlayer.doctor.findings import ASK_AGAIN, CheckStatus, Finding
from mqlayer.doctor.verify.expected_state import (
    ExpectedBefore,
    ExpectedPartition,
    ask_after,
    ask_before,
    rows_kept,
    topics_to_verify,
)
from mqlayer.doctor.verify.node_state import NodePartition, ask_partition
from mqlayer.doctor.verify.rules import RULES, TopicState
from mqlayer.domain.names import check_name
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.redis.node_connection import Node
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

MAX_SHOWN: Final = 20


def verify(runtime: Runtime, topic: str | None = None, *, deep: bool = False) -> list[Finding]:
    """Compare Postgres, nodes and archive while they run, for one topic or all.

    Changing partitions are UNKNOWN. `deep` reads every record's identity and counts the archive. Raises NotFound,
    StoreUnavailable.
    """
    topics = topics_to_verify(runtime.control, None if topic is None else check_name("topic", topic))
    if topic is not None and not topics:
        raise NotFound("topic", topic, "those there are: mqlayer topic list")
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    found: list[Finding] = []
    for topic_id, name in topics:
        before = ask_before(runtime.control, runtime.outbox, topic_id, name)
        actual, unreachable = _ask_nodes(runtime, nodes, before, deep=deep)
        after = ask_after(runtime.control, runtime.outbox, before, deep=deep)
        kept = partial(rows_kept, runtime.outbox, topic_id)
        changed = [
            one for one in before.partitions if one.partition in actual and one.partition not in after.partitions
        ]
        judged = {partition: one for partition, one in actual.items() if partition in after.partitions}
        found += [*unreachable, *map(_changed, changed), *_judge(TopicState(before, after, judged, kept), deep=deep)]
    return found


def _judge(state: TopicState, *, deep: bool) -> Iterator[Finding]:
    for name, rule in RULES.items():
        if name == "chain" and not deep:
            continue
        differences = iter(rule(state))
        facts = list(islice(differences, MAX_SHOWN))
        yield from facts
        if more := sum(1 for _ in differences):
            subject = f"topic {state.before.topic}"
            yield Finding(
                name, subject, CheckStatus.BROKEN, f"{more} more of this kind", "repair the first ones, then ask again"
            )
        if not facts:
            yield Finding(name, f"topic {state.before.topic}", CheckStatus.OK, _agreed(name, state))


def _agreed(name: str, state: TopicState) -> str:
    partitions = f"{len(state.actual)} partitions"
    counted = {
        "marks": f"the marks of {len(state.after.counters)} LPs",
        "outbox": f"the rows of {len(state.after.counters)} LPs",
        "archive": f"{len(state.before.archive_marks)} chains",
        "group": f"{sum(len(groups) for groups in state.before.groups.values())} positions",
    }
    return f"{counted.get(name, partitions)}: no difference"


def _ask_nodes(
    runtime: Runtime, nodes: dict[NodeId, Node], before: ExpectedBefore, *, deep: bool
) -> tuple[dict[int, NodePartition | None], list[Finding]]:
    homes: dict[NodeId, list[ExpectedPartition]] = {}
    for expected in before.partitions:
        if not expected.given_up:
            homes.setdefault(expected.node, []).append(expected)
    actual: dict[int, NodePartition | None] = {}
    unreachable: list[Finding] = []
    for node_id, partitions in homes.items():
        try:
            with runtime.connection(nodes[node_id]) as connection:
                for expected in partitions:
                    groups = before.groups.get(expected.partition, ())
                    actual[expected.partition] = ask_partition(
                        connection, runtime.prefix, expected.partition, groups, deep=deep
                    )
        except MqlayerError as error:
            unreachable.append(
                Finding("node", f"node {nodes[node_id].name}", CheckStatus.UNKNOWN, str(error), ASK_AGAIN)
            )
    return actual, unreachable


def _changed(expected: ExpectedPartition) -> Finding:
    seen = "a route change, or the arming of its node, went on meanwhile"
    return Finding("partition", f"partition {expected.partition}", CheckStatus.UNKNOWN, seen, "ask again")
