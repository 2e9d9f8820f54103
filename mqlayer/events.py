"""Events of messages and keys, for hooks of the acting process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from mqlayer.errors import InvalidInput
from mqlayer.logs import event_logger

log = event_logger(__name__)

EventKind = Literal[
    "failed", "timed_out", "paused", "blocked", "parking_full", "parked", "unparked", "dead", "skipped",
    "released", "discarded", "kept_dead", "head_skipped", "redriven", "redrive_blocked", "redrive_ended", "overdue",
    "version_gap", "instance_reset", "acknowledged_loss", "breaker_opened", "breaker_closed", "dropped", "expired",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One event; it never holds a key or a body.

    The page 'Events and counters' explains kinds and fields. `wait_s`: seconds, None while an operator is awaited.
    `partition`, `lp`, `seq`: None without a single one. `version_gap` repeats hourly.
    """

    kind: EventKind
    topic: str
    group: str
    partition: int | None = None
    lp: int | None = None
    seq: int | None = None
    attempts: int = 0
    cause: str = ""
    wait_s: float | None = None
    error: str = ""
    count: int = 1
    actor: str = ""


Hook = Callable[[Event], None]
HookType = TypeVar("HookType", bound=Hook)

_hooks: Final[list[Hook]] = []


def check_hook(hook: HookType) -> HookType:
    """Return a hook. Raises InvalidInput."""
    if not callable(hook):
        raise InvalidInput(f"a hook is a function that takes an Event, not a {type(hook).__name__}")
    return hook


def on_event(hook: HookType) -> HookType:
    """Call a function with each Event of this process; usable as a decorator.

    It runs in the acting thread, after the commit: keep it short. Its exceptions are logged.
    """
    _hooks.append(check_hook(hook))
    return hook


def remove_hook(hook: Hook) -> None:
    """Undo `on_event`."""
    _hooks.remove(hook)


def emit(event: Event, hooks: Sequence[Hook] = ()) -> None:
    """Call all hooks."""
    for hook in (*_hooks, *hooks):
        try:
            hook(event)
        except Exception as error:  # noqa: BLE001 - a hook's failure must not undo the event
            log.error("hook_failed", extra={"event": event.kind, "error": _where(error)})


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__
