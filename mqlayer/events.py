"""What happens to messages and keys that fail, told to whoever wants to count it: by members, operators' acts and jobs.

Hooks of a process hear of all that it does: its members, the functions of `mqlayer.redelivery` that it calls, and the
periodic jobs where it is a worker. Acts in other processes are counted in Postgres, see
`mqlayer.redelivery.failure_counts`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

log = logging.getLogger(__name__)

EventKind = Literal[
    "failed", "timed_out", "paused", "blocked", "parking_full", "parked", "unparked", "dead", "skipped",
    "released", "discarded", "kept_dead", "head_skipped", "redriven", "redrive_blocked", "redrive_ended", "overdue",
    "version_gap", "instance_reset", "acknowledged_loss",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to messages or keys of a group. It never holds a key, a body or an error's text.

    Of members:

    - failed: an attempt failed, it is tried again. blocked: likewise, and its attempts are used up: the group waits.
    - timed_out: the attempt took longer than its time limit. What becomes of the message is an event of its own.
    - paused: its handler has its key rest; no attempt is counted.
    - parked: its key waits in Postgres from now on. parking_full: there is no room for it, it waits in place; `cause`
      names the limit.
    - unparked: its key is handled from the stream again.
    - dead: it left the group, and can be sent again. skipped: it left, only the reason is kept.
    - begun_anew: this instance of a broadcast group was away for too long, its position was dropped; `cause` is where
      it begins now. What it has built of messages may miss some.

    Of operators' acts and of jobs, `count` of them at once, `actor` who it was:

    - released: keys are tried now. discarded: parked messages died. ruled: a dead message is to stay dead.
    - passed_over: the message that a key waited for died (`key skip-head`).
    - redriven: dead messages were given back. redrive_waits: there is no room for more, `cause` names the limit.
      redrive_ended: it is over; `cause` is done or cancelled.
    - overdue: keys have been due for a while, their group was told again (by the retry scan).

    Of versions of entities (`mqlayer.Versions`):

    - version_gap: a version of an entity has been missing for too long, `count` later ones are held. `cause` is the
      name of the Versions; topic and group are empty. Told again each hour while it lasts.

    Of producers (`mqlayer.Producer`):

    - acknowledged_lost: a node lost `count` messages that it had acknowledged, from `seq` on; `cause` names the node,
      its former run and the present one. group is empty.

    `partition`, `lp` and `seq` are None where no single one is meant, `wait_s` where nothing is tried before an
    operator says so; `error` is an exception's type and place.
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


def on_event(hook: HookType) -> HookType:
    """Have a function called with each Event of this process, whoever makes it; usable as a decorator.

    Called at once, in the thread that does it, after what it tells of is committed: keep it short. What it raises is
    logged, and changes nothing. An App's own `on_event` hears of its own members only.
    """
    _hooks.append(hook)
    return hook


def remove_hook(hook: Hook) -> None:
    """Call a function no more that `on_event` took."""
    _hooks.remove(hook)


def emit(event: Event, hooks: Sequence[Hook] = ()) -> None:
    """Call every hook of this process, and these."""
    for hook in (*_hooks, *hooks):
        try:
            hook(event)
        except Exception as error:  # noqa: BLE001 - the application's: what is told of went well
            log.error("hook_failed", extra={"event": event.kind, "error": _where(error)})


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__
