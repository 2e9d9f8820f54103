"""A group's settings while its member runs."""

from __future__ import annotations

from mqlayer.consuming.engine.circuit_breaker import CircuitBreaker
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.rate_limiter import RateLimiter
from mqlayer.domain.tags import TagFilter
from mqlayer.domain.time_to_live import Expiry
from mqlayer.groups.group import Group
from mqlayer.groups.members import HeartbeatReply


class LiveSettings:
    """Settings as last heard by the heartbeat, for any thread."""

    def __init__(self, group: Group) -> None:
        self.rules = group.rules
        self.tag_filter = TagFilter.of(group.tag_filter)
        self.may_be_void = group.strategy == "best_effort"
        """Whether the topic may hold void records."""
        self.archived = False
        """Whether the topic is archived; heard before anything is owned."""
        self.expiry: Expiry | None = None
        """Judges messages' ages; heard as `archived`."""
        self.parking_version = 0
        """Count of others' acts on parked keys."""
        self.rate_limiter = RateLimiter()
        self.breaker = CircuitBreaker(lambda: self.rules)

    def follow(self, reply: HeartbeatReply) -> bool:
        """Follow all but the rate; say whether rules changed."""
        changed = reply.rules is not None and reply.rules != self.rules
        if reply.rules is not None:
            self.rules = reply.rules
        # Applies to later reads; fetched records were chosen by the old filter.
        self.tag_filter, self.archived = TagFilter.of(reply.tag_filter), reply.archived
        self.expiry = reply.time_to_live.judged_by(reply.now_ms, clock())
        self.parking_version = reply.parking_version
        return changed
