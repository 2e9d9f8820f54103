"""The busiest keys of a partition, by its newest records; no body leaves the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from mqlayer.domain.message import NO_KEY
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.groups.start_positions import undeleted_partitions
from mqlayer.inspect.overviews import topic_settings
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.read_scripts import SEARCH_LIMIT, FoundRecord, RecordFilter, search_command, search_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.runtime import Runtime

RECORDS: Final = 2_000
RECORDS_LIMIT: Final = 5_000
KEYS: Final = 20


class BusyKey(NamedTuple):
    """A key with its messages among those read. `key`: None for messages without one."""

    key: str | None
    messages: int
    share: float


class BusiestKeys(NamedTuple):
    """The busiest keys, the first one first. `read`: messages, published within `over_s` seconds; `keys`: different."""

    partition: int
    read: int
    over_s: float
    keys: int
    busiest: Sequence[BusyKey]


def busiest_keys(runtime: Runtime, topic: str, partition: int, *, records: int = RECORDS) -> BusiestKeys:
    """Return the KEYS busiest keys of the newest `records`, fewer where bodies are large: two calls of the node.

    Raises InvalidInput, NotFound, StoreUnavailable.
    """
    if not 1 <= records <= RECORDS_LIMIT:
        raise InvalidInput(f"keys are counted in 1 to {RECORDS_LIMIT:,} records, not {records:,}")
    topic_id = topic_settings(runtime.control, topic).topic_id
    with runtime.control.connection() as connection:
        there = undeleted_partitions(connection, topic_id)
    one = next((one for one in there if one.partition == partition), None)
    if one is None:
        raise NotFound("partition", partition, f"see those that there are: mqlayer topic show {topic}")
    with NodePool.of_registered(runtime, RedisRole.VIEWER) as pool:
        return busiest_keys_at(pool.to(one.node), runtime.prefix, partition, records=records)


def busiest_keys_at(connection: NodeConnection, prefix: str, partition: int, *, records: int = RECORDS) -> BusiestKeys:
    """Return the busiest keys of a partition of a node."""
    kept = [each.record for each in _newest(connection, prefix, partition, records)]
    kept = [each for each in kept if not each.void]
    counts = Counter(None if each.key == NO_KEY else each.key.decode(errors="replace") for each in kept)
    times = [each.at_ms for each in kept]
    busiest = [BusyKey(key, count, count / len(kept)) for key, count in counts.most_common(KEYS)]
    return BusiestKeys(partition, len(kept), (max(times) - min(times)) / 1000 if times else 0.0, len(counts), busiest)


def _newest(connection: NodeConnection, prefix: str, partition: int, records: int) -> Iterator[FoundRecord]:
    address = connection.node.address
    (reply,) = connection.call([("HMGET", partition_keys(prefix, partition).meta, "first", "next")])
    first, past = (int(text or 1) for text in raise_for_reply(reply, address))
    commands = [
        search_command(
            connection, prefix, partition, RecordFilter(), first=begin, past=min(past, begin + SEARCH_LIMIT),
            limit=SEARCH_LIMIT,
        )
        for begin in range(max(first, past - records), past, SEARCH_LIMIT)
    ]  # fmt: skip
    for reply in connection.call(commands) if commands else ():
        yield from search_reply(reply, address)[1]
