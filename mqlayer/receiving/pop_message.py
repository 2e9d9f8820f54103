"""What a receiver is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mqlayer.domain.message import NO_KEY, Identity, Record


class Token(NamedTuple):
    """Names one giving-out of one message: void once the message is given out again, or given back, and once the epoch
    of the group at the partition is raised.
    """

    partition: int
    epoch: int
    batch: int
    offset: int


@dataclass(frozen=True, slots=True)
class PopMessage:
    """A message of a batch. Can be pickled: whoever has it may acknowledge it, in any process.

    `key`: None for a message without one; `identity`: the same at every delivery, an idempotency key for effects
    elsewhere; `attempt`: how often it was given out, this time included; `at_ms`: when it was published, ms of Unix
    time by the publisher's clock; `replay`: the last seek, where fenced effects are applied again since, else 0;
    `reordered`: order may not hold for it, see `Context.reordered`.
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


def message_of(record: Record, *, attempt: int, token: Token, replay: int) -> PopMessage:
    """Return a record of a batch as its receiver gets it."""
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
    )
