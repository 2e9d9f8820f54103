"""Versions of entities: events apply in the order 1, 2, 3 …, once each.

Lower numbers are duplicates; higher ones are held in Postgres, in the transaction that takes them. States:
ARCHITECTURE.md, "State charts".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from mqlayer.arguments import explain_methods
from mqlayer.domain.message import Identity
from mqlayer.domain.names import check_id, check_name
from mqlayer.errors import InvalidInput, VersionsFull
from mqlayer.failpoints import failpoint
from mqlayer.idempotency.version_gaps import VersionGap, report_gap
from mqlayer.postgres.caller_connections import Statement, Statements, run, run_async
from mqlayer.postgres.queries import query

HELD_MESSAGES: Final = 100
HELD_BYTES: Final = 1_000_000
ALL_MESSAGES: Final = 100_000
ALL_BYTES: Final = 256_000_000
GAP_S: Final = 60.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, str]).decode


class EventMessage(Protocol):
    """A Context or PopMessage."""

    @property
    def body(self) -> bytes:
        """The body as sent."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers."""

    @property
    def identity(self) -> Identity:
        """The identity."""


@dataclass(frozen=True, slots=True)
class VersionedEvent:
    """An event to apply. `held`: it waited; `origin`: its message."""

    entity: str
    version: int
    body: bytes
    headers: Mapping[str, str]
    origin: str
    held: bool


@explain_methods
class Versions:
    """Takes entities' events in version order, once each.

    `name`: a numbering, shared by all groups and processes that use it. `first`: an entity's first version.
    `held_messages`, `held_bytes`: limits per entity (bodies and headers). `all_messages`, `all_bytes`: over all
    entities; concurrent takers may exceed them. `gap_s`: when a missing version raises `version_gap`
    (`mqlayer.on_event`), in a worker or by a later event's taker, which also calls `on_gap`.
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
        """Take an event in the effect's own transaction; return the events to apply now, in order.

        Call it first, apply all it returns in this transaction, settle the message in any case. Nothing is returned for
        duplicates and held events. Takers of an entity wait for each other until COMMIT: take several entities in one
        order everywhere.

        Raises VersionsFull if an early event finds no room, InvalidInput without an open transaction,
        TransactionConflict if the transaction must run again.
        """
        return run(connection, self._taking(message, entity, version))

    async def atake(self, connection: Any, message: EventMessage, *, entity: str, version: int) -> list[VersionedEvent]:
        """`take` on an async connection."""
        return await run_async(connection, self._taking(message, entity, version))

    def take_released(self, connection: Any) -> list[VersionedEvent]:
        """Return events of one entity that an operator released; optional, since its next event takes them too."""
        return run(connection, self._taking_released())

    def set(self, connection: Any, *, entity: str, version: int | None) -> int:
        """Set an entity's version in the caller's transaction, None to forget it; return how many held events that
        drops."""
        facts = {"name": self.name, "entity": check_id("entity", entity), "version": version, "drop": False}
        return run(connection, _setting(facts))

    def _taking(self, message: EventMessage, entity: str, version: int) -> Statements[list[VersionedEvent]]:
        event = self._event(message, entity, version)
        row = yield Statement(query("version_take"), event, in_transaction=True)
        return self._taken(message, entity, version, row)

    def _taking_released(self) -> Statements[list[VersionedEvent]]:
        entity, *held = yield Statement(query("version_released"), self._facts, in_transaction=True)
        return _held_events(entity, *held)

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


def _setting(facts: Mapping[str, Any]) -> Statements[int]:
    (dropped,) = yield Statement(query("version_set"), facts)
    return int(dropped)


def _origin_of(message: EventMessage) -> str:
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
