"""Connections to nodes; each serves one armed run, checked before anything is sent (docs/design/arming-nodes.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, Final

import redis

from mqlayer.domain.node_runs import run_of
from mqlayer.domain.routing import NodeId
from mqlayer.errors import (
    AccessDenied,
    ConfigurationRefused,
    InvalidInput,
    NodeNotArmed,
    NodeOutOfMemory,
    StoreUnavailable,
)
from mqlayer.redis.access import access_here
from mqlayer.redis.access_errors import RIGHTS_HINT, is_denial, not_reached
from mqlayer.redis.acl_check import CHECKED, DEFAULT_USER_ADVICE, RequiredAccess, access_of, loses_transactions
from mqlayer.redis.addresses import ConnectionFactory, display_url, is_cluster_url
from mqlayer.redis.roles import PLAIN_COMMANDS, RedisRole
from mqlayer.redis.scripts import script_digests, script_texts
from mqlayer.redis.server_versions import product_of, version_of, waitaof_is_early

OLDEST: Final = (6, 2, 0)
REQUIRED_SETTINGS: Final = {
    "appendonly": ("yes", "appendonly yes: without it a restart loses everything"),
    "no-appendfsync-on-rewrite": ("no", "no-appendfsync-on-rewrite no: else a rewrite stops the fsync"),
    "maxmemory-policy": ("noeviction", "maxmemory-policy noeviction: any other evicts whole partitions"),
}
"""Value, and advice if it differs."""

INFO_SECTIONS: Final = ("server", "replication", "persistence", "memory")

Command = Sequence[Any]


_scripts_sent: Final[dict[str, str]] = {}
"""The last run at each address that this process sent all scripts to, until it answers NOSCRIPT."""
# Cached: asked for with each reply.
_display = lru_cache(maxsize=256)(display_url)


@dataclass(frozen=True, slots=True)
class Node:
    """A registered Redis or Redis Cluster.

    `armed_run_id`: None until armed; `draining_at`: since then it gets no partitions.
    """

    node_id: NodeId
    name: str
    url: str = field(repr=False)
    armed_run_id: str | None
    draining_at: datetime | None = field(default=None, compare=False)
    zone: str = field(default="", compare=False)
    replicas: int = field(default=0, compare=False)
    """How many it has, as an operator says."""

    @property
    def takes_partitions(self) -> bool:
        """Whether new partitions may be placed there."""
        return self.armed_run_id is not None and self.draining_at is None

    @property
    def is_cluster(self) -> bool:
        """Whether it is a Redis Cluster."""
        return is_cluster_url(self.url)

    @property
    def address(self) -> str:
        """URL for messages, without secrets."""
        return _display(self.url)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Answers at connect."""

    run_id: str
    version: tuple[int, int, int]
    role: str
    settings: dict[str, str]
    in_cluster: bool = False
    early_waitaof: bool = False
    """See `waitaof_is_early`."""


