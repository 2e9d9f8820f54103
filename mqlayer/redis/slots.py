"""Slots of a Redis Cluster: which shard serves a partition's hash tag (docs/design/redis-cluster.md)."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, NamedTuple

import redis

from mqlayer.domain.node_runs import MAX_SHARDS, is_member, members_of
from mqlayer.errors import ConfigurationRefused, InvalidInput, StoreUnavailable
from mqlayer.redis.access import NodeAccess
from mqlayer.redis.access_errors import not_reached
from mqlayer.redis.addresses import ConnectionFactory, Host, display_url, parse_address, shard_url

SLOT_COUNT: Final = 16_384
NAMELESS: Final = "?"


@lru_cache(maxsize=65_536)
def slot_of(tag: bytes) -> int:
    """Return a hash tag's slot."""
    return crc_hqx(tag, 0) % SLOT_COUNT


class Shard(NamedTuple):
    """A shard's primary. `member`: its name in the cluster; `slots`: ranges [first, last]."""

    member: str
    host: str
    port: int
    slots: tuple[tuple[int, int], ...]

    @property
    def slots_digest(self) -> str:
        """Digest of its slots."""
        return sha256(repr(self.slots).encode()).hexdigest()


class SlotMap(NamedTuple):
    """Shards, and each slot's place in `shards`. `members`: names, replicas' too."""

    shards: Sequence[Shard]
    owners: Sequence[int]
    members: frozenset[str]

    @property
    def told(self) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
        """Primaries' names and slots."""
        return [(shard.member, shard.slots) for shard in self.shards]

    @classmethod
    def of(cls, reply: Iterable[Any], asked: Host, address: str) -> SlotMap:
        """Parse CLUSTER SLOTS.

        Raises StoreUnavailable for uncovered slots or unknown names, ConfigurationRefused for too many shards.
        """
        ranges: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
        members = set[str]()
        for first, last, (host, port, member, *_), *replicas in reply:
            members |= {member.decode(), *(replica[2].decode() for replica in replicas)}
            # A server that does not know its own address leaves it out.
            name = host.decode() if host else ""
            if name == NAMELESS:
                raise StoreUnavailable(
                    address,
                    f"{asked[0]}:{asked[1]} gives out host names, and knows none of the shard at port {port}: "
                    "set cluster-announce-hostname on each server",
                )
            ranges.setdefault((member.decode(), name or asked[0], port), []).append((first, last))
        shards = [Shard(*found, tuple(sorted(slots))) for found, slots in sorted(ranges.items())]
        if len(shards) > MAX_SHARDS:
            raise ConfigurationRefused(
                address, "shards", str(len(shards)), f"a node has at most {MAX_SHARDS}: register further clusters"
            )
        owners = [-1] * SLOT_COUNT
        for number, shard in enumerate(shards):
            for first, last in shard.slots:
                owners[first : last + 1] = [number] * (last + 1 - first)
        if -1 in owners:
            raise StoreUnavailable(address, f"no shard serves slot {owners.index(-1)} of the cluster")
        return cls(shards, owners, frozenset(members))


def read_slots(
    url: str,
    known: Iterable[Host] = (),
    *,
    armed: str | None = None,
    timeout_s: float,
    node: str = "",
    access: NodeAccess | None = None,
) -> SlotMap:
    """Ask seeds, then `known` servers, passing over those cut off. Raises StoreUnavailable."""
    # A seed may have joined another cluster since: the one with a server of the armed run counts.
    reason: Exception = StoreUnavailable(display_url(url), "its address names no server")
    names, found = members_of(armed), list[SlotMap]()
    for host in dict.fromkeys([*parse_address(url).seeds, *known]):
        try:
            slots = ask_slots(url, host, timeout_s=timeout_s, node=node, access=access)
        except StoreUnavailable as error:
            reason = error
            continue
        if any(is_member(member, names) for member in slots.members):
            return slots
        found.append(slots)
    if not found:
        raise reason
    if any(found[0].members.isdisjoint(other.members) for other in found[1:]):
        raise StoreUnavailable(
            display_url(url),
            "its servers are of different clusters, and none is of the armed one: give the servers of one cluster",
        )
    return found[0]


def ask_slots(url: str, host: Host, *, timeout_s: float, node: str = "", access: NodeAccess | None = None) -> SlotMap:
    """Ask one server. Raises StoreUnavailable."""
    seed = ConnectionFactory(
        shard_url(url, host), connect_timeout_s=timeout_s, timeout_s=timeout_s, node=node, access=access
    )
    try:
        seed.resolve_primary()
        seed.connection.connect()
        info, slots = (_ask(seed.connection, word) for word in ("INFO", "SLOTS"))
    except (redis.RedisError, OSError, InvalidInput) as error:
        raise not_reached(display_url(url), error, anonymous=seed.anonymous) from error
    finally:
        seed.connection.disconnect()
    if b"cluster_state:ok" not in info:
        raise StoreUnavailable(display_url(url), f"the cluster is down, says {host[0]}:{host[1]}")
    return SlotMap.of(slots, host, display_url(url))


def _ask(connection: Any, word: str) -> Any:
    connection.send_command("CLUSTER", word, check_health=False)
    return connection.read_response()
