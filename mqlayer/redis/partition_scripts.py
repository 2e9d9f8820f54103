"""Typed calls of partition and lock scripts: a builder of the command, a parser of the reply.

Keys, arguments and answers: headers of mqlayer/lua. Parsers raise as `raise_for_reply`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.dedup import FirstPosition
from mqlayer.domain.offsets import is_settled
from mqlayer.errors import StoreUnavailable
from mqlayer.redis.keys import (
    ended_sources_key,
    group_keys,
    outcomes_key,
    partition_keys,
    pop_keys,
    rate_key,
    terms_key,
)
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply

RunStatus = Literal["ok", "dup", "gap", "unowned"]
OnceStatus = Literal["ok", "same", "dup", "gap", "unowned"]


@dataclass(frozen=True, slots=True)
class MessageRun:
    """Consecutive messages of a source and LP. `fields`: facts, key, body of each."""

    lp: int
    first: int
    count: int
    fields: Sequence[bytes | str]


class RunOutcome(NamedTuple):
    """A run's result: its last `appended` messages, the LP's new mark."""

    status: RunStatus
    appended: int
    mark: int


class AppendReply(NamedTuple):
    """An append that ran; `outcomes`: None if whole."""

    offset: int
    outcomes: list[RunOutcome] | None


class Refused(NamedTuple):
    """A script changed nothing; why."""

    status: str
    fact: str


SOURCES_PER_CALL: Final = 1_000
AS_BEFORE: Final = -1
"""A `backlog` for resends: no limit, ended sources too."""
AS_BEFORE_UNLESS_CLOSED: Final = -2
"""The same, unless another source has replaced this one."""


def append_command(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    source: int,
    runs: Sequence[MessageRun],
    *,
    backlog: int = 0,
) -> Command:
    """Append runs. `backlog`: limit in records, 0: none."""
    keys = partition_keys(prefix, partition)
    args: list[Any] = [source, backlog, "", len(runs)]
    for run in runs:
        args += (run.lp, run.first, run.count)
    for run in runs:
        args += run.fields
    tag = partition if connection.is_cluster else None
    names = (keys.log, keys.meta, keys.marks, ended_sources_key(prefix, tag), terms_key(prefix, tag))
    return connection.script("log_append", names, *args)


def touch_command(connection: NodeConnection, prefix: str, partition: int) -> Command:
    """Write a partition's state as it is: a wait behind it covers the node's writes so far."""
    return connection.script("log_touch", (partition_keys(prefix, partition).meta,))


def end_sources(
    connection: NodeConnection, prefix: str, sources: Sequence[int], *, closed: bool, partitions: Sequence[int]
) -> None:
    """Make a node refuse these outbox sources. Raises StoreUnavailable.

    `closed`: another source has replaced them; AS_BEFORE_UNLESS_CLOSED is refused too. `partitions`: the node's; each
    partition of a cluster has its own set.
    """
    keys = [ended_sources_key(prefix, tag) for tag in (partitions if connection.is_cluster else (None,))]
    words = [status for source in sources for status in ([source, f"{source}:closed"] if closed else [source])]
    commands = [
        connection.whole_script("source_end", (key,), *words[at : at + SOURCES_PER_CALL])
        for at in range(0, len(words), SOURCES_PER_CALL)
        for key in keys
    ]
    for reply in connection.call(commands) if commands else ():
        raise_for_reply(reply, connection.node.address)


TermToken = str | dict[int, str]
"""What appends carry to name a relay's term: a node's, or on a cluster each partition's."""
NO_TERM: Final = "-"
"""A token that no partition has."""


def set_term(
    connection: NodeConnection, prefix: str, source: int, term: str, *, partitions: Sequence[int]
) -> TermToken:
    """Make a node accept only this term's rows of a source; return the token for appends.

    See docs/design/relay-term.md. A node with none of `partitions` stores nothing. Raises StoreUnavailable.
    """
    metas = [partition_keys(prefix, partition).meta for partition in partitions]
    calls = [(terms_key(prefix), *metas)]
    if connection.is_cluster:
        calls = [(terms_key(prefix, one), meta) for one, meta in zip(partitions, metas, strict=True)]
    nonce = secrets.token_hex(8)
    replies = connection.call(
        [connection.whole_script("source_term", keys, source, term, nonce) for keys in calls]
    ) if calls else []  # fmt: skip
    answers = [raise_for_reply(reply, connection.node.address) for reply in replies]
    # A bare term matches no token, so its appends are refused.
    tokens = [token[0].decode() if status == b"ok" else term for status, *token in answers]
    return dict(zip(partitions, tokens, strict=True)) if connection.is_cluster else tokens[0]


