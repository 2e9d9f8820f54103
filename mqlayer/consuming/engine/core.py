"""What a member's parts share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from mqlayer.consuming.engine.clock import Lease
from mqlayer.consuming.engine.live_settings import LiveSettings
from mqlayer.consuming.engine.options import MemberOptions, new_member_id
from mqlayer.consuming.engine.process_spans import ProcessSpans, process_spans
from mqlayer.groups.group import Group
from mqlayer.metrics import MemberMeters, meters_of
from mqlayer.runtime.error_text import ErrorTexts
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class MemberCore:
    """A member's identity, means, and live settings."""

    runtime: Runtime
    routes: RouteCache
    group: Group
    options: MemberOptions
    settings: LiveSettings
    lease: Lease = field(default_factory=Lease)
    beat: threading.Event = field(default_factory=threading.Event)
    """Set to send a heartbeat soon."""
    meters: MemberMeters | None = None
    """None: metrics are off."""
    spans: ProcessSpans | None = None
    """None: traces are off."""

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        routes: RouteCache,
        group: Group,
        options: MemberOptions | None,
        texts: ErrorTexts | None = None,
    ) -> MemberCore:
        """Return a new member's core; its runtime acts under its id."""
        chosen = options or MemberOptions()
        acting = replace(runtime, actor=chosen.member_id or new_member_id())
        meters = meters_of(runtime.settings)
        # An instance of a broadcast group counts as its group: there may be one per host.
        name = group.name.partition("@")[0]
        of_member = None if meters is None else meters.member(group.topic, name)
        spans = process_spans(runtime.settings, group.topic, name, texts)
        return cls(acting, routes, group, chosen, LiveSettings(group), meters=of_member, spans=spans)

    @property
    def member_id(self) -> str:
        """The member's id."""
        return self.runtime.actor

    @property
    def name(self) -> str:
        """First part of its threads' names."""
        return f"mqlayer-{self.group.name}"
