"""Fill a topic's partitions without the programs that are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.stage import BATCH, BODY, KEYS, System
from mqlayer.domain.routing import LP_COUNT, Lp, PartitionId, lp_of
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import AppendReply, MessageRun, append_command, append_reply
from mqlayer.topics import list_nodes

FACTS = b"0"
SOURCE = 1_000_000


def fill(
    system: System,
    count: int,
    *,
    keys: Sequence[str] = KEYS,
    start: int = 0,
    body: bytes = BODY,
    facts: Callable[[int], bytes] = lambda _: FACTS,
) -> None:
    """Append messages of the keys in turn, as a source of the bench's own; `start` are already there.

    `facts`: of a message's number, its time and headers.
    """
    encoded = [key.encode() for key in keys]
    seqs = [0] * LP_COUNT
    for number in range(start):
        seqs[lp_of(encoded[number % len(encoded)])] += 1
    with NodeConnection(list_nodes(system.database)[0]) as connection:
        for first in range(start, start + count, BATCH):
            last = min(first + BATCH, start + count)
            messages = [(encoded[n % len(encoded)], facts(n)) for n in range(first, last)]
            _append(system, connection, messages, seqs, body)


def _append(
    system: System, connection: NodeConnection, messages: list[tuple[bytes, bytes]], seqs: list[int], body: bytes
) -> None:
    by_partition: dict[PartitionId, dict[Lp, list[tuple[bytes, bytes]]]] = {}
    for key, facts in messages:
        lp = lp_of(key)
        partition = system.partition_of(lp)
        by_partition.setdefault(partition, {}).setdefault(lp, []).append((key, facts))
    commands = []
    for partition, by_lp in by_partition.items():
        runs = []
        for lp, group in by_lp.items():
            fields = [field for key, facts in group for field in (facts, key, body)]
            runs.append(MessageRun(lp, seqs[lp] + 1, len(group), fields))
            seqs[lp] += len(group)
        commands.append(append_command(connection, system.settings.key_prefix, partition, SOURCE, runs))
    for reply in connection.call(commands):
        answer = append_reply(reply, connection.node.address)
        if not isinstance(answer, AppendReply) or answer.outcomes is not None:
            raise RuntimeError(f"filling failed: {answer}")
