"""The state of a page of messages in each group: three queries, and one call per node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import NO_KEY
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.inspect.message_life import MissingStep
from mqlayer.inspect.message_search import FoundMessage
from mqlayer.postgres.queries import columns, query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.read_scripts import find_command, find_reply
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.runtime import Runtime

CALL: Final = 256
"""Commands of a pipeline."""


class _Position(NamedTuple):
    group_id: int
    partition: int
    node: NodeId
    start: int
    seek: int


class _Asked(NamedTuple):
    number: int
    offset: int
    key: bytes
    position: _Position


def states_of(
    runtime: Runtime, topic: str, messages: Sequence[FoundMessage], missing: list[MissingStep]
) -> list[Mapping[str, str]]:
    """Return the state of each message by group: waiting, settled, parked, dead, unknown, or an outcome.

    Adds to `missing` the nodes that don't answer.
    """
    placed = [(n, one) for n, one in enumerate(messages) if one.identity is not None and one.partition is not None]
    if not placed:
        return [{} for _ in messages]
    facts = _facts(topic, [one for _, one in placed])
    with runtime.control.connection() as connection:
        rows = connection.execute(query("states_of_messages"), facts).fetchall()
        outcomes = connection.execute(query("outcomes_of_messages"), facts).fetchall()
        positions = [_Position(*row) for row in connection.execute(query("states_positions"), facts).fetchall()]
    told: dict[tuple[int, int], str] = {(number, group): outcome for number, group, outcome in outcomes}
    told |= {(number, group): state for number, group, _, state in rows if state in {"parked", "dead"}}
    told = _in_streams(runtime, [one for _, one in placed], positions, missing) | told
    found: list[dict[str, str]] = [{} for _ in messages]
    for number, group_id, name, state in rows:
        ended = "unknown" if state == "live" else state
        found[placed[number - 1][0]][name] = told.get((number, group_id), ended)
    return list(found)


def _facts(topic: str, messages: Iterable[FoundMessage]) -> dict[str, Any]:
    places = [(one.identity.lp, one.identity.source, one.identity.seq, one.partition, one.offset)
              for one in messages if one.identity is not None]  # fmt: skip
    return {"topic": topic} | columns(("lps", "sources", "seqs", "partitions", "offsets"), places)


def _in_streams(
    runtime: Runtime, messages: Sequence[FoundMessage], positions: Sequence[_Position], missing: list[MissingStep]
) -> dict[tuple[int, int], str]:
    by_partition: dict[int, list[_Position]] = defaultdict(list)
    for position in positions:
        by_partition[position.partition].append(position)
    by_node: dict[NodeId, list[_Asked]] = defaultdict(list)
    for number, one in enumerate(messages, 1):
        key = NO_KEY if one.key is None else one.key.encode()
        for position in by_partition.get(one.partition or 0, ()):
            by_node[position.node].append(_Asked(number, one.offset or 0, key, position))
    found: dict[tuple[int, int], str] = {}
    with NodePool.of_registered(runtime) as pool:
        for node, asked in by_node.items():
            try:
                found |= _on_node(pool.to(node), runtime.prefix, asked)
            except MqlayerError as error:
                missing.append(MissingStep("states in groups", "not_searched", str(error)))
    return found


def _on_node(connection: NodeConnection, prefix: str, asked: Sequence[_Asked]) -> dict[tuple[int, int], str]:
    partitions = list({one.position.partition for one in asked})
    replies = connection.call([("HMGET", partition_keys(prefix, one).meta, "first", "next") for one in partitions])
    bounds = {
        partition: [int(text or 0) for text in raise_for_reply(reply, connection.node.address)]
        for partition, reply in zip(partitions, replies, strict=True)
    }
    kept = [one for one in asked if bounds[one.position.partition][0] <= one.offset < bounds[one.position.partition][1]]
    found: dict[tuple[int, int], str] = {}
    for at in range(0, len(kept), CALL):
        some = kept[at : at + CALL]
        for one, reply in zip(some, connection.call([_find(connection, prefix, one) for one in some]), strict=True):
            waits = find_reply(reply, one.key, connection.node.address).messages
            state = "waiting" if waits else "settled"
            before = one.offset < one.position.start
            found[one.number, one.position.group_id] = "before the group's start" if before else state
    return found


def _find(connection: NodeConnection, prefix: str, one: _Asked) -> Any:
    place = one.position
    return find_command(
        connection, prefix, place.partition, place.group_id, key=one.key, first=one.offset, count=1, seek=place.seek
    )
