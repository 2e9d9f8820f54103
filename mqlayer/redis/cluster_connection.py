"""Connections to a Redis Cluster, used as one node: docs/design/redis-cluster.md.

Nothing is sent twice. A redirect is a refusal, and has the slots read again before the next write.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

import redis

from mqlayer.domain.node_runs import ShardRun, cluster_run, is_same_run
from mqlayer.errors import NodeNotArmed, StoreUnavailable
from mqlayer.redis.addresses import Host, shard_url
from mqlayer.redis.node_connection import Command, NodeConnection, ServerFacts
from mqlayer.redis.scripts import script_digests
from mqlayer.redis.slots import SlotMap, ask_slots, read_slots, slot_of

POLL_S: Final = (0.001, 0.02)
"""Pauses between looks at idle streams: one blocking read spans no two slots."""
EVERY_SHARD: Final = frozenset({"INFO", "PING", "BGREWRITEAOF", "CONFIG"})
READS: Final = frozenset({"XREAD", "XREADGROUP"})
SCRIPT_CALLS: Final = frozenset({"EVAL", "EVALSHA"})
REDIRECTS: Final = (
    redis.exceptions.AskError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ReadOnlyError,
)
"""MOVED is an AskError."""
SUMMED: Final = frozenset(
    {"used_memory", "maxmemory", "total_system_memory", "instantaneous_ops_per_sec", "total_commands_processed",
     "used_cpu_sys", "used_cpu_user", "connected_clients", "evicted_keys", "expired_keys"}
)  # fmt: skip
"""Numbers of INFO that a cluster has as a sum."""


class ShardConnection(NodeConnection):
    """A connection to one shard's primary. Once pinned, a reconnect must meet the same run."""

    is_of_cluster: ClassVar[bool] = True

    def pin(self) -> str:
        """Connect; return the run."""
        run_id = self.connect().run_id
        self._any_run, self.node = False, replace(self.node, armed_run_id=run_id)
        return run_id


class _Expected(NamedTuple):
    """Where a command's reply comes from: so many replies of shards, in order, and how they become one."""

    shards: Sequence[int]
    merge: Callable[[list[Any]], Any]


class _StreamRead(NamedTuple):
    """An XREAD or XREADGROUP without BLOCK: per shard, one read per slot."""

    parts: Sequence[tuple[int, Command]]
    block_ms: int


