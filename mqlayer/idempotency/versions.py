"""Versions of entities: events are applied as 1, 2, 3 …, in whatever order and however often they come.

The rule is TCP's: only the next number is taken; a lower one was applied before, a higher one is held until those
before it have come. What is held is in Postgres, in the transaction that takes the event, so its message can be settled
and no crash loses it.

States of an entity: *in line* (nothing is held) -> *gap* (something is held, the next version is missing since then) ->
*overdue* (for longer than the limit, by the database's clock: the alarm) -> *in line*, when the missing one comes or an
operator says where it goes on. Each step is one transaction of whoever takes an event, together with its effects, under
the lock on the entity's row: a crash leaves all of it or nothing, and a repeated event changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from mqlayer.domain.message import Identity
from mqlayer.domain.names import check_id, check_name
from mqlayer.errors import InvalidInput, VersionsFull
from mqlayer.failpoints import failpoint
from mqlayer.idempotency.version_gaps import VersionGap, report_gap
from mqlayer.postgres.caller_connections import (
    caller_errors,
    check_in_transaction,
    check_in_transaction_async,
    run_one,
    run_one_async,
)
from mqlayer.postgres.queries import query

HELD_MESSAGES: Final = 100
HELD_BYTES: Final = 1_000_000
ALL_MESSAGES: Final = 100_000
ALL_BYTES: Final = 256_000_000
GAP_S: Final = 60.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, str]).decode


class EventMessage(Protocol):
    """What brings an event: a Context, or a PopMessage."""

    @property
    def body(self) -> bytes:
        """The body as it was sent."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers."""

    @property
    def identity(self) -> Identity:
        """The message's identity."""


@dataclass(frozen=True, slots=True)
class VersionedEvent:
    """An event to be applied. `held`: it came before its turn, and waited; `origin`: its message, for people."""

    entity: str
    version: int
    body: bytes
    headers: Mapping[str, str]
    origin: str
    held: bool


class Versions:
    """Takes events of entities in the order of their versions, once each.

    `name`: what the numbers count; whoever uses the same name, in any group and process, shares it. `first`: the
    version that an entity begins with. `held_messages`, `held_bytes`: how much of one entity is held at most, in bytes
    of bodies and headers. `all_messages`, `all_bytes`: of all entities together; looked at before each event that is
    held, so those who hold some at once may exceed it by as many. `gap_s`: after how long a missing version is an
    alarm, an event `version_gap` for `mqlayer.on_event`. The worker tells it, or whoever takes a later event of the
    entity before; that one calls `on_gap` too.
    """

    def __init__(
        self,
        name: str,
        *,
        first: int = 1,
        held_messages: int = HELD_MESSAGES,
        held_bytes: int = HELD_BYTES,
        all_messages: int = ALL_MESSAGES,
        all_bytes: int = ALL_BYTES,
        gap_s: float = GAP_S,
        on_gap: Callable[[VersionGap], None] | None = None,
    ) -> None:
        self.name = check_name("versions", name)
        bounds = (held_messages, held_bytes, all_messages, all_bytes)
        if min(bounds) < 1 or held_messages > 10_000:
            raise InvalidInput("versions hold 1 event or more, of one entity up to 10,000")
        if not 0 < gap_s < 10 * 366 * 86_400:
            raise InvalidInput(f"gap_s is {gap_s}: say how many seconds a version may be missing")
        self._facts = {
            "name": name,
            "first": first,
            "messages": held_messages,
            "bytes": held_bytes,
            "all_messages": all_messages,
            "all_bytes": all_bytes,
            "gap_s": float(gap_s),
        }
        self._on_gap = on_gap

    def take(self, connection: Any, message: EventMessage, *, entity: str, version: int) -> list[VersionedEvent]:
        """Take an event in the effect's own transaction; return what is to be applied now, in order.

        Call it first in the transaction. Apply all that is returned, in this transaction: nothing (the event was
        applied before, or is held now), the event, or the event with those that were held behind it. When the
        transaction commits, they count as applied; settle the message in any case. Two events of one entity wait for
        each other until COMMIT. Take events of one entity in a transaction, or several in the same order everywhere.

        Raises VersionsFull where the event came too early and there is no room to hold it, InvalidInput where no
        transaction is open, TransactionConflict where the whole transaction must be run again.
        """
        event = self._event(message, entity, version)
        with caller_errors(connection):
            check_in_transaction(connection)
            row = run_one(connection, query("version_take"), event)
        return self._taken(message, entity, version, row)

    async def atake(self, connection: Any, message: EventMessage, *, entity: str, version: int) -> list[VersionedEvent]:
        """Do what `take` does on an async connection."""
        event = self._event(message, entity, version)
        with caller_errors(connection):
            await check_in_transaction_async(connection)
            row = await run_one_async(connection, query("version_take"), event)
        return self._taken(message, entity, version, row)

    def take_released(self, connection: Any) -> list[VersionedEvent]:
        """Return what an operator released of one entity, in order, as `take` does; empty where there is nothing.

        For programs that call it now and then: without, it is taken with the entity's next event.
        """
        with caller_errors(connection):
            check_in_transaction(connection)
            entity, *held = run_one(connection, query("version_released"), self._facts)
        return _held_events(entity, *held)

    def set(self, connection: Any, *, entity: str, version: int | None) -> int:
        """Say in the caller's transaction at which version an entity is; return how many held events that drops.

        For entities that are older than the topic, and to begin again: None forgets the entity. Held events behind the
        version stay.
        """
        facts = {"name": self.name, "entity": check_id("entity", entity), "version": version, "drop": False}
        with caller_errors(connection):
            return int(run_one(connection, query("version_set"), facts)[0])

    def _event(self, message: EventMessage, entity: str, version: int) -> Mapping[str, Any]:
        if type(version) is not int or not 0 <= version < 2**53:
            raise InvalidInput(f"a version is a whole number from 0 to 2**53 - 1, not {version!r}")
        return {
            **self._facts,
            "entity": check_id("entity", entity),
            "version": version,
            "body": message.body,
            "headers": _encode(dict(message.headers)).decode(),
            "origin": _origin_of(message),
        }

    def _taken(self, message: EventMessage, entity: str, version: int, row: Sequence[Any]) -> list[VersionedEvent]:
        answer, current, alarm, missing_s, held, *released = row
        if answer in ("full", "all_full"):
            raise VersionsFull(self.name, "entity" if answer == "full" else "all", version, current)
        failpoint("version.after_take")
        if alarm:
            report_gap(VersionGap(self.name, entity, current + 1, held, missing_s), self._on_gap)
        events = _held_events(entity, *released)
        if answer == "due":
            own = VersionedEvent(entity, version, message.body, message.headers, _origin_of(message), held=False)
            events.append(own)
            events.sort(key=lambda event: event.version)
        return events


def _origin_of(message: EventMessage) -> str:
    """Return where an event comes from. What a receiver gives does not name its topic."""
    topic = getattr(message, "topic", "")
    return f"{topic}/{message.identity}" if topic else str(message.identity)


def _held_events(
    entity: str,
    versions: Sequence[int] | None,
    bodies: Sequence[bytes] | None,
    headers: Sequence[str] | None,
    origins: Sequence[str] | None,
) -> list[VersionedEvent]:
    if not versions or bodies is None or headers is None or origins is None:
        return []
    return [
        VersionedEvent(entity, version, bytes(body), _decode(header), origin, held=True)
        for version, body, header, origin in zip(versions, bodies, headers, origins, strict=True)
    ]
