"""What happens to messages that fail, told to the application: for its own metrics and alerts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mqlayer.consuming.faults import where

log = logging.getLogger(__name__)

EventKind = Literal["failed", "paused", "blocked", "parking_full", "parked", "unparked", "dead", "skipped"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a message or a key of a group. It never holds a key, a body or an error's text.

    - failed: an attempt failed, it is tried again. blocked: likewise, and its attempts are used up: the group waits.
    - paused: its handler has its key rest; no attempt is counted.
    - parked: its key waits in Postgres from now on. parking_full: it would, but there are too many; it waits in place.
    - unparked: its key is handled from the stream again.
    - dead: it left the group, and can be sent again. skipped: it left, only the reason is kept.

    `seq` is None where the whole key is meant, `wait_s` where nothing is tried before an operator says so; `error` is
    an exception's type and place.
    """

    kind: EventKind
    topic: str
    group: str
    partition: int
    lp: int
    seq: int | None = None
    attempts: int = 0
    cause: str = ""
    wait_s: float | None = None
    error: str = ""


Hook = Callable[[Event], None]


def tell(hooks: Sequence[Hook], event: Event) -> None:
    """Call every hook; one that raises is logged, and changes nothing."""
    for hook in hooks:
        try:
            hook(event)
        except Exception as error:  # noqa: BLE001 - the application's: consuming goes on
            log.error("hook_failed", extra={"event": event.kind, "error": where(error)})