def status_of(reply: Any, address: str) -> str:
    """Return a reply's status."""
    return str(raise_for_reply(reply, address)[0].decode())


def append_reply(reply: Any, address: str) -> AppendReply | Refused:
    """Parse an append's reply. Raises NodeOutOfMemory (nothing stored) or StoreUnavailable (unknown)."""
    reply = raise_for_reply(reply, address)
    status = reply[0]
    if status == b"ok":
        return AppendReply(reply[1], None)
    if status == b"mixed":
        words = zip(reply[2::3], reply[3::3], reply[4::3], strict=True)
        return AppendReply(reply[1], [RunOutcome(w.decode(), appended, mark) for w, appended, mark in words])
    return _refused(reply)


def check_appended(reply: Any, address: str) -> None:
    """Raise StoreUnavailable unless all runs are stored."""
    answer = append_reply(reply, address)
    if not isinstance(answer, AppendReply):
        raise StoreUnavailable(address, f"resending was refused: {answer.status} {answer.fact}".rstrip())
    for outcome in answer.outcomes or ():
        if outcome.status not in ("ok", "dup"):
            raise StoreUnavailable(address, f"resending was refused: {outcome.status}")


class OnceOutcome(NamedTuple):
    """The offset, the first message's position, or the mark."""

    status: OnceStatus
    offset: int = 0
    first: FirstPosition | None = None
    mark: int = 0


def append_once_reply(reply: Any, address: str) -> list[OnceOutcome] | Refused:
    """Parse log_append_once's reply. Raises as `append_reply`."""
    reply = raise_for_reply(reply, address)
    if reply[0] != b"each":
        return _refused(reply)
    return [_once_outcome(status.decode(), fact) for status, fact in zip(reply[1::2], reply[2::2], strict=True)]


def _once_outcome(status: OnceStatus, fact: Any) -> OnceOutcome:
    if status == "ok":
        return OnceOutcome(status, offset=fact)
    if status == "gap":
        return OnceOutcome(status, mark=int(fact))
    return OnceOutcome(status, first=FirstPosition.of(fact))


def dedup_load_command(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    change: int,
    window_ms: int,
    ids: Iterable[tuple[bytes, bytes, int]],
) -> Command:
    """Copy ids to a successor: token, position, age in ms."""
    keys = partition_keys(prefix, partition)
    flat = [part for one in ids for part in one]
    return connection.script("dedup_load", (keys.meta, keys.ids, keys.ages), change, window_ms, *flat)


def create_command(connection: NodeConnection, prefix: str, partition: int, *args: Any) -> Command:
    """Create a meta. `args`: topic, lp_from, lp_to, state, change."""
    return connection.script("partition_create", (partition_keys(prefix, partition).meta,), *args)


def create(connection: NodeConnection, prefix: str, partition: int, *args: Any) -> str:
    """Create a partition's meta."""
    return status_of(
        connection.call([create_command(connection, prefix, partition, *args)])[0], connection.node.address
    )


class Sealed(NamedTuple):
    """A sealed partition with its frozen marks."""

    seal_id: str
    next_offset: int
    marks: dict[str, int]


MARKS_PER_CALL = 1_000
LIVE_STATES: Final = frozenset({"open", "sealed"})


def seal_command(connection: NodeConnection, prefix: str, partition: int, change: int, seal_id: str) -> Command:
    """Seal a partition."""
    keys = partition_keys(prefix, partition)
    return connection.script("partition_seal", (keys.log, keys.meta, keys.marks), change, seal_id)


def brief_seal_command(connection: NodeConnection, prefix: str, partition: int, change: int, seal_id: str) -> Command:
    """Seal by the script's text, without marks in the reply."""
    keys = partition_keys(prefix, partition)
    return connection.whole_script("partition_seal", (keys.log, keys.meta, keys.marks), change, seal_id, 1)


def seal_reply(reply: Any, address: str) -> Sealed | Refused:
    """Parse partition_seal's reply. Raises NodeOutOfMemory (nothing changed) or StoreUnavailable (unknown)."""
    reply = raise_for_reply(reply, address)
    if reply[0] != b"sealed":
        return _refused(reply)
    flat = [part.decode() for part in reply[3]]
    return Sealed(reply[1].decode(), reply[2], {k: int(v) for k, v in zip(flat[::2], flat[1::2], strict=True)})