class ClusterConnection(NodeConnection):
    """A connection per shard, used as one. A read that waits on several partitions looks at them in turns."""

    is_cluster: ClassVar[bool] = True

    def _open_connection(self, url: str) -> None:
        self._url = url
        self._shards: list[ShardConnection] = []
        self._known: list[Host] = []
        self._slots: SlotMap | None = None
        self._expected: deque[_Expected] = deque()
        self._moved = self._busy = False

    def connect(self) -> ServerFacts:
        """Connect to all shards unless connected, as NodeConnection does."""
        facts = self.facts
        if facts is not None and not (self._moved and not self._expected):
            self._refuse_if_void(facts)
            return facts
        self.close()
        if self.node.url != self._url:
            self._open_connection(self.node.url)
        try:
            return self._connect_all()
        except BaseException:
            self.close()
            raise

    def _connect_all(self) -> ServerFacts:
        node = self.node
        timeout_s = self._connect_timeout_s
        slots = read_slots(node.url, self._known, armed=node.armed_run_id, timeout_s=timeout_s, node=node.name)
        self._known = [(shard.host, shard.port) for shard in slots.shards]
        self._shards = [self._shard(host) for host in self._known]
        runs = [shard.pin() for shard in self._shards]
        run_id = cluster_run(
            ShardRun(run, shard.member, shard.slots_digest) for run, shard in zip(runs, slots.shards, strict=True)
        )
        if not self._any_run:
            if not is_same_run(run_id, node.armed_run_id):
                raise NodeNotArmed(
                    node.address,
                    "not all of its shards are armed; some restarted, were promoted, or came: "
                    f"any worker, or `mqlayer node rearm {node.name}`, arms them",
                )
            run_id = node.armed_run_id or run_id
        known = [shard.connect() for shard in self._shards]
        early = any(facts.early_waitaof for facts in known)
        self.facts = replace(min(known, key=lambda facts: facts.version), run_id=run_id, early_waitaof=early)
        self._digests = dict(script_digests(self.facts.version))
        self._slots, self._moved = slots, False
        return self.facts

    def _shard(self, host: Host) -> ShardConnection:
        return ShardConnection(
            replace(self.node, url=shard_url(self.node.url, host), armed_run_id=None),
            connect_timeout_s=self._connect_timeout_s,
            timeout_s=self._timeout_s,
            any_run=True,
            unsafe=self._unsafe,
            required=self._required,
        )

    def shard_runs(self) -> dict[int, ShardRun]:
        """Return each shard's run, by its number."""
        self.connect()
        slots = self._slot_map()
        return {
            number: ShardRun(connection.connect().run_id, shard.member, shard.slots_digest)
            for number, (connection, shard) in enumerate(zip(self._shards, slots.shards, strict=True))
        }

    def is_told_by(self, numbers: Collection[int]) -> bool:
        """Whether these shards, one at least, tell the same slots."""
        told = self._slot_map().told
        maps = (
            ask_slots(self._url, self._known[number], timeout_s=self._connect_timeout_s, node=self.node.name)
            for number in numbers
        )
        return bool(numbers) and all(slots.told == told for slots in maps)

    def shard_of(self, partition: int) -> int:
        """Return the number of a partition's shard."""
        self.connect()
        return self._slot_map().owners[slot_of(b"%d" % partition)]

    def _slot_map(self) -> SlotMap:
        if self._slots is None:
            raise StoreUnavailable(self.node.address, "the line was closed while it was used")
        return self._slots

    def send(self, commands: Iterable[Command]) -> None:
        """Send without waiting, in one write per shard; `receive` as many replies.

        A read that waits, with other commands behind it, is done here.
        """
        self.connect()
        commands = list(commands)
        shards = self._route(commands)
        writes: dict[int, list[Command]] = {}
        for command, shard in zip(commands, shards, strict=True):
            name = _name(command)
            if name in READS:
                self._plan_read(command, writes, alone=len(commands) == 1)
            elif name in EVERY_SHARD:
                self._plan_all(name, command, writes)
            elif name == "SCAN":
                self._plan_scan(command, writes)
            else:
                writes.setdefault(shard, []).append(command)
                self._expected.append(_Expected((shard,), _single))
        self._write(writes)

    def send_packet(self, *packets: bytes) -> None:
        """Send encoded requests, in one write per shard. One without a key follows the one before it."""
        self.connect()
        writes: dict[int, list[bytes]] = {}
        shard = 0
        for packet in packets:
            at = packet.find(b"{")
            if at >= 0:
                shard = self._owner(packet[at + 1 : packet.index(b"}", at)])
            writes.setdefault(shard, []).append(packet)
            self._expected.append(_Expected((shard,), _single))
        for number, some in writes.items():
            self._guarded(self._shards[number].send_packet, *some)

    def ready(self, timeout_s: float) -> bool:
        """Whether the next reply, or a disconnect, arrives in time."""
        self.connect()
        if not self._expected or not self._expected[0].shards:
            return True
        return bool(self._guarded(self._shards[self._expected[0].shards[0]].ready, timeout_s))

    def receive(self, count: int) -> list[Any]:
        """Return `count` replies; errors are exceptions in the list."""
        return [self._receive_one() for _ in range(count)]

    def _receive_one(self) -> Any:
        if not self._expected:
            raise StoreUnavailable(self.node.address, "the line was closed before its answer came")
        expected = self._expected.popleft()
        replies = [self._guarded(self._shards[number].receive, 1)[0] for number in expected.shards]
        self._moved = self._moved or any(isinstance(reply, REDIRECTS) for reply in replies)
        return expected.merge(replies)

    def close(self) -> None:
        """Close all connections; the next use reconnects."""
        self.facts = None
        for shard in self._shards:
            shard.close()
        self._shards, self._slots = [], None
        self._expected.clear()

    def reload_scripts(self) -> None:
        """Load scripts again on all shards, after NOSCRIPT."""
        self.connect()
        for shard in self._shards:
            self._guarded(shard.reload_scripts)

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except BaseException:
            # Replies of other shards would be taken for those of later commands.
            self.close()
            raise

    def _write(self, writes: Mapping[int, Sequence[Command]]) -> None:
        for number, some in writes.items():
            self._guarded(self._shards[number].send, some)

    def _owner(self, tag: bytes) -> int:
        return self._slot_map().owners[slot_of(tag)]

    def _route(self, commands: Sequence[Command]) -> list[int]:
        """Return each command's shard. One without a key follows the one before it, else goes before the next."""
        tags = [_tag(command) for command in commands]
        first = next((tag for tag in tags if tag is not None), None)
        shard, found = 0 if first is None else self._owner(first), []
        for at, command in enumerate(commands):
            following = tags[at:] if _name(command) == "MULTI" else tags[at : at + 1]
            tag = next((one for one in following if one is not None), None)
            shard = shard if tag is None else self._owner(tag)
            found.append(shard)
        return found

    def _plan_all(self, name: str, command: Command, writes: dict[int, list[Command]]) -> None:
        every = range(len(self._shards))
        for number in every:
            writes.setdefault(number, []).append(command)
        self._expected.append(_Expected(every, MERGED.get(name, _first_error)))

    def _plan_scan(self, command: Command, writes: dict[int, list[Command]]) -> None:
        number, _, cursor = bytes(command[1]).rpartition(b":")
        shard, last = int(number or 0), len(self._shards) - 1
        if shard > last:
            raise StoreUnavailable(self.node.address, "its shards changed while it was scanned")
        writes.setdefault(shard, []).append((command[0], cursor, *command[2:]))

        def merge(replies: list[Any]) -> Any:
            if isinstance(replies[0], Exception):
                return replies[0]
            following, keys = replies[0]
            if following != b"0":
                return [b"%d:%b" % (shard, following), keys]
            return [b"0" if shard == last else b"%d:0" % (shard + 1), keys]

        self._expected.append(_Expected((shard,), merge))

    def _plan_read(self, command: Command, writes: dict[int, list[Command]], *, alone: bool) -> None:
        read = _split(command, self._slot_map().owners)
        waits = read.block_ms and len(read.parts) > 1 and not self._busy
        if waits and not writes and not self._expected:
            until = time.monotonic() + read.block_ms / 1000
            found = None if alone else self._poll(read, until)

            def later(_: list[Any]) -> Any:
                # Behind commands that were sent meanwhile, their replies would be taken for this one's.
                return None if self._expected else self._poll(read, until)

            # The caller may wait for other nodes too: a read by itself is done when its reply is wanted.
            self._expected.append(_Expected((), later if alone else lambda _: found))
            return
        for shard, part in read.parts:
            writes.setdefault(shard, []).append(part)
        self._expected.append(_Expected([shard for shard, _ in read.parts], self._note_busy))

    def _poll(self, read: _StreamRead, until: float) -> Any:
        """Look until something is there or refused."""
        pause_s = POLL_S[0]
        while True:
            found = self._note_busy(self._look(read))
            left_s = until - time.monotonic()
            if found is not None or left_s <= 0:
                return found
            # Nothing to wait on: sockets of several servers, which have not been asked.
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, POLL_S[1])

    def _look(self, read: _StreamRead) -> list[Any]:
        writes: dict[int, list[Command]] = {}
        for shard, part in read.parts:
            writes.setdefault(shard, []).append(part)
        self._write(writes)
        replies = [self._guarded(self._shards[shard].receive, 1)[0] for shard, _ in read.parts]
        self._moved = self._moved or any(isinstance(reply, REDIRECTS) for reply in replies)
        return replies

    def _note_busy(self, replies: list[Any]) -> Any:
        merged = _merged_streams(replies)
        self._busy = isinstance(merged, list)
        return merged


