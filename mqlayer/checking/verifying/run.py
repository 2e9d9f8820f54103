"""One topic after the other: Postgres, the nodes, Postgres again, and the rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Final

from mqlayer.checking.findings import ASK_AGAIN, Finding, Verdict
from mqlayer.checking.verifying.held import Held, ask_partition
from mqlayer.checking.verifying.rules import RULES, Asked
from mqlayer.checking.verifying.wanted import (
    Before,
    WantedPartition,
    ask_after,
    ask_before,
    rows_kept,
    topics_to_verify,
)
from mqlayer.domain.names import check_name
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.postgres.database import Database
from mqlayer.redis.nodes import Node, NodeConnection
from mqlayer.routes.cache import load_nodes

SHOWN: Final = 20
"""Differences of one rule and topic that are told one by one."""


def verify(
    database: Database,
    topic: str | None = None,
    *,
    application: Database,
    prefix: str,
    deep: bool = False,
    unsafe: bool = False,
) -> list[Finding]:
    """Return where Postgres, the nodes and the archive say different things of a topic, or of all, and what that means.

    Changes nothing, also while everything runs: partitions that change meanwhile are told as unknown. Each rule that
    found nothing has one line that says so. `deep` reads every record's identity on the nodes, and counts the archive.
    Memory goes by LPs and sources, not by messages. Raises NotFound, StoreUnavailable where Postgres does not answer.
    """
    topics = topics_to_verify(database, None if topic is None else check_name("topic", topic))
    if topic is not None and not topics:
        raise NotFound("topic", topic, "those there are: mqlayer topic list")
    nodes = {node.node_id: node for node in load_nodes(database)}
    found: list[Finding] = []
    for topic_id, name in topics:
        before = ask_before(database, application, topic_id, name)
        held, away = _ask_nodes(nodes, before, prefix=prefix, deep=deep, unsafe=unsafe)
        after = ask_after(database, application, before, deep=deep)
        kept = partial(rows_kept, application, topic_id)
        changed = [one for one in before.partitions if one.partition in held and one.partition not in after.partitions]
        judged = {partition: one for partition, one in held.items() if partition in after.partitions}
        found += [*away, *map(_changed, changed), *_judge(Asked(before, after, judged, kept), deep=deep)]
    return found


def _judge(asked: Asked, *, deep: bool) -> Iterator[Finding]:
    for name, rule in RULES.items():
        if name == "chain" and not deep:
            continue
        differences = iter(rule(asked))
        told = list(islice(differences, SHOWN))
        yield from told
        if more := sum(1 for _ in differences):
            subject = f"topic {asked.before.topic}"
            yield Finding(
                name, subject, Verdict.BROKEN, f"{more} more of this kind", "mend the first ones, then ask again"
            )
        if not told:
            yield Finding(name, f"topic {asked.before.topic}", Verdict.OK, _agreed(name, asked))


def _agreed(name: str, asked: Asked) -> str:
    partitions = f"{len(asked.held)} partitions"
    counted = {
        "marks": f"the marks of {len(asked.after.counters)} LPs",
        "outbox": f"the rows of {len(asked.after.counters)} LPs",
        "archive": f"{len(asked.before.archive_marks)} chains",
        "group": f"{sum(len(groups) for groups in asked.before.groups.values())} positions",
    }
    return f"{counted.get(name, partitions)}: no difference"


def _ask_nodes(
    nodes: dict[NodeId, Node], before: Before, *, prefix: str, deep: bool, unsafe: bool
) -> tuple[dict[int, Held | None], list[Finding]]:
    """Return what the nodes hold, and what could not be asked. A copy on a node that was given up is nobody's."""
    homes: dict[NodeId, list[WantedPartition]] = {}
    for wanted in before.partitions:
        if not wanted.given_up:
            homes.setdefault(wanted.node, []).append(wanted)
    held: dict[int, Held | None] = {}
    away: list[Finding] = []
    for node_id, partitions in homes.items():
        try:
            with NodeConnection(nodes[node_id], unsafe=unsafe) as line:
                for wanted in partitions:
                    groups = before.groups.get(wanted.partition, ())
                    held[wanted.partition] = ask_partition(line, prefix, wanted.partition, groups, deep=deep)
        except MqlayerError as error:
            away.append(Finding("node", f"node {nodes[node_id].name}", Verdict.UNKNOWN, str(error), ASK_AGAIN))
    return held, away


def _changed(wanted: WantedPartition) -> Finding:
    seen = "a route change, or the arming of its node, went on meanwhile"
    return Finding("partition", f"partition {wanted.partition}", Verdict.UNKNOWN, seen, "ask again")
