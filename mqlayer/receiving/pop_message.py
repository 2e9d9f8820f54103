"""Messages of an ordered pop, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mqlayer.domain.large_bodies import BodyReference
from mqlayer.domain.message import NO_KEY, Identity, Record
from mqlayer.domain.routing import PartitionId
from mqlayer.parking.pop_store import Claim
from mqlayer.traces import trace_context

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext


class Token(NamedTuple):
    """A delivery; void after redelivery or nack, or under a higher epoch of the partition."""

    partition: int
    epoch: int
    batch: int
    offset: int


class Claimed(NamedTuple):
    """A parked message's giving-out. `at_s`: Unix time; `redriven`: later ones of its key may be handled."""

    partition: PartitionId
    claim: Claim
    at_s: float
    redriven: bool


@dataclass(frozen=True, slots=True)
class PopMessage:
    """A message; picklable, settled in any process.

    `key`: None without one; `identity`: equal at every delivery, an idempotency key; `attempt`: deliveries, this one
    included; `at_ms`: Unix ms by the publisher's clock; `replay`: the last seek if fenced effects apply again, else 0;
    `reordered`: see `Context.reordered`; `large_body`: of a body that `fetch_body` returns, while `body` is empty.
    """

    key: str | None
    body: bytes
    headers: Mapping[str, str]
    identity: Identity
    attempt: int
    token: Token
    at_ms: int
    replay: int = 0
    tags: tuple[str, ...] = ()
    reordered: bool = False
    large_body: BodyReference | None = None
    _record: Record | None = field(default=None, repr=False, compare=False)
    claimed: Claimed | None = field(default=None, repr=False, compare=False)
    """Internal: of a parked message, which Postgres gives out."""

    def __getattr__(self, name: str) -> Any:
        # A slot that `message_of` left empty: few handlers read all of them.
        if name not in _OF_RECORD:
            raise AttributeError(name)
        record: Any = self._record
        value = _key_of(record) if name == "key" else getattr(record, name)
        _set(self, name, value)
        return value

    def trace_context(self) -> TraceContext:
        """Return OpenTelemetry's context of its trace, empty without one. Raises InvalidInput without the package."""
        return trace_context(self.headers)


_OF_RECORD: Final = frozenset(("key", "body", "headers", "identity", "at_ms", "tags", "reordered", "large_body"))
_set = object.__setattr__


def _key_of(record: Record) -> str | None:
    return None if record.key == NO_KEY else record.key.decode()


def message_of(
    record: Record, *, attempt: int, token: Token, replay: int, claimed: Claimed | None = None
) -> PopMessage:
    """Return a record as a message, parsed when read."""
    message = object.__new__(PopMessage)
    _set(message, "_record", record)
    _set(message, "attempt", attempt)
    _set(message, "token", token)
    _set(message, "replay", replay)
    _set(message, "claimed", claimed)
    return message