def _name(command: Command) -> str:
    name = command[0]
    return name.decode() if isinstance(name, bytes) else str(name)


def _tag(command: Command) -> bytes | None:
    """Return the hash tag of a command's first key; None without a key."""
    if _name(command) in SCRIPT_CALLS:
        return _tag_in(command[3])
    for word in command[1:]:
        if isinstance(word, bytes) and b"{" in word:
            tag = _tag_in(word)
            # A pattern of SCAN has no partition.
            return None if tag == b"*" else tag
    return None


def _tag_in(key: bytes) -> bytes:
    at = key.index(b"{")
    return key[at + 1 : key.index(b"}", at)]


def _split(command: Command, owners: Sequence[int]) -> _StreamRead:
    words = list(command)
    at = next(place for place, word in enumerate(words) if word in ("STREAMS", b"STREAMS"))
    head, half = words[:at], (len(words) - at - 1) // 2
    keys, ids = words[at + 1 : at + 1 + half], words[at + 1 + half :]
    block = next((place for place, word in enumerate(head) if word in ("BLOCK", b"BLOCK")), None)
    block_ms = 0 if block is None else int(head[block + 1])
    by_slot: dict[int, list[tuple[bytes, Any]]] = {}
    for key, entry in zip(keys, ids, strict=True):
        by_slot.setdefault(slot_of(_tag_in(key)), []).append((key, entry))
    if block is not None and len(by_slot) > 1:
        del head[block : block + 2]
    parts = [
        (owners[slot], (*head, "STREAMS", *(key for key, _ in some), *(entry for _, entry in some)))
        for slot, some in by_slot.items()
    ]
    return _StreamRead(parts, block_ms)


