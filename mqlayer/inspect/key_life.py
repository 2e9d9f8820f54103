"""The history of a key: its messages with their states, a page at a time, and the acts on the key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from mqlayer.domain.names import encode_key
from mqlayer.domain.routing import lp_of
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.inspect.group_facts import group_facts
from mqlayer.inspect.message_life import ACTS_LIMIT, HORIZON_S, LifeStep, MissingStep
from mqlayer.inspect.message_search import FoundMessage, MessageFilter, search_messages
from mqlayer.inspect.message_states import states_of
from mqlayer.inspect.stream_search import RECORDS_LIMIT
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

PAGE_LIMIT: Final = 100


class KeyMessage(msgspec.Struct, frozen=True):
    """A message of a key. `groups`: its state in each group."""

    found: FoundMessage
    groups: Mapping[str, str]


class KeyHistory(msgspec.Struct, frozen=True):
    """A page of a key's messages, the latest first, and the steps of the key itself. `after`: the next page."""

    topic: str
    key: str
    lp: int
    messages: Sequence[KeyMessage]
    steps: Sequence[LifeStep]
    missing: Sequence[MissingStep]
    after: str | None
    looked: int


def history_of_key(
    runtime: Runtime, topic: str, key: str, *, limit: int = 20, after: str | None = None, records: int = RECORDS_LIMIT
) -> KeyHistory:
    """Return a page of a key's history; `records`: of streams, at most. Raises NotFound, InvalidInput, KeyTooLarge."""
    if not 1 <= limit <= PAGE_LIMIT:
        raise InvalidInput(f"{limit} messages are no page: 1 to {PAGE_LIMIT}")
    page = search_messages(runtime, topic, MessageFilter(key=key), limit=limit, after=after, records=records)
    missing = list(page.missing)
    steps = sorted(_steps(runtime, topic, key, missing) if after is None else (), key=_time)
    states = states_of(runtime, topic, page.messages, missing)
    messages = [KeyMessage(one, groups) for one, groups in zip(page.messages, states, strict=True)]
    return KeyHistory(topic, key, int(lp_of(encode_key(key))), messages, steps, missing, page.after, page.looked)


def _steps(runtime: Runtime, topic: str, key: str, missing: list[MissingStep]) -> Iterator[LifeStep]:
    groups = {one.group_id: one.name for one in group_facts(runtime.control, topic)}
    name = encode_key(key)
    place: dict[str, Any] = {"lp": int(lp_of(name)), "name": name, "group_ids": list(groups)}
    with runtime.control.connection() as connection:
        for group_id, group in groups.items():
            row = connection.execute(query("inspected_parked_key"), place | {"group_id": group_id}).fetchone()
            if row is not None:
                yield _parked(group, row)
        facts = {"objects": [f"{topic}/{group}" for group in groups.values()], "key": key, "message": None, "acts": [],
                 "since": datetime.now(UTC) - timedelta(days=3_650), "limit": ACTS_LIMIT}  # fmt: skip
        acts = connection.execute(query("life_acts"), facts).fetchall()
    for at, actor, act, target, said in acts:
        reason = f": {said['reason']}" if "reason" in said else ""
        yield LifeStep("act", at, target.partition("/")[2], actor, detail=f"{act}{reason}")
    yield from _effects(runtime, groups, place | {"key": key}, missing)


def _parked(group: str, row: Sequence[Any]) -> LifeStep:
    cause, since, due_at, _, attempts, count, _, _, seq, paused_at, by = row
    until = "an operator releases it" if due_at is None else f"{due_at:%Y-%m-%d %H:%M:%S} UTC"
    detail = f"{cause}: parked until {until}, messages: {count}"
    if paused_at is not None:
        detail = f"{by} paused it, messages: {count}"
    if seq is not None:
        detail += f", from seq {seq} on"
    return LifeStep("parked", since, group, None, attempts, detail=detail)


def _effects(
    runtime: Runtime, groups: Mapping[int, str], facts: Mapping[str, Any], missing: list[MissingStep]
) -> Iterator[LifeStep]:
    if runtime.application is None:
        return
    try:
        with runtime.outbox.connection() as connection:
            rows = connection.execute(query("life_fence_of_key"), facts).fetchall()
    except MqlayerError as error:
        missing.append(MissingStep("effects", "not_searched", f"the application database: {error}"))
        return
    for group_id, source, seq, at in rows:
        yield LifeStep("applied", at, groups[group_id], detail=f"the fence has source {source} up to seq {seq}")
    reason = f"the fence forgets a key {HORIZON_S / 86_400:.0f} days after its last effect"
    missing.append(MissingStep("earlier effects", "no_longer_known", reason))


def _time(one: LifeStep) -> datetime:
    return one.at or datetime(9000, 1, 1, tzinfo=UTC)
