"""The steps of a key that Postgres has: failed attempts, deaths, acts of operators, items of bulk actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from mqlayer.domain.message import Identity
from mqlayer.domain.names import encode_key
from mqlayer.domain.parked_names import own_name
from mqlayer.domain.routing import lp_of
from mqlayer.errors import MqlayerError
from mqlayer.inspect.group_facts import group_facts
from mqlayer.inspect.message_life import ACTS_LIMIT, HORIZON_S, BulkTurn, LifeStep, MissingStep, bulk_step
from mqlayer.inspect.message_search import FoundMessage
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

GROUP_ACTS: Final = ("group seek", "replay start")
"""Acts on a whole group that reach each of its keys; of bulk actions the key's own items tell."""
NOT_KEPT: Final = (
    MissingStep("attempts that ended well", "never_recorded", "only failed attempts are kept"),
    MissingStep("failed attempts", "no_longer_known",
                f"kept for {HORIZON_S / 86_400:.0f} days, under the number of their message: those of messages that no "
                "stream, parked, dead or bulk row names any more are not found"),
    MissingStep("earlier times as a parked key", "never_recorded",
                "its row goes with its last message, and a timed retry leaves none: failed attempts tell of them"),
    MissingStep("earlier bulk actions", "no_longer_known", "they are forgotten 30 days after their end"),
)  # fmt: skip


def steps_of_key(
    runtime: Runtime, topic: str, key: str, messages: Sequence[FoundMessage], missing: list[MissingStep]
) -> list[LifeStep]:
    """Return a key's steps in order, the attempts of given and of failed messages among them."""
    steps = _KeySteps(runtime, topic, key, [one.identity for one in messages if one.identity is not None])
    return sorted(steps.all(missing), key=lambda one: one.at or datetime(9000, 1, 1, tzinfo=UTC))


class _KeySteps:
    """Reads the steps of one key."""

    def __init__(self, runtime: Runtime, topic: str, key: str, messages: Sequence[Identity]) -> None:
        self._runtime, self._topic, self._key = runtime, topic, key
        self._groups = {one.group_id: one.name for one in group_facts(runtime.control, topic)}
        self._known = {(one.source, one.seq) for one in messages}
        name = encode_key(key)
        lp = int(lp_of(name))
        # Those of unordered groups are parked one by one.
        names = [name, *(own_name(one) for one in messages if one.lp == lp)]
        self._place: dict[str, Any] = {
            "lp": lp, "name": name, "names": names, "group_ids": list(self._groups), "limit": ACTS_LIMIT,
        }  # fmt: skip
        self._alone = [str(one) for one in messages]

    def all(self, missing: list[MissingStep]) -> Iterator[LifeStep]:
        """Yield the steps, in no order."""
        yield from self._parked()
        items = [BulkTurn(*row) for row in self._rows("life_bulk_items")]
        yield from self._bulk(items)
        self._known |= {(one.source, one.seq) for one in items if one.source is not None and one.seq is not None}
        dead = self._rows("life_key_dead", self._numbers())
        yield from map(self._dead, dead)
        self._known |= {(row[8], row[9]) for row in dead}
        yield from self._attempts()
        of_dead = {one.dead_id: one.group_id for one in items if one.dead_id is not None}
        yield from self._acts(of_dead | {row[1]: row[0] for row in dead})
        yield from self._effects(missing)
        missing += NOT_KEPT

    def _parked(self) -> Iterator[LifeStep]:
        for group_id, group in self._groups.items():
            for row in self._rows("inspected_parked_key", {"group_id": group_id}):
                if row[8] is not None:
                    self._known.add((row[7], row[8]))
                yield _parked(group, row)

    def _bulk(self, items: Sequence[BulkTurn]) -> Iterator[LifeStep]:
        counts = Counter((one.bulk, one.result) for one in items)
        # One line for all messages of the key in an action.
        for one in {(one.bulk, one.result): one for one in reversed(items)}.values():
            count = counts[one.bulk, one.result]
            many = f" ({count} messages)" if count > 1 else ""
            yield bulk_step(self._groups[one.group_id], one, many)

    def _dead(self, row: Sequence[Any]) -> LifeStep:
        group_id, dead_id, cause, reason, attempts, actor, died_at, redriven_at, source, seq = row
        again = "" if redriven_at is None else f"; given back at {redriven_at:%Y-%m-%d %H:%M:%S} UTC"
        detail = f"message {self._name(source, seq)}, dead message {dead_id}, {cause}: {_first_line(reason)}{again}"
        return LifeStep("dead", died_at, self._groups[group_id], actor, attempts, detail=detail)

    def _attempts(self) -> Iterator[LifeStep]:
        for group_id, source, seq, attempt, at, member, error in self._rows("life_key_attempts", self._numbers()):
            detail = f"message {self._name(source, seq)}: {_first_line(error)}"
            yield LifeStep("failed", at, self._groups[group_id], member, attempt, detail=detail)

    def _acts(self, of_dead: Mapping[int, int]) -> Iterator[LifeStep]:
        facts = {
            "objects": [f"{self._topic}/{group}" for group in self._groups.values()],
            "dead_ids": [str(dead_id) for dead_id in of_dead],
            "keys": [self._key, *self._alone], "message": None, "acts": list(GROUP_ACTS),
            "since": datetime.now(UTC) - timedelta(days=3_650),
        }  # fmt: skip
        groups = {str(dead_id): self._groups[group_id] for dead_id, group_id in of_dead.items()}
        for at, actor, act, target, said in self._rows("life_acts", facts):
            reason = f": {said['reason']}" if "reason" in said else ""
            on = f" {target}" if act == "dead discard" else ", of the whole group" if act in GROUP_ACTS else ""
            group = groups.get(target) or target.partition("/")[2]
            yield LifeStep("act", at, group, actor, detail=f"{act}{on}{reason}")

    def _effects(self, missing: list[MissingStep]) -> Iterator[LifeStep]:
        if self._runtime.application is None:
            return
        try:
            with self._runtime.outbox.connection() as connection:
                facts = self._place | {"key": self._key}
                rows = connection.execute(query("life_fence_of_key"), facts).fetchall()
        except MqlayerError as error:
            missing.append(MissingStep("effects", "not_searched", f"the application database: {error}"))
            return
        for group_id, source, seq, at in rows:
            detail = f"the fence has source {source} up to seq {seq}"
            yield LifeStep("applied", at, self._groups[group_id], detail=detail)
        reason = f"the fence forgets a key {HORIZON_S / 86_400:.0f} days after its last effect"
        missing.append(MissingStep("earlier effects", "no_longer_known", reason))

    def _name(self, source: int, seq: int) -> Identity:
        return Identity(source, self._place["lp"], seq)

    def _numbers(self) -> dict[str, Any]:
        return {"sources": [one[0] for one in self._known], "seqs": [one[1] for one in self._known]}

    def _rows(self, name: str, facts: Mapping[str, Any] | None = None) -> list[Any]:
        with self._runtime.control.connection() as connection:
            return connection.execute(query(name), {**self._place, **(facts or {})}).fetchall()


def _parked(group: str, row: Sequence[Any]) -> LifeStep:
    cause, since, due_at, _, attempts, count, _, _, seq, paused_at, by = row
    until = "an operator releases it" if due_at is None else f"{due_at:%Y-%m-%d %H:%M:%S} UTC"
    detail = f"{cause}: parked until {until}, messages: {count}"
    if paused_at is not None:
        detail = f"{by} paused it, messages: {count}"
    if seq is not None:
        detail += f", from seq {seq} on"
    return LifeStep("parked", since, group, None, attempts, detail=detail)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