class NodeConnection:
    """One connection to a node, for one thread; connects on use.

    Error replies are returned, not raised. A failed connection raises StoreUnavailable; sent commands have an
    unknown outcome. Any thread may replace `node`; a connection to another run or address closes at its next use.
    `required`: rights to check once per run. `any_run`, `unsafe`: skip the check of run or settings.
    """

    is_cluster: ClassVar[bool] = False
    is_of_cluster: ClassVar[bool] = False

    def __init__(
        self,
        node: Node,
        *,
        connect_timeout_s: float = 5.0,
        timeout_s: float = 10.0,
        any_run: bool = False,
        unsafe: bool = False,
        required: RequiredAccess | None = None,
    ) -> None:
        self.node, self._required = node, required
        self.facts: ServerFacts | None = None
        self._any_run, self._unsafe = any_run, unsafe
        self._connect_timeout_s, self._timeout_s = connect_timeout_s, timeout_s
        self._digests: dict[str, bytes] = {}
        self._demoted = False
        self._open_connection(node.url)

    def connect(self) -> ServerFacts:
        """Connect unless connected: check run, role, settings and rights; load scripts once per run.

        Raises StoreUnavailable, NodeNotArmed, AccessDenied or ConfigurationRefused; nothing was sent. If another run or
        address counts by now, raises StoreUnavailable: commands under way have an unknown outcome.
        """
        facts = self.facts
        if facts is not None:
            self._refuse_if_void(facts)
            return facts
        node = self.node
        try:
            if node.url != self._url:
                self._open_connection(node.url)
            self._aim()
            self._factory.connect()
        except (redis.RedisError, OSError, InvalidInput) as error:
            self.close()
            raise not_reached(node.address, error, anonymous=self._anonymous) from error
        except BaseException:
            self.close()
            raise
        facts = self.facts
        if facts is None:
            self.close()
            raise StoreUnavailable(node.address, "the line was closed while it was connected")
        return facts

    def _open_connection(self, url: str) -> None:
        connection = ConnectionFactory(
            url, node=self.node.name, connect_timeout_s=self._connect_timeout_s, timeout_s=self._timeout_s
        )
        self._url, self._aim, self._factory, self._anonymous = (
            url,
            connection.resolve_primary,
            connection.connection,
            connection.anonymous,
        )
        # The driver reconnects by itself: that must run the checks too.
        self._factory.redis_connect_func = self._handshake

    def _handshake(self, connection: Any) -> None:
        connection.on_connect_check_health(check_health=False)
        facts = self._ask_facts()
        self._check(facts)
        self._check_rights(facts)
        if _scripts_sent.get(self._url) != facts.run_id:
            self._load_scripts(facts)
        self._digests = dict(script_digests(facts.version))
        self.facts, self._demoted = facts, False

    def _refuse_if_void(self, facts: ServerFacts) -> None:
        node = self.node
        if self._demoted:
            self.close()
            raise StoreUnavailable(node.address, "it is not the primary any more")
        if node.url != self._url:
            self.close()
            raise StoreUnavailable(node.address, "the node has this address now, the line was to another one")
        if not self._any_run and facts.run_id != node.armed_run_id:
            self.close()
            reason = f"run {facts.run_id[:8]} is not the armed one any more"
            raise StoreUnavailable(node.address, f"{reason}: the connection to it is given up")

    def call(self, commands: Sequence[Command]) -> list[Any]:
        """Send in one write; return replies in order.

        Scripts that the server forgot are loaded, and their commands repeated once, in order: behind all others. Where
        a later command relies on an earlier script's having run, or in MULTI, use `call_once`.
        """
        replies = self.call_once(commands)
        missing = [place for place, reply in enumerate(replies) if is_missing_script(reply)]
        if missing:
            self.reload_scripts()
            for place, reply in zip(missing, self.call_once([commands[place] for place in missing]), strict=True):
                replies[place] = reply
        return replies

    def call_once(self, commands: Sequence[Command]) -> list[Any]:
        """Send in one write; return all replies, NOSCRIPT too."""
        self.send(commands)
        return self.receive(len(commands))

    def send(self, commands: Iterable[Command]) -> None:
        """Send without waiting; `receive` as many replies."""
        self.connect()
        self._send(self._factory.pack_commands, commands)

    def send_packet(self, *packets: bytes) -> None:
        """Send encoded requests in one write; `receive` as many replies."""
        self.connect()
        self._send(tuple, packets if len(packets) == 1 else (b"".join(packets),))

    def _send(self, pack: Callable[[Any], Any], requests: Iterable[Any]) -> None:
        try:
            self._factory.send_packed_command(pack(requests), check_health=False)
        except (redis.RedisError, OSError) as error:
            self.close()
            raise not_reached(self.node.address, error) from error
        except BaseException:
            # The server may have part of a request and would read the next one as its rest.
            self.close()
            raise

    def digest(self, name: str) -> bytes:
        """Return a script's digest."""
        self.connect()
        return self._digests[name]

    def ready(self, timeout_s: float) -> bool:
        """Whether a reply or disconnect arrives in time."""
        self.connect()
        try:
            return bool(self._factory.can_read(timeout_s))
        except (redis.RedisError, OSError) as error:
            self.close()
            raise not_reached(self.node.address, error) from error

    def receive(self, count: int) -> list[Any]:
        """Return `count` replies; errors are exceptions in the list."""
        replies: list[Any] = []
        read = self._factory.read_response
        try:
            for _ in range(count):
                try:
                    replies.append(read())
                except redis.ResponseError as error:
                    # A demoted primary keeps its connections; only a new connection reaches the new primary.
                    self._demoted = self._demoted or "READONLY" in str(error) or _is_demotion(error)
                    if is_missing_script(error):
                        _scripts_sent.pop(self._url, None)
                    replies.append(error)
        except (redis.RedisError, OSError) as error:
            self.close()
            raise not_reached(self.node.address, error) from error
        except BaseException:
            # Unread replies would be taken for those of later commands.
            self.close()
            raise
        return replies

    def script(self, name: str, keys: Sequence[bytes], *args: Any) -> Command:
        """Return an EVALSHA command."""
        self.connect()
        return (b"EVALSHA", self._digests[name], len(keys), *keys, *args)

    def whole_script(self, name: str, keys: Sequence[bytes], *args: Any) -> Command:
        """Return an EVAL command, if the server may lack the script."""
        return (b"EVAL", script_texts(self.connect().version)[name], len(keys), *keys, *args)

    def close(self) -> None:
        """Close; the next use reconnects."""
        self.facts = None
        self._factory.disconnect()

    def __enter__(self) -> NodeConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reload_scripts(self) -> None:
        """Load scripts again, after NOSCRIPT."""
        facts = self.connect()
        try:
            self._load_scripts(facts)
        except (redis.RedisError, OSError) as error:
            self.close()
            raise not_reached(self.node.address, error) from error

    def _ask_facts(self) -> ServerFacts:
        asked = REQUIRED_SETTINGS if self._may_ask_settings() else {}
        commands: list[Command] = [("INFO", section) for section in INFO_SECTIONS]
        replies = self._ask([*commands, *(("CONFIG", "GET", name) for name in asked)])
        for reply in replies[: len(commands)]:
            if isinstance(reply, Exception):
                raise reply
        text = "\n".join(reply.decode() for reply in replies[: len(commands)])
        info = dict(connection.split(":", 1) for connection in text.splitlines() if ":" in connection)
        settings = _settings_from_info(info)
        for name, reply in zip(asked, replies[len(commands) :], strict=True):
            # Managed servers forbid CONFIG: trust the operator for these settings.
            if not isinstance(reply, Exception) and len(reply) == 2:
                settings[name] = reply[1].decode()
        version, early = version_of(info["redis_version"]), waitaof_is_early(*product_of(info))
        # Valkey calls it by a name of its own.
        in_cluster = "cluster" in (info.get("redis_mode", "").strip(), info.get("server_mode", "").strip())
        return ServerFacts(run_of(info), version, info["role"], settings, in_cluster, early)

    def _ask(self, commands: Sequence[Command]) -> list[Any]:
        self._factory.send_packed_command(self._factory.pack_commands(commands), check_health=False)
        return self.receive(len(commands))

    def _may_ask_settings(self) -> bool:
        """CONFIG GET shows replication passwords; few roles have it."""
        required = self._required
        return not access_here().user or (required is not None and "config|get" in PLAIN_COMMANDS[required.role])

    def _check_rights(self, facts: ServerFacts) -> None:
        required, user = self._required, access_here().user
        if required is None or CHECKED.has(self._url, facts.run_id, user, required):
            return
        found = access_of(self._ask, required, facts.version)
        if found.missing:
            raise AccessDenied(self.node.address, found.describe(required))
        if (
            required.role is RedisRole.ARMING
            and not self._unsafe
            and loses_transactions(self._ask, required, facts.version)
        ):
            raise ConfigurationRefused(self.node.address, "the list of user default", "too short", DEFAULT_USER_ADVICE)
        CHECKED.add(self._url, facts.run_id, user, required)

    def _check(self, facts: ServerFacts) -> None:
        address = self.node.address
        if facts.role not in ("master", "primary"):
            raise StoreUnavailable(address, f"it is a {facts.role}: give the primary's address")
        if facts.in_cluster and not self.is_of_cluster:
            raise ConfigurationRefused(
                address, "", "this is a server of a Redis Cluster", "register that as one node: cluster://host,host2"
            )
        if facts.version < OLDEST:
            shown = ".".join(map(str, facts.version))
            raise ConfigurationRefused(
                address, "", f"this is Redis {shown}", "mqlayer needs Redis 6.2 or later, or Valkey"
            )
        if not self._unsafe:
            for name, value in facts.settings.items():
                wanted, advice = REQUIRED_SETTINGS[name]
                if value != wanted:
                    raise ConfigurationRefused(address, name, value, advice)
        if not self._any_run and facts.run_id != self.node.armed_run_id:
            raise NodeNotArmed(
                address,
                f"its run {facts.run_id[:8]} is not the armed one; it restarted, was promoted or was replaced: "
                f"any worker, or `mqlayer node rearm {self.node.name}`, arms it again",
            )

    def _load_scripts(self, facts: ServerFacts) -> None:
        for reply in self._ask([("SCRIPT", "LOAD", text) for text in script_texts(facts.version).values()]):
            if isinstance(reply, Exception):
                raise reply
        _scripts_sent[self._url] = facts.run_id


