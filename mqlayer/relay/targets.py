"""Each LP's target, by the newest known routes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from mqlayer.domain.routing import LP_COUNT, Route
from mqlayer.errors import NotFound, StoreUnavailable
from mqlayer.logs import event_logger
from mqlayer.relay.backoff import FIRST_S, backoff_s
from mqlayer.relay.lp_cursors import LpCursor, Target
from mqlayer.relay.relay_nodes import RelayNodes
from mqlayer.runtime.route_cache import RouteCache

log = event_logger(__name__)

NO_NODE: Final = -1
RETRY_UNREACHABLE_S: Final = 0.5
RETRY_REFUSED_S: Final = 5.0


class Targets:
    """All topics' targets. Routes are read at first use and after refusals."""

    def __init__(self, routes: RouteCache, nodes: RelayNodes, ask_names: Callable[[], dict[int, str]]) -> None:
        self._routes, self._nodes, self._ask_names = routes, nodes, ask_names
        self._names: dict[int, str] = {}
        self._by_lp: dict[int, list[Target]] = {}
        self._versions: dict[int, tuple[float, int]] = {}
        self._unrouted: dict[int, Target] = {}
        self._deleted: set[int] = set()
        self._rng = random.Random()

    def __iter__(self) -> Iterator[Target]:
        for targets in self._by_lp.values():
            yield from dict.fromkeys(targets)

    def find(self, chain: int) -> Target:
        """Return an LP's target; while its route is unknown, one never ready."""
        topic_id = chain // LP_COUNT
        known = self._by_lp.get(topic_id)
        if known is None and topic_id not in self._unrouted:
            self._load(topic_id)
            known = self._by_lp.get(topic_id)
        return known[chain % LP_COUNT] if known is not None else self._unrouted[topic_id]

    def name(self, topic_id: int) -> str:
        """Return a topic's name, "" if unread."""
        return self._names.get(topic_id, "")

    def retry_unrouted(self, now: float) -> set[int]:
        """Read missing routes; return topics that now have one."""
        due = [
            topic_id
            for topic_id, target in self._unrouted.items()
            if target.paused_until <= now and topic_id not in self._deleted
        ]
        for topic_id in due:
            self._load(topic_id, refresh=True)
        return {topic_id for topic_id in due if topic_id in self._by_lp}

    def refresh_all(self) -> set[int]:
        """Read all routes and limits; return topics whose version changed."""
        return {topic_id for topic_id in list(self._by_lp) if self.refresh(topic_id)}

    def forget_deleted(self) -> set[int]:
        """Forget topics that the outbox does not have any more; return them."""
        before, self._names = self._names, self._ask_names()
        gone = before.keys() - self._names.keys()
        # An answer that is under way may ask for one again.
        self._deleted |= gone
        for topic_id in gone:
            for known in (self._by_lp, self._versions, self._unrouted):
                known.pop(topic_id, None)
        return gone

    def refresh(self, topic_id: int) -> bool:
        """Read a topic's route; return whether it changed."""
        before = self._versions.get(topic_id)
        self._load(topic_id, refresh=True)
        return self._versions.get(topic_id) != before

    def pause(self, target: Target, now: float, *, first_s: float = FIRST_S) -> float:
        """Pause a target, longer each time; return the seconds."""
        target.pause_count += 1
        wait_s = backoff_s(target.pause_count, self._rng, first_s=first_s)
        target.paused_until, target.ready = now + wait_s, False
        return wait_s

    def set_ready(self, now: float) -> None:
        """Update whether each target takes messages."""
        for target in self:
            self._set_ready(target, now)

    def _load(self, topic_id: int, *, refresh: bool = False) -> None:
        if topic_id not in self._names:
            self._names = self._ask_names()
        name = self._names.get(topic_id)
        if name is None:
            self._refuse(topic_id, f"topic id {topic_id} is not in mqlayer_app.topic")
            return
        try:
            route = self._routes.refresh(name) if refresh else self._routes.route(name)
        except StoreUnavailable as error:
            log.debug("relay_route_unknown", extra={"topic": name, "reason": str(error)})
            self._leave_unrouted(topic_id, "", RETRY_UNREACHABLE_S)
        except NotFound as error:
            self._refuse(topic_id, str(error))
        else:
            self._put(topic_id, route)

    def _put(self, topic_id: int, route: Route) -> None:
        if route.topic_id != topic_id:
            self._refuse(topic_id, f"topic {route.topic!r} has id {route.topic_id} in the control database")
            return
        known = {target.partition: target for target in self._by_lp.get(topic_id, ())}
        by_lp: list[Target] = []
        for part in route.ranges:
            target = known.get(part.partition) or Target(part.partition, part.node, route.backlog_limit)
            target.backlog_limit, target.passes_over = route.backlog_limit, route.best_effort
            target.durability = route.durability
            by_lp += [target] * (part.lp_to - part.lp_from)
            self._set_ready(target, time.monotonic())
        self._by_lp[topic_id], self._versions[topic_id] = by_lp, route.age
        self._unrouted.pop(topic_id, None)

    def _set_ready(self, target: Target, now: float) -> None:
        target.ready = target.paused_until <= now and self._nodes.node(target.node_id).takes(target.partition)

    def _refuse(self, topic_id: int, reason: str) -> None:
        self._by_lp.pop(topic_id, None)
        self._versions.pop(topic_id, None)
        self._leave_unrouted(topic_id, reason, RETRY_REFUSED_S)

    def _leave_unrouted(self, topic_id: int, refusal: str, retry_s: float) -> None:
        if topic_id in self._by_lp:
            return
        target = self._unrouted.setdefault(topic_id, Target(0, NO_NODE, 0))
        target.refusal, target.paused_until = refusal, time.monotonic() + retry_s


def retarget(cursors: Iterable[LpCursor], targets: Targets, topic_ids: set[int]) -> None:
    """Set cursors' targets after route changes."""
    for cursor in cursors:
        if cursor.topic_id in topic_ids:
            cursor.target = targets.find(cursor.chain)