def open_partition(
    connection: NodeConnection, prefix: str, partition: int, change: int, marks: Mapping[str, int]
) -> str:
    """Load marks and open a successor; return the status."""
    address = connection.node.address
    for reply in connection.call(load_commands(connection, prefix, partition, change, marks)):
        # Raises: a partition with marks missing must not open.
        status_of(reply, address)
    return status_of(connection.call([open_command(connection, prefix, partition, change)])[0], address)


def marks_command(connection: NodeConnection, prefix: str, partition: int, names: Sequence[bytes]) -> Sequence[bytes]:
    """Read state and `<source>:<lp>` marks."""
    keys = partition_keys(prefix, partition)
    return (b"EVALSHA", connection.digest("marks_read"), b"2", keys.meta, keys.marks, *names)


def marks_reply(reply: Any, address: str) -> tuple[str, list[int]]:
    """Return state ('' if absent) and marks (0)."""
    state, marks = raise_for_reply(reply, address)
    return state.decode(), [int(mark or 0) for mark in marks]


def load_commands(
    connection: NodeConnection, prefix: str, partition: int, change: int | str, marks: Mapping[str, int]
) -> list[Command]:
    """Load marks before opening."""
    keys = partition_keys(prefix, partition)
    flat: list[str | int] = [part for pair in marks.items() for part in pair]
    return [
        connection.script("partition_open", (keys.meta, keys.marks), change, 0, *flat[at : at + 2 * MARKS_PER_CALL])
        for at in range(0, len(flat), 2 * MARKS_PER_CALL)
    ]


def open_command(connection: NodeConnection, prefix: str, partition: int, change: int | str) -> Command:
    """Open after loading marks."""
    keys = partition_keys(prefix, partition)
    return connection.script("partition_open", (keys.meta, keys.marks), change, 1)


def reopen_command(
    connection: NodeConnection, prefix: str, partition: int, seal_id: str, name: str, mark: int
) -> Command:
    """Reopen a sealed partition that lacks messages of a `<source>:<lp>` (`name`).

    Send it in one MULTI with the append that continues this chain.
    """
    keys = partition_keys(prefix, partition)
    return connection.script("partition_reopen", (keys.log, keys.meta, keys.marks), seal_id, name, mark)


def drop_marks_command(connection: NodeConnection, prefix: str, partition: int, names: Sequence[bytes]) -> Command:
    """Remove `<source>:<lp>` marks of closed sources."""
    keys = partition_keys(prefix, partition)
    return connection.script("marks_drop", (keys.meta, keys.marks), *names)


class LogEnds(NamedTuple):
    """How far records and meta agree. `state`: '' without a meta; `records`: -1 without a stream."""

    state: str
    seal_id: str
    next_offset: int
    records: int
    has_marks: bool
    behind: int
    command: str


def ends_command(connection: NodeConnection, prefix: str, partition: int) -> Command:
    """Compare records and meta."""
    keys = partition_keys(prefix, partition)
    return connection.script("log_ends", (keys.log, keys.meta, keys.marks))


def ends_reply(reply: Any, address: str) -> LogEnds:
    """Parse log_ends' reply."""
    state, seal, next_offset, records, marks, behind, command = raise_for_reply(reply, address)
    return LogEnds(state.decode(), seal.decode(), next_offset, records, marks == 1, behind, command.decode())


COUNTED_PER_CALL: Final = 500
"""Exceeds what an append that stopped half-way can leave."""


def recount_command(
    connection: NodeConnection, prefix: str, partition: int, *, start: int = 0, marks: Mapping[str, int] | None = None
) -> Command:
    """Count records that the meta lacks, from `start` on; 0: behind its last. `marks`: minimum,
    MARKS_PER_CALL at most."""
    keys = partition_keys(prefix, partition)
    flat = [part for pair in (marks or {}).items() for part in pair]
    return connection.script("log_recount", (keys.log, keys.meta, keys.marks), start, COUNTED_PER_CALL, *flat)


def recount_reply(reply: Any, address: str) -> tuple[int, int] | Refused:
    """Return the next offset, and the one behind the read."""
    reply = raise_for_reply(reply, address)
    return (reply[1], reply[2]) if reply[0] == b"counted" else _refused(reply)


