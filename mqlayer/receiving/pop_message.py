"""Messages of an ordered pop, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mqlayer.domain.large_bodies import BodyReference
from mqlayer.domain.message import NO_KEY, Identity, Record
from mqlayer.traces import trace_context

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext


class Token(NamedTuple):
    """A delivery; void after redelivery or nack, or under a higher epoch of the partition."""

    partition: int
    epoch: int
    batch: int
    offset: int


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

    def trace_context(self) -> TraceContext:
        """Return OpenTelemetry's context of its trace, empty without one. Raises InvalidInput without the package."""
        return trace_context(self.headers)


def message_of(record: Record, *, attempt: int, token: Token, replay: int) -> PopMessage:
    """Return a record as a message."""
    return PopMessage(
        None if record.key == NO_KEY else record.key.decode(),
        record.body,
        record.headers,
        record.identity,
        attempt,
        token,
        record.at_ms,
        replay,
        record.tags,
        record.reordered,
        record.large_body,
    )