def _settings_from_info(info: Mapping[str, str]) -> dict[str, str]:
    settings = {"maxmemory-policy": info.get("maxmemory_policy", "")}
    if "aof_enabled" in info:
        settings["appendonly"] = "yes" if info["aof_enabled"].strip() == "1" else "no"
    return {name: value.strip() for name, value in settings.items() if value}


def raise_for_reply(reply: Any, address: str) -> Any:
    """Return a reply; raise NodeOutOfMemory, AccessDenied or StoreUnavailable for an error."""
    if not isinstance(reply, Exception):
        return reply
    if isinstance(reply, redis.exceptions.OutOfMemoryError) or "OOM" in str(reply):
        raise NodeOutOfMemory(address) from reply
    if is_denial(reply):
        raise AccessDenied(address, f"{reply}: {RIGHTS_HINT}") from reply
    raise StoreUnavailable(address, _reason(reply)) from reply


def _reason(reply: Exception) -> str:
    # The driver's own texts for these are a number and an address, or do not say what moves.
    if isinstance(reply, redis.exceptions.AskError):
        return f"slot {reply.slot_id} of the cluster moved, or is moving, to {reply.node_addr[0]}:{reply.node_addr[1]}"
    if isinstance(reply, redis.exceptions.TryAgainError):
        return f"a slot of the cluster is moving: {reply}"
    return str(reply)


def _is_demotion(reply: Exception) -> bool:
    return isinstance(reply, redis.exceptions.ReadOnlyError | redis.exceptions.MasterDownError)


def is_missing_script(reply: Any) -> bool:
    """Whether a reply is NOSCRIPT."""
    return isinstance(reply, redis.exceptions.NoScriptError)
