"""The life of a message: each step that a store recorded, and the steps that no store can tell any more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

import msgspec

from mqlayer.domain.names import encode_key
from mqlayer.domain.parked_names import own_name
from mqlayer.errors import MqlayerError
from mqlayer.inspect.message_status import ATTEMPTS_LIMIT, MessageStatus
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

ACTS_LIMIT: Final = 200
HORIZON_S: Final = 7 * 86_400.0
"""Age at which jobs delete failed attempts and fence rows."""
FAILURES_LATE: Final = timedelta(seconds=5)
"""Members write failures in the background: a later step may have an earlier time."""
GROUP_ACTS: Final = ("bulk start", "group seek", "replay start")
"""Acts on a whole group that may reach a message."""

Step = Literal[
    "committed", "quarantined", "relayed", "stored", "route_changed", "archived", "delivered", "failed", "parked",
    "act", "redriven", "replayed", "dead", "applied", "applied_later", "settled", "waiting",
]  # fmt: skip
Absence = Literal["no_longer_known", "never_recorded", "not_searched"]

_RANKS: Final[Mapping[str, int]] = {step: rank for rank, step in enumerate(Step.__args__)}  # type: ignore[attr-defined]
_ENDS: Final[frozenset[Step]] = frozenset({"parked", "dead", "applied", "settled"})
_OUTCOMES: Final[Mapping[str, Step]] = {
    "handled": "settled", "unmatched": "settled", "parked": "parked", "redriven": "redriven", "replayed": "replayed",
    "exhausted": "dead", "rejected": "dead", "skipped": "dead", "discarded": "dead",
    "expired": "dead", "dropped": "dead",
}  # fmt: skip


class LifeStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step of a message. `at`: None where no store has its time. `by`: member, receiver or operator."""

    step: Step
    at: datetime | None = None
    group: str | None = None
    by: str | None = None
    attempt: int | None = None
    partition: int | None = None
    offset: int | None = None
    version: int | None = None
    detail: str | None = None


class BulkTurn(NamedTuple):
    """An item of a bulk action that had its turn. `since`, `cause`: of its parking or death."""

    group_id: int
    bulk: int
    act: str
    actor: str
    reason: str | None
    dead_id: int | None
    result: str
    error: str | None
    at: datetime
    since: datetime
    cause: str
    source: int | None
    seq: int | None


class MissingStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step that no store tells, and the reason."""

    steps: str
    absence: Absence
    reason: str
    group: str | None = None


class MessageLife(msgspec.Struct, frozen=True):
    """The life of a message, in order; no body and no header. `groups`: the state in each group."""

    topic: str
    message: str | None
    key: str | None
    published_at: datetime | None
    tags: Sequence[str]
    steps: Sequence[LifeStep]
    missing: Sequence[MissingStep]
    groups: Mapping[str, str]


def message_life(runtime: Runtime, found: MessageStatus) -> MessageLife:
    """Return the life of a found message, over all its partitions and groups."""
    life = _StepReader(runtime, found)
    steps = [*life.before(), *life.in_groups()]
    steps.sort(key=_order(found, steps))
    return MessageLife(
        found.topic,
        None if found.identity is None else str(found.identity),
        found.key,
        found.published_at,
        found.tags,
        steps,
        list(life.missing()),
        {one.group: one.state for one in found.groups},
    )


def bulk_step(group: str, one: BulkTurn, many: str = "") -> LifeStep:
    """Return an item of a bulk action as a step."""
    parked = f", parked since {one.since:%Y-%m-%d %H:%M:%S} UTC ({one.cause})" if one.dead_id is None else ""
    told = f": {one.error}" if one.error else f": {one.reason}" if one.reason else ""
    step: Step = "redriven" if one.act == "redrive" and one.result == "done" else "act"
    detail = f"bulk action {one.bulk}, {one.act}: {one.result}{many}{parked}{told}"
    return LifeStep(step, one.at, group, one.actor, detail=detail)


def _order(found: MessageStatus, steps: Iterable[LifeStep]) -> Callable[[LifeStep], tuple[datetime, int]]:
    began = found.committed_at or found.published_at or datetime(1970, 1, 1, tzinfo=UTC)
    end = datetime(9000, 1, 1, tzinfo=UTC)
    ends = [(one.group, one.at) for one in steps if one.step in _ENDS and one.at is not None]

    def key(one: LifeStep) -> tuple[datetime, int]:
        rank = _RANKS[one.step]
        # Clocks differ: the way to the partition comes first, whatever they say.
        if rank <= _RANKS["stored"]:
            return began, rank
        at = one.at or end
        if one.step == "failed":
            at = min([at, *(over for group, over in ends if group == one.group and over < at < over + FAILURES_LATE)])
        return max(began, at), rank

    return key


class _StepReader:
    """Reads the steps of one message."""

    def __init__(self, runtime: Runtime, found: MessageStatus) -> None:
        self._runtime, self._found = runtime, found
        self._groups: dict[int, str] = {}
        self._facts: dict[str, Any] = {}
        self._unread: list[MissingStep] = []
        self._producer: str | None = None
        """The direct producer that sent it."""
        with runtime.control.connection() as connection:
            row = connection.execute(query("searched_topic"), {"topic": found.topic}).fetchone()
            self._topic_id, self._archived, *_ = row or (0, False)
            if found.identity is not None:
                self._facts = {"topic_id": self._topic_id} | found.identity._asdict()
                rows = connection.execute(query("message_groups"), self._facts).fetchall()
                self._groups = {row[0]: row[1] for row in rows}
                source = connection.execute(query("life_source"), self._facts).fetchone()
                self._producer = None if source is None or source[0] == "outbox" else source[1]
        self._facts |= {"group_ids": list(self._groups), "partitions": [place[0] for place in found.places]}

    # -- before any group ----------------------------------------------------------------------------------------------

    def before(self) -> Iterator[LifeStep]:
        """Yield the steps up to the partition and the archive."""
        found = self._found
        if found.committed_at is not None:
            yield LifeStep("committed", found.committed_at, detail="in the outbox")
            if found.outbox is not None and found.outbox.startswith("quarantined"):
                yield LifeStep("quarantined", detail=found.outbox)
            elif found.outbox == "relayed":
                yield LifeStep("relayed")
        yield from self._stored()
        yield from self._route_changes()
        if found.archived_at is not None:
            yield LifeStep("archived", found.archived_at, version=found.version)

    def _stored(self) -> Iterator[LifeStep]:
        of_partition = {row[0]: row[1:] for row in self._rows("life_partitions")} if self._found.places else {}
        for number, (partition, offset) in enumerate(self._found.places):
            version, node, state = of_partition.get(partition, (None, None, "deleted"))
            kept = "" if self._found.stored and number == 0 else ", not there any more"
            where = "in a deleted partition" if state == "deleted" else f"on {node}{kept}"
            # The time is the publisher's: a node records none.
            yield LifeStep("stored", self._found.published_at if number == 0 else None, None, self._producer, None,
                           partition, offset, version, where)  # fmt: skip

    def _route_changes(self) -> Iterator[LifeStep]:
        if self._found.identity is None:
            return
        for partition, kind, version, state, sealed_at, ended_at, actor, successors in self._rows("life_route_changes"):
            then = ", ".join(map(str, successors))
            detail = f"{kind} of partition {partition}: later messages go to {then}"
            if state != "done":
                detail += f"; {state}"
            yield LifeStep("route_changed", ended_at or sealed_at, None, actor, None, partition, None, version, detail)

    # -- in groups -----------------------------------------------------------------------------------------------------

    def in_groups(self) -> Iterator[LifeStep]:
        """Yield the steps in each group."""
        if self._found.identity is None:
            return
        told = {(group, step) for group, step in self._told_twice()}
        for one in self._found.attempts:
            yield LifeStep("failed", one.failed_at, one.group, one.member, one.attempt, detail=one.error)
        yield from self._outcomes()
        yield from self._parked(told)
        yield from self._dead(told)
        yield from self._replays()
        yield from self._bulk()
        yield from self._acts()
        yield from self._effects()
        for state in self._found.groups:
            if state.state == "settled":
                yield LifeStep("settled", None, state.group, detail="its node says so")
            elif state.state == "waiting":
                yield LifeStep("waiting", None, state.group, None, state.attempts, detail=state.detail)

    def _outcome_rows(self) -> Iterator[tuple[int, int, Sequence[Any]]]:
        for partition, offset in self._found.places:
            facts = {"topic_id": self._topic_id, "partition": partition, "offset": offset}
            for row in self._rows("message_outcomes", facts):
                yield partition, offset, row

    def _told_twice(self) -> Iterator[tuple[str, Step]]:
        for _, _, (group_id, outcome, *_) in self._outcome_rows():
            yield self._groups[group_id], _OUTCOMES[outcome]

    def _outcomes(self) -> Iterator[LifeStep]:
        for partition, offset, row in self._outcome_rows():
            group_id, outcome, attempts, delivered_at, settled_at, actor, reason = row
            group = self._groups[group_id]
            if delivered_at is not None:
                yield LifeStep("delivered", delivered_at, group, actor, attempts, partition, offset)
            detail = outcome if reason is None else f"{outcome}: {reason.splitlines()[0]}"
            yield LifeStep(_OUTCOMES[outcome], settled_at, group, actor, attempts, partition, offset, None, detail)

    def _parked(self, told: set[tuple[str, Step]]) -> Iterator[LifeStep]:
        for group_id, at, cause, due_at, attempts, redriven, replay, paused_at, by in self._rows("life_parked"):
            group = self._groups[group_id]
            if (group, "parked") not in told:
                yield LifeStep("parked", at, group, detail=f"its key is parked since then: {cause}")
            until = "an operator releases it" if due_at is None else f"{due_at:%Y-%m-%d %H:%M:%S} UTC"
            detail = f"parked until {until}" if paused_at is None else f"parked: {by} paused its key"
            if redriven or replay is not None:
                detail += "; redriven" if replay is None else f"; of replay {replay}"
            yield LifeStep("waiting", None, group, None, attempts, detail=detail)

    def _dead(self, told: set[tuple[str, Step]]) -> Iterator[LifeStep]:
        seen = set()
        for row in self._rows("life_dead"):
            group_id, dead_id, cause, reason, attempts, actor, died_at, redriven_at, job, who, result, at, act = row
            group = self._groups[group_id]
            if group_id not in seen and (group, "dead") not in told:
                detail = f"dead message {dead_id}, {cause}: {reason.splitlines()[0] if reason else ''}"
                yield LifeStep("dead", died_at, group, actor, attempts, detail=detail)
            if group_id not in seen and redriven_at is not None and job is None and (group, "redriven") not in told:
                yield LifeStep("redriven", redriven_at, group, detail=f"dead message {dead_id}")
            seen.add(group_id)
            if job is not None:
                step: Step = "redriven" if act == "redrive" else "act"
                yield LifeStep(step, at, group, who, detail=f"bulk action {job}, {act}: {result}")

    def _replays(self) -> Iterator[LifeStep]:
        for group_id, job, actor, result, at in self._rows("life_replays"):
            yield LifeStep("replayed", at, self._groups[group_id], actor, detail=f"replay {job} left it out: {result}")

    def _bulk(self) -> Iterator[LifeStep]:
        found = self._found
        if found.identity is None:
            return
        names = [own_name(found.identity), *([] if found.key is None else [encode_key(found.key)])]
        since = found.committed_at or found.published_at
        for one in (BulkTurn(*row) for row in self._rows("life_bulk_items", {"names": names, "limit": ACTS_LIMIT})):
            # Dead messages tell of theirs.
            if one.dead_id is None and (since is None or one.at >= since):
                yield bulk_step(self._groups[one.group_id], one)

    def _acts(self) -> Iterator[LifeStep]:
        topic, found = self._found.topic, self._found
        dead = {str(row[1]): self._groups[row[0]] for row in self._rows("life_dead")}
        facts = {
            "objects": [topic, *(f"{topic}/{name}" for name in self._groups.values())],
            "since": found.committed_at or found.published_at or datetime.now(UTC) - timedelta(seconds=HORIZON_S),
            "keys": [str(found.identity), *([] if found.key is None else [found.key])],
            "dead_ids": list(dead),
            "message": str(found.identity),
            "acts": list(GROUP_ACTS),
            "limit": ACTS_LIMIT,
        }
        for at, actor, act, target, said in self._rows("life_acts", facts):
            _, _, group = target.partition("/")
            group = dead.get(target, group)
            whole = "" if "key" in said or act == "dead discard" else ", of the whole group"
            reason = f": {said['reason']}" if "reason" in said else ""
            job = f" {said['bulk']}, {said['act']}" if "bulk" in said else ""
            yield LifeStep("act", at, group or None, actor, detail=f"{act}{job}{whole}{reason}")

    def _effects(self) -> Iterator[LifeStep]:
        found = self._found
        if found.identity is None or self._runtime.application is None:
            return
        source, _, seq = found.identity
        # The fence notes messages without a key one by one, under their seq.
        facts = {
            "message": str(found.identity),
            "fence_key": str(seq) if found.key is None else found.key,
            "fence_source": -source if found.key is None else source,
        }
        try:
            with self._runtime.outbox.connection() as connection:
                rows = connection.execute(query("life_fence"), self._facts | facts).fetchall()
        except MqlayerError as error:
            self._unread.append(MissingStep("effects", "not_searched", f"the application database: {error}"))
            return
        for group_id, kind, applied, at in rows:
            if kind == "inbox" or applied == seq:
                yield LifeStep("applied", at, self._groups[group_id], detail=f"a row of the {kind}")
            elif applied > seq:
                detail = f"the fence has seq {applied}, a later one of the key: this one was before it"
                yield LifeStep("applied_later", at, self._groups[group_id], detail=detail)

    # -- gaps ----------------------------------------------------------------------------------------------------------

    def missing(self) -> Iterator[MissingStep]:
        """Yield the steps that no store tells."""
        yield from self._unread
        found = self._found
        for place in found.unsearched:
            yield MissingStep("places", "not_searched", place)
        if found.committed_at is None and self._producer is None:
            reason = "no row of the outbox: it was emptied after the relay, or a direct producer sent it"
            yield MissingStep("committed, relayed", "no_longer_known", reason)
        elif found.outbox == "relayed":
            yield MissingStep("time of the relay", "never_recorded", "nodes and relays note no time of a message")
        if found.identity is None:
            return
        if not found.stored and not found.archived and not found.places:
            reason = "the mark of its LP says that it was: it was trimmed after every group had settled it"
            yield MissingStep("stored", "no_longer_known", reason)
        yield from self._missing_of_groups()

    def _missing_of_groups(self) -> Iterator[MissingStep]:
        found = self._found
        since = found.committed_at or found.published_at
        old = since is None or datetime.now(UTC) - since > timedelta(seconds=HORIZON_S)
        if old and self._groups:
            reason = f"deleted after {HORIZON_S / 86_400:.0f} days, but for parked and dead messages"
            yield MissingStep("failed attempts, fence", "no_longer_known", reason)
        if len(found.attempts) >= ATTEMPTS_LIMIT:
            reason = f"only the first {ATTEMPTS_LIMIT:,} are shown"
            yield MissingStep("later attempts", "not_searched", reason)
        for one in found.groups:
            if one.state in {"settled", "unknown"}:
                reason = "topics that are not archived keep no outcomes"
                if self._archived:
                    reason = (
                        "no outcome is archived: it is not fetched yet, or was settled before the topic was archived"
                    )
                yield MissingStep("deliveries, member and time of settling", "never_recorded", reason, one.group)

    def _rows(self, name: str, facts: Mapping[str, Any] | None = None) -> list[Any]:
        with self._runtime.control.connection() as connection:
            return connection.execute(query(name), {**self._facts, **(facts or {})}).fetchall()
