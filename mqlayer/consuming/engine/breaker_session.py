"""A member's calls to Postgres for its group's circuit breaker, in the heartbeat's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import MemberEvents
from mqlayer.errors import MqlayerError
from mqlayer.groups.breaker import BreakerReply, close_breaker, end_probe, open_breaker, report_keys, take_probe
from mqlayer.groups.members import MemberSession
from mqlayer.logs import event_logger

log = event_logger(__name__)


class BreakerSession:
    """Reports keys, opens, probes and closes. `has_ready`: whether a message could be the probe."""

    def __init__(self, core: MemberCore, events: MemberEvents, has_ready: Callable[[], bool]) -> None:
        self._database, self._breaker = core.runtime.control, core.settings.breaker
        self._events, self._has_ready = events, has_ready
        self._names = {"topic": core.group.topic, "group": core.group.name, "member": core.member_id}

    def send(self, session: MemberSession) -> None:
        """Send this pass's part, at most. Raises nothing: the heartbeat must go on."""
        facts: dict[str, object] = {
            "group_id": session.group_id, "member_id": session.member_id, "session": session.session,
        }  # fmt: skip
        try:
            self._send(facts)
        except MqlayerError as error:
            log.warning("breaker_not_reached", extra=self._names | {"reason": str(error)})

    def follow(self, reply: BreakerReply) -> bool:
        """Follow a heartbeat's reply; say whether more may begin than before."""
        former = self._breaker.follow(reply)
        if former is None:
            return False
        state = self._breaker.state
        facts = self._names | {"state": state, "former": former, "cause": reply.cause}
        log.log(logging.WARNING if state == "open" else logging.INFO, "breaker_changed", extra=facts)
        return state in ("ramping", "closed")

    @property
    def unsent(self) -> bool:
        """Whether to send again soon."""
        return self._breaker.is_deciding

    def _send(self, session: dict[str, object]) -> None:
        breaker = self._breaker
        verdict = breaker.verdict()
        if verdict is not None:
            end_probe(self._database, session, succeeded=verdict[0], cause=verdict[1])
            log.info("breaker_probed", extra=self._names | {"succeeded": verdict[0], "error": verdict[1]})
        elif breaker.may_probe():
            if self._has_ready():
                take_probe(self._database, session)
        elif breaker.may_close():
            seconds = close_breaker(self._database, session)
            if seconds is not None:
                self._events.breaker_closed(seconds)
        else:
            self._report(session)

    def _report(self, session: dict[str, object]) -> None:
        report = self._breaker.report()
        if report is None:
            return
        report_keys(self._database, session, failing=report.failing, tried=report.tried)
        if report.fails:
            failing = open_breaker(self._database, session, cause=report.cause, waited=report.waited)
            if failing is not None:
                self._events.breaker_opened(report.cause, failing, str(session["member_id"]))
