"""Reads a Redis's own facts, without judging them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import redis

from mqlayer.domain.node_runs import NO_ID, ShardRun, cluster_run, run_of
from mqlayer.errors import AccessDenied, InvalidInput
from mqlayer.redis.access import NodeAccess, access_here
from mqlayer.redis.access_errors import not_reached
from mqlayer.redis.acl_check import AccessReport, RequiredAccess, access_of
from mqlayer.redis.addresses import ConnectionFactory, display_url, is_cluster_url, shard_url
from mqlayer.redis.cluster_connection import summed_info
from mqlayer.redis.node_connection import Node
from mqlayer.redis.server_versions import Product, ServerVersion, product_of, version_of
from mqlayer.redis.slots import SlotMap, read_slots

READ_SETTINGS: Final = ("appendfsync", "no-appendfsync-on-rewrite", "aof-load-truncated", "min-replicas-to-write")
"""Not in INFO; managed servers may forbid CONFIG."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's facts; `ahead_s`: its clock's lead."""

    info: dict[str, str]
    settings: dict[str, str]
    ahead_s: float
    round_trip_s: float
    shards: Mapping[str, ServerInfo] = field(default_factory=dict)
    """A cluster's shards by address: `info` then has sums, the run of all, and else what the first one says."""

    @property
    def run_id(self) -> str:
        """The run that answered."""
        return run_of({"run_id": "", **self.info})

    @property
    def product(self) -> Product:
        """`redis` or `valkey`."""
        return product_of(self.info)[0]

    @property
    def version(self) -> ServerVersion:
        """The product's version."""
        return product_of(self.info)[1]

    @property
    def redis_version(self) -> ServerVersion:
        """Redis' version, or the one Valkey matches."""
        return version_of(self.info.get("redis_version", ""))

    def number(self, name: str) -> int:
        """Return a number, 0 if missing."""
        text = self.info.get(name, "")
        return int(text) if text.isdecimal() else 0


def read_server_info(
    url: str, *, timeout_s: float, node: str = "", armed: str | None = None, access: NodeAccess | None = None
) -> ServerInfo:
    """Read a server's facts, or all shards' of a cluster. Raises StoreUnavailable; InvalidInput for a bad URL."""
    if is_cluster_url(url):
        slots = read_slots(url, armed=armed, timeout_s=timeout_s, node=node, access=access)
        return _read_cluster_info(url, slots, timeout_s=timeout_s, node=node, access=access)
    attempt = ConnectionFactory(url, connect_timeout_s=timeout_s, timeout_s=timeout_s, node=node, access=access)
    connection = attempt.connection
    try:
        attempt.resolve_primary()
        connection.connect()
        return _ask(connection)
    except (redis.RedisError, OSError, InvalidInput) as error:
        raise not_reached(display_url(url), error, anonymous=attempt.anonymous) from error
    finally:
        connection.disconnect()


def _read_cluster_info(
    url: str, slots: SlotMap, *, timeout_s: float, node: str, access: NodeAccess | None
) -> ServerInfo:
    urls = [shard_url(url, (shard.host, shard.port)) for shard in slots.shards]
    found = [read_server_info(one, timeout_s=timeout_s, node=node, access=access) for one in urls]
    run_id = cluster_run(
        ShardRun(one.run_id, shard.member, shard.slots_digest) for one, shard in zip(found, slots.shards, strict=True)
    )
    info = summed_info([one.info for one in found]) | {"run_id": run_id, "master_replid2": NO_ID}
    slowest = max(found, key=lambda one: one.round_trip_s)
    shards = {display_url(one): facts for one, facts in zip(urls, found, strict=True)}
    return ServerInfo(info, found[0].settings, found[0].ahead_s, slowest.round_trip_s, shards)


def read_access(node: Node, required: RequiredAccess, *, user: str = "", timeout_s: float = 5.0) -> AccessReport:
    """Check a user's rights ('': this process's); on a cluster, the first shard's that lacks some.

    Raises StoreUnavailable.
    """
    if not node.is_cluster:
        return _read_access(node, required, user=user, timeout_s=timeout_s)
    slots = read_slots(node.url, armed=node.armed_run_id, timeout_s=timeout_s, node=node.name)
    urls = [shard_url(node.url, (shard.host, shard.port)) for shard in slots.shards]
    reports = [_read_access(replace(node, url=url), required, user=user, timeout_s=timeout_s) for url in urls]
    return next((one for one in reports if one.missing), reports[0])


def _read_access(node: Node, required: RequiredAccess, *, user: str, timeout_s: float) -> AccessReport:
    attempt = ConnectionFactory(node.url, connect_timeout_s=timeout_s, timeout_s=timeout_s, node=node.name)
    connection = attempt.connection
    try:
        attempt.resolve_primary()
        connection.connect()
        version = ServerInfo(_info(connection), {}, 0.0, 0.0).redis_version
        return access_of(
            lambda commands: [_tried(connection, command) for command in commands], required, version, user
        )
    except (redis.RedisError, OSError, InvalidInput) as error:
        raise not_reached(node.address, error, anonymous=attempt.anonymous) from error
    finally:
        connection.disconnect()


def check_access(node: Node, required: RequiredAccess) -> None:
    """Raise AccessDenied if rights are missing."""
    if access_here().user:
        rights = read_access(node, required)
        if rights.missing:
            raise AccessDenied(node.address, rights.describe(required))


def describe_access(rights: AccessReport, required: RequiredAccess) -> str:
    """Return the report as text."""
    if rights.missing is None:
        return "not known: the server is older than Redis 7, or this user may not call ACL DRYRUN"
    return rights.describe(required) if rights.missing else f"user {rights.user!r} may do all that it needs"


def _tried(connection: Any, command: Sequence[Any]) -> Any:
    try:
        return _call(connection, *map(str, command))
    except redis.ResponseError as error:
        return error


def _info(connection: Any) -> dict[str, str]:
    return dict(part.split(":", 1) for part in _call(connection, "INFO").decode().splitlines() if ":" in part)


def _ask(connection: Any) -> ServerInfo:
    info = _info(connection)
    settings: dict[str, str] = {}
    for name in READ_SETTINGS:
        try:
            reply = _call(connection, "CONFIG", "GET", name)
        except redis.ResponseError:
            continue
        if len(reply) == 2:
            settings[name] = reply[1].decode()
    sent, sent_at = time.monotonic(), time.time()
    seconds, micros = _call(connection, "TIME")
    round_trip_s = time.monotonic() - sent
    ahead_s = int(seconds) + int(micros) / 1e6 - sent_at - round_trip_s / 2
    return ServerInfo(info, settings, ahead_s, round_trip_s)


def _call(connection: Any, *command: str) -> Any:
    connection.send_command(*command, check_health=False)
    return connection.read_response()