def clear_commands(
    connection: NodeConnection, prefix: str, partition: int, groups: Iterable[int], *, whole: bool = False
) -> list[Command]:
    """Remove a partition without records."""
    keys = partition_keys(prefix, partition)
    form = connection.whole_script if whole else connection.script
    retire = form("partition_retire", _retired_keys(prefix, partition, groups), 0)
    return [retire, ("HDEL", keys.meta, "state")]


def skip_marks_command(
    connection: NodeConnection, prefix: str, partition: int, source: int, lp: int, after: int, to: int
) -> Command:
    """Raise a mark past lost seqs."""
    keys = partition_keys(prefix, partition)
    return connection.script("mark_skip", (keys.meta, keys.marks), f"{source}:{lp}", after, to)


def retire_command(
    connection: NodeConnection, prefix: str, partition: int, groups: Iterable[int], *, archived: bool = False
) -> Command:
    """Leave only the tombstone; `archived`: and unfetched outcomes."""
    groups = list(groups)
    meta, *others = _retired_keys(prefix, partition, groups)
    if connection.is_cluster:
        others = [ended_sources_key(prefix, partition), terms_key(prefix, partition), *others]
    return connection.script("partition_retire", (meta, *others), len(groups) * archived)


def _retired_keys(prefix: str, partition: int, groups: Iterable[int]) -> tuple[bytes, ...]:
    keys, groups = partition_keys(prefix, partition), list(groups)
    of_groups = [
        key for group in groups for keys_of in (group_keys, pop_keys) for key in keys_of(prefix, partition, group)
    ]
    of_groups += [rate_key(prefix, partition, group) for group in groups]
    streams = [outcomes_key(prefix, partition, group) for group in groups]
    return (keys.meta, keys.log, keys.marks, keys.ids, keys.ages, *of_groups, *streams)


def retire_reply(reply: Any, address: str) -> bool:
    """Return False if outcomes must be fetched first."""
    return bool(raise_for_reply(reply, address)[0] == b"retired")


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A member under its epoch."""

    prefix: str
    partition: int
    group_id: int
    member: str
    epoch: int


class FailureHistory(NamedTuple):
    """Failed attempts; first and last in ms of the node's clock.

    `started`: a guarded start without an end: "a" alone, "s" beside others, else "". Of ordered pop, `attempts` are
    deliveries, and `started` holds the failed ones.
    """

    attempts: int
    first_ms: int | None
    last_ms: int | None
    started: str = ""

    @property
    def failed(self) -> int:
        """Failed deliveries of ordered pop."""
        return int(self.started) if self.started.isdigit() else 0


def failures_of(noted: bytes) -> FailureHistory:
    """Parse a value of `attempts`."""
    count, *rest = noted.split(b":")
    started = rest[2].decode() if len(rest) > 2 else ""
    if int(count) == 0 or not rest:
        return FailureHistory(int(count), None, None, started)
    return FailureHistory(int(count), int(rest[0]), int(rest[1]), started)


class LockTaken(NamedTuple):
    """The pull lock is newly taken, with the former owner's state.

    `guarded_below`: former owners died, so guard starts below it. `suspects`: guarded starts without an end; `died`:
    those started alone.
    """

    committed: int
    next_offset: int
    base: int
    bits: bytes
    attempts: dict[int, int]
    guarded_below: int = 0
    suspects: frozenset[int] = frozenset()
    died: frozenset[int] = frozenset()

    def has_settled(self, offset: int) -> bool:
        """Check an offset."""
        return offset < self.committed or is_settled(offset, self.base, self.bits)


class LockKept(NamedTuple):
    """The caller kept the lock."""

    committed: int


class Fenced(NamedTuple):
    """Another epoch is in force: stop."""

    epoch: int


def acquire_command(
    connection: NodeConnection, holder: LockHolder, *, start: int, seek: int = 0, afresh: bool = False
) -> Command:
    """Take or refresh the pull lock; `afresh` asks again for the former owner's state.

    `start`: if nothing is committed since `seek`.
    """
    keys, group = partition_keys(holder.prefix, holder.partition), _group(holder)
    return connection.script(
        "lock_acquire",
        (keys.meta, group.lock, group.acks, group.attempts, keys.log),
        holder.member,
        holder.epoch,
        start,
        int(afresh),
        seek,
    )


def acquire_reply(reply: Any, address: str) -> LockTaken | LockKept | Fenced | Refused:
    """Parse lock_acquire's reply."""
    reply = raise_for_reply(reply, address)
    if reply[0] == b"unchanged":
        return LockKept(reply[1])
    if reply[0] == b"acquired":
        pairs = zip(reply[5][::2], reply[5][1::2], strict=True)
        noted = {int(offset): failures_of(value) for offset, value in pairs}
        attempts = {offset: failures.attempts for offset, failures in noted.items()}
        suspects = frozenset(offset for offset, failures in noted.items() if failures.started)
        died = frozenset(offset for offset in suspects if noted[offset].started == "a")
        return LockTaken(reply[1], reply[2], reply[3], reply[4], attempts, reply[6], suspects, died)
    return _fenced_or_refused(reply)


