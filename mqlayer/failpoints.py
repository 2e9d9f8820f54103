"""Places where a test kills, stops, fails or holds this process.

`failpoint("relay.after_append")` acts only if armed, by `arm` or at import by both of

    MQLAYER_FAILPOINTS="relay.after_append=kill@2,ack.before_send=raise"
    MQLAYER_ALLOW_FAILPOINTS=1

`name=action[@n]` acts once, when this process reaches the name for the n-th time.

    kill         SIGKILL to this process
    stop         SIGSTOP, until SIGCONT
    raise        raise FailpointHit
    wait:<path>  hold the thread until the file exists; FailpointHit after 60 s
    mark:<path>  append one byte to the file, and go on
"""

import os
import re
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, assert_never, cast, get_args

__all__ = ["ALLOWING_VARIABLE", "ENVIRONMENT_VARIABLE", "FailpointHit", "arm", "disarm_all", "failpoint"]

from mqlayer.logs import event_logger

log = event_logger(__name__)

ENVIRONMENT_VARIABLE: Final = "MQLAYER_FAILPOINTS"
ALLOWING_VARIABLE: Final = "MQLAYER_ALLOW_FAILPOINTS"
WAIT_LIMIT_S: Final = 60.0
WAIT_POLL_S: Final = 0.005

_NAME: Final = re.compile(r"[a-z_]+(\.[a-z_]+)+")

ActionKind = Literal["kill", "stop", "raise", "wait", "mark"]
_KINDS: Final[tuple[str, ...]] = get_args(ActionKind)
_KINDS_WITH_PATH: Final = ("wait", "mark")


class FailpointHit(Exception):
    """A test's failure; no MqlayerError, so no code handles it."""

    def __init__(self, name: str, reason: str = "armed to raise") -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"failpoint {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _FailpointAction:
    kind: ActionKind
    path: str
    occurrence: int


@dataclass(slots=True)
class _ArmedFailpoint:
    actions: list[_FailpointAction] = field(default_factory=list)
    reached_count: int = 0


_armed: dict[str, _ArmedFailpoint] = {}
_lock = threading.Lock()


def failpoint(name: str) -> None:
    """Act if a test armed this place."""
    if _armed:
        _reach(name)


def arm(name: str, action: str, *, occurrence: int = 1) -> None:
    """Run `action` at the n-th reach of a failpoint, counted from its first arming.

    Raises ValueError for a malformed name or action, or an occurrence below 1.
    """
    parsed = _parse_action(name, action, occurrence)
    with _lock:
        _armed.setdefault(name, _ArmedFailpoint()).actions.append(parsed)


def disarm_all() -> None:
    """Disarm all, reset counts; paused threads stay paused."""
    with _lock:
        _armed.clear()


def _reach(name: str) -> None:
    for action in _due(name):
        _act(name, action)


def _due(name: str) -> list[_FailpointAction]:
    with _lock:
        armed = _armed.get(name)
        if armed is None:
            return []
        armed.reached_count += 1
        return [action for action in armed.actions if action.occurrence == armed.reached_count]


def _act(name: str, action: _FailpointAction) -> None:
    match action.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            # To this thread: another thread could take a signal to the process, while this one runs on.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "raise":
            raise FailpointHit(name)
        case "wait":
            _wait_for_file(name, action.path)
        case "mark":
            _append_byte(action.path)
        case _:
            assert_never(action.kind)


def _wait_for_file(name: str, path: str) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not Path(path).exists():
        if time.monotonic() >= deadline:
            raise FailpointHit(name, f"{path} did not appear within {WAIT_LIMIT_S:g} s")
        time.sleep(WAIT_POLL_S)


def _append_byte(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, b".")
    finally:
        os.close(descriptor)


def _parse_action(name: str, text: str, occurrence: int) -> _FailpointAction:
    if not _NAME.fullmatch(name):
        raise ValueError(f"failpoint name {name!r} must be lower-case words joined by dots, like 'relay.after_append'")
    if occurrence < 1:
        raise ValueError(f"failpoint {name}: occurrence is {occurrence}, but the first one is 1")
    kind, colon, path = text.partition(":")
    if kind not in _KINDS:
        raise ValueError(
            f"failpoint {name}: unknown action {text!r}; use kill, stop, raise, wait:<path> or mark:<path>"
        )
    if (kind in _KINDS_WITH_PATH) != bool(path) or (colon and not path):
        raise ValueError(
            f"failpoint {name}: action {text!r} is malformed; only wait and mark take a path, and need one"
        )
    return _FailpointAction(cast(ActionKind, kind), path, occurrence)


def arm_from_environment() -> None:
    """Arm what the environment names, if it also allows it; else say that it does nothing.

    Raises ValueError for a malformed name or action.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if os.environ.get(ALLOWING_VARIABLE) == "1":
        _arm_from(named)
    elif named:
        # Nobody has set up logging at import: the text alone is what stderr shows.
        log.warning("%s does nothing without %s=1", ENVIRONMENT_VARIABLE, ALLOWING_VARIABLE)


def _arm_from(specification: str) -> None:
    for entry in filter(None, (part.strip() for part in specification.split(","))):
        name, equals, rest = entry.partition("=")
        if not equals:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: {entry!r} is not of the form name=action[@occurrence]")
        action, occurrence = _split_occurrence(rest)
        arm(name, action, occurrence=occurrence)


def _split_occurrence(text: str) -> tuple[str, int]:
    # A path may hold an `@`: the last one before a number counts.
    action, _, number = text.rpartition("@")
    if action and number.isdecimal():
        return action, int(number)
    return text, 1


arm_from_environment()
