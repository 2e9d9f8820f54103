"""Attach topics and groups to the application database."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mqlayer.errors import MqlayerError
from mqlayer.logs import event_logger
from mqlayer.relay.backoff import Interval
from mqlayer.relay.limits import RelayLimits
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.topics import attach_groups, attach_topics

log = event_logger(__name__)


class Attachments:
    """`attached` runs once topics are attached, in the session's thread."""

    def __init__(
        self, runtime: Runtime, limits: RelayLimits, background: ThreadPoolExecutor, attached: Callable[[], None]
    ) -> None:
        self._runtime, self._background, self._attached = runtime, background, attached
        self._attaching: Future[int] | None = None
        self._naming: Future[None] | None = None
        self._topics, self._groups = Interval(limits.topics_s), Interval(limits.groups_s)

    def begin_topics(self, now: float) -> None:
        """Count the topics' interval from now."""
        self._topics.due(now)

    def attach_first(self, now: float) -> None:
        """Attach all topics, in this thread."""
        attach_topics(self._runtime)
        # `attach_topics` also names groups.
        self._groups.due(now)

    def attach(self, now: float) -> None:
        """Take the last results; start due work."""
        if self._attaching is not None and self._attaching.done():
            error, self._attaching = self._attaching.exception(), None
            if error is None:
                self._attached()
            else:
                log.warning("relay_attach_failed", extra={"reason": str(error)})
        if self._attaching is None and self._topics.due(now):
            self._attaching = self._background.submit(attach_topics, self._runtime)
        if (self._naming is None or self._naming.done()) and self._groups.due(now):
            self._naming = self._background.submit(self._name_groups)

    def _name_groups(self) -> None:
        # The fence refuses members of groups that the application database does not know.
        try:
            attach_groups(self._runtime)
        except MqlayerError as error:
            log.warning("relay_attach_failed", extra={"reason": str(error)})