def settle_command(
    connection: NodeConnection,
    holder: LockHolder,
    ranges: Sequence[tuple[int, int]],
    forget_attempts: Iterable[int] = (),
    encoded_outcome: bytes = b"",
) -> Command:
    """Settle up to 500 ranges [first, last]. `encoded_outcome`: see `outcomes`."""
    keys, group = partition_keys(holder.prefix, holder.partition), _group(holder)
    flat = [bound for pair in ranges for bound in pair]
    return connection.script(
        "offsets_settle",
        (keys.meta, *group, outcomes_key(holder.prefix, holder.partition, holder.group_id)),
        holder.member,
        holder.epoch,
        len(ranges),
        encoded_outcome,
        *flat,
        *forget_attempts,
    )


def settle_reply(reply: Any, address: str) -> LockKept | Fenced | Refused:
    """Return the new committed, or why nothing changed."""
    reply = raise_for_reply(reply, address)
    return LockKept(reply[1]) if reply[0] == b"settled" else _fenced_or_refused(reply)


def attempt_command(
    connection: NodeConnection, holder: LockHolder, offset: int, attempts: int, *, given_back: bool = False
) -> Command:
    """Note failed attempts; lower them only if some are given back."""
    group = _group(holder)
    return connection.script(
        "attempt_count", (group.lock, group.attempts), holder.member, holder.epoch, offset, attempts, int(given_back)
    )


def start_command(connection: NodeConnection, holder: LockHolder, offset: int, *, alone: bool) -> Command:
    """Note a guarded start."""
    group, how = _group(holder), "a" if alone else "s"
    return connection.script("attempt_start", (group.lock, group.attempts), holder.member, holder.epoch, offset, how)


def start_reply(reply: Any, address: str) -> Fenced | None:
    """Return Fenced, or None."""
    reply = raise_for_reply(reply, address)
    return None if reply[0] == b"started" else Fenced(reply[1])


def attempt_reply(reply: Any, address: str) -> int | Fenced:
    """Return the failed attempts."""
    reply = raise_for_reply(reply, address)
    return int(reply[1]) if reply[0] == b"counted" else Fenced(reply[1])


def release_command(connection: NodeConnection, holder: LockHolder) -> Command:
    """Release the pull lock."""
    return connection.script("lock_release", (_group(holder).lock,), holder.member, holder.epoch)


def fence_command(
    connection: NodeConnection, prefix: str, partition: int, group_id: int, epoch: int, *, whole: bool = False
) -> Command:
    """Raise the epoch without an owner."""
    keys = (partition_keys(prefix, partition).meta, group_keys(prefix, partition, group_id).lock)
    form = connection.whole_script if whole else connection.script
    return form("lock_fence", keys, epoch)


class GroupStart(NamedTuple):
    """A group's start offset since `seek`."""

    group_id: int
    seek: int
    offset: int


def trim_command(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    starts: Sequence[GroupStart],
    *,
    floor: int,
    limit: int,
) -> Command:
    """Drop up to `limit` records below `floor` that all groups settled."""
    keys = partition_keys(prefix, partition)
    locks = [group_keys(prefix, partition, start.group_id).lock for start in starts]
    facts = [fact for start in starts for fact in (start.seek, start.offset)]
    return connection.script("log_trim", (keys.meta, keys.log, *locks), limit, floor, *facts)


def _group(holder: LockHolder) -> Any:
    return group_keys(holder.prefix, holder.partition, holder.group_id)


def _refused(reply: Any) -> Refused:
    fact = reply[1] if len(reply) > 1 else b""
    return Refused(reply[0].decode(), fact.decode() if isinstance(fact, bytes) else str(fact))


def _fenced_or_refused(reply: Any) -> Fenced | Refused:
    return Fenced(reply[1]) if reply[0] == b"fenced" else _refused(reply)
