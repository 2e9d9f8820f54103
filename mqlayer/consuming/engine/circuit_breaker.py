"""What a group's circuit breaker means to one member: which messages begin, which failures count.

The breaker itself is in Postgres (`groups/breaker.py`); heartbeats carry it. See docs/design/circuit-breaker.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.domain.key_window import KeyWindow
from mqlayer.domain.retry_rules import RetryRules, error_name
from mqlayer.groups.breaker import CLOSED, RAMP_S, BreakerReply, State

HOLD_S: Final = 1.0
"""Wait of a message whose failure did not count."""
RAMP_STEP_S: Final = 1.0
"""While ramping, handlers at once double in this time."""
PATIENCE_S: Final = 3.0
"""How long other members' reports are awaited."""
RAMPING_KEYS: Final = 2
"""Failing keys that are enough while ramping."""


@dataclass(frozen=True, slots=True)
class KeyReport:
    """A member's window. `fails`: whether this member would open the breaker."""

    failing: int
    tried: int
    cause: str
    fails: bool
    waited: bool


class CircuitBreaker:
    """One member's view. Thread-safe; while nothing fails, workers read `watching` and `engaged` alone."""

    def __init__(self, rules: Callable[[], RetryRules] = RetryRules) -> None:
        self.watching = False
        """Whether it wants to hear of handled keys."""
        self.engaged = False
        """Whether it admits what begins."""
        self._on_verdict: Callable[[], None] = _nothing
        self._on_going: Callable[[], None] = _nothing
        self._rules = rules
        self._lock = threading.RLock()
        self._window = KeyWindow()
        self._reply = CLOSED
        self._heard_at = self._changed_at = self._failing_since = clock()
        self._begun: set[int] = set()
        self._verdict: tuple[bool, str] | None = None
        self._suspicious_since: float | None = None
        self._reported_since: float | None = None
        self._undo: list[tuple[float, Callable[[], None]]] = []

    def connect(self, on_verdict: Callable[[], None], on_going: Callable[[], None]) -> None:
        """Have these called when Postgres should hear of something soon, and when more may begin."""
        self._on_verdict, self._on_going = on_verdict, on_going

    # -- dispatchers -------------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Return how many more may begin."""
        with self._lock:
            if self._reply.state == "ramping":
                return max(0, self._handlers() - len(self._begun))
            may_probe = self._reply.state == "probing" and self._reply.mine and self._verdict is None
            return max(0, 1 - len(self._begun)) if may_probe else 0

    def begin(self, begun: object) -> None:
        """Admit one: a key's part, or a message."""
        with self._lock:
            self._begun.add(id(begun))

    def is_admitted(self, begun: object) -> bool:
        """Whether it may run."""
        with self._lock:
            return not self.engaged or id(begun) in self._begun

    # -- workers -----------------------------------------------------------------------------------------------------

    def ended(self, begun: object, key: bytes, handled: int, *, since: float | None = None) -> None:
        """Note that one, begun then, ended without a failure."""
        with self._lock:
            admitted = id(begun) in self._begun
            self._begun.discard(id(begun))
            if not handled:
                return
            # What began before the first failure says nothing about a downstream that may be away since.
            before = since is not None and self._window.failing > 0 and since < self._failing_since
            if self.watching and not before:
                self._window.succeed(key, clock())
            if admitted and self._reply.state == "probing" and self._verdict is None:
                self._decide(succeeded=True, cause="")

    def failed(self, begun: object, key: bytes, error: BaseException, *, leaves: bool = False) -> bool:
        """Note a failure; say whether it is held: not counted. `leaves`: else its key is parked, or it dies."""
        rules = self._rules()
        if rules.breaker_share is None:
            return False
        with self._lock:
            admitted = id(begun) in self._begun
            self._begun.discard(id(begun))
            if not rules.may_trip(error):
                return False
            now = clock()
            self._forget(now, rules)
            if not self._window.failing:
                self._failing_since = now
            self._window.fail(key, now, error_name(type(error)))
            self.watching = True
            if self._reply.state == "probing" and admitted and self._verdict is None:
                self._decide(succeeded=False, cause=error_name(type(error)))
            return self._reply.state in ("open", "probing") or self._is_suspicious(
                now, rules, rules.breaker_share, leaves=leaves
            )

    def counted(self, undo: Callable[[], None]) -> None:
        """Note a counted failure, which `undo` gives back if the breaker opens."""
        with self._lock:
            if self.watching:
                self._undo.append((clock(), undo))

    # -- the heartbeat -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The breaker's state, as heard last."""
        return self._reply.state

    def verdict(self) -> tuple[bool, str] | None:
        """Return this member's probe's result, and its error."""
        return self._verdict

    def may_probe(self) -> bool:
        """Whether to ask for the probe."""
        reply, heard_s = self._reply, clock() - self._heard_at
        return (reply.state == "open" and heard_s >= reply.probe_in_s) or (reply.state == "probing" and reply.orphaned)

    def may_close(self) -> bool:
        """Whether the ramp's time is over."""
        return self._reply.state == "ramping" and clock() - self._changed_at >= RAMP_S

    def report(self) -> KeyReport | None:
        """Return the window, if Postgres should hear of it."""
        if not self.watching or self._reply.state not in ("closed", "ramping"):
            return None
        rules, now = self._rules(), clock()
        with self._lock:
            if rules.breaker_share is None:
                self._window.clear()
                self.watching, self._suspicious_since = False, None
                return None
            self._forget(now, rules)
            fails = self._window.fails(rules.breaker_share, 1)
            if not self._window.failing and not self._reply.suspected:
                self.watching = self._reply.state != "closed"
                self._reported_since = self._suspicious_since = None
                return None
            if fails and self._reported_since is None:
                self._reported_since = now
            elif not fails:
                self._reported_since = self._suspicious_since = None
            waited = self._reported_since is not None and now - self._reported_since >= PATIENCE_S
            return KeyReport(self._window.failing, self._window.tried, self._window.cause, fails, waited)

    @property
    def is_deciding(self) -> bool:
        """Whether Postgres should be asked often."""
        since = self._suspicious_since
        undecided = since is not None and clock() - since < self._rules().breaker_window_s
        return (undecided and self._window.failing >= RAMPING_KEYS) or self._verdict is not None

    def follow(self, reply: BreakerReply) -> State | None:
        """Follow a heartbeat's reply; return the former state if it changed."""
        if self._rules().breaker_share is None:
            reply = CLOSED
        with self._lock:
            former, self._reply = self._reply, reply
            self._heard_at = clock()
            self._changed_at = self._heard_at - reply.age_s
            if reply.state != "probing" or not reply.mine:
                self._verdict = None
            elif not former.mine:
                self._begun.clear()
            self.engaged = reply.state != "closed"
            self.watching = self.watching or self.engaged or reply.suspected
            if former.state == reply.state:
                return None
            self._enter(former.state, reply.state)
        self._on_going()
        return former.state

    # -- inner -------------------------------------------------------------------------------------------------------

    def _enter(self, former: State, state: State) -> None:
        if state in ("open", "probing") and former in ("closed", "ramping"):
            for _, undo in reversed(self._undo):
                undo()
        if not (former in ("open", "probing") and state in ("open", "probing")):
            self._window.clear()
            self._undo.clear()
            self._suspicious_since = self._reported_since = None
        if state in ("ramping", "closed"):
            self._begun.clear()

    def _decide(self, *, succeeded: bool, cause: str) -> None:
        self._verdict = succeeded, cause
        self._on_verdict()

    def _handlers(self) -> int:
        return 1 << min(16, int(max(0.0, clock() - self._changed_at) / RAMP_STEP_S))

    def _is_suspicious(self, now: float, rules: RetryRules, share: float, *, leaves: bool) -> bool:
        ramping = self._reply.state == "ramping"
        keys = min(RAMPING_KEYS if ramping else max(2, rules.breaker_keys // 2), rules.breaker_keys)
        if not self._window.fails(share, 1):
            self._suspicious_since = None
            return False
        if self._suspicious_since is None:
            self._suspicious_since = now
        if self._window.failing >= (keys if ramping else rules.breaker_keys):
            self._on_verdict()
        enough = leaves or self._window.failing >= keys
        return enough and now - self._suspicious_since < rules.breaker_window_s

    def _forget(self, now: float, rules: RetryRules) -> None:
        before = now - rules.breaker_window_s
        self._window.forget(before)
        self._undo = [(at, undo) for at, undo in self._undo if at >= before]


def _nothing() -> None:
    """Do nothing."""