def _single(replies: list[Any]) -> Any:
    return replies[0]


def _first_error(replies: list[Any]) -> Any:
    return next((reply for reply in replies if isinstance(reply, Exception)), replies[0])


def _merged_streams(replies: Iterable[Any]) -> Any:
    """Return all streams; an error, unless it is about a group that one of them lacks and others have entries."""
    found: list[Any] = []
    missing: Exception | None = None
    for reply in replies:
        if isinstance(reply, Exception):
            if not str(reply).startswith("NOGROUP"):
                return reply
            missing = reply
        else:
            found += reply or ()
    return found or missing


def _merged_info(replies: list[Any]) -> Any:
    for reply in replies:
        if isinstance(reply, Exception):
            return reply
    texts = [reply.decode() for reply in replies]
    facts = summed_info([dict(line.split(":", 1) for line in text.splitlines() if ":" in line) for text in texts])
    return "".join(f"{name}:{value}\r\n" for name, value in facts.items()).encode()


def _every_setting(replies: list[Any]) -> Any:
    """Return names and values of all shards, one behind the other."""
    error = _first_error(replies)
    return error if isinstance(error, Exception) else [word for reply in replies for word in reply]


MERGED: Final[Mapping[str, Callable[[list[Any]], Any]]] = {"INFO": _merged_info, "CONFIG": _every_setting}


def summed_info(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return INFO of the first shard, with sums over all of some numbers."""
    found = dict(facts[0])
    for name in SUMMED & found.keys():
        total = sum(float(one.get(name, 0)) for one in facts)
        found[name] = f"{total:.6f}" if "cpu" in name else f"{total:.0f}"
    return found
