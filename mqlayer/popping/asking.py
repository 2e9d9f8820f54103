"""Ask partitions for batches in turn, follow what they say, and wait for news of those that had nothing.

One blocking read per node waits for all its partitions: on their logs, but for those where appending makes no
difference, and on the streams that tell when a lane got free. When invisible times end is known from the answers.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.membership.gates import drained_popped, seal_marks
from mqlayer.membership.groups import Group
from mqlayer.membership.popping import renew_pop_epoch
from mqlayer.popping.lines import Lines, call_scripts
from mqlayer.popping.listing import Listing
from mqlayer.popping.messages import PopMessage, Token, message_of
from mqlayer.popping.settling import Settler
from mqlayer.popping.spots import Spot
from mqlayer.postgres.database import Database
from mqlayer.redis.nodes import NodeConnection, raise_for_reply
from mqlayer.redis.partitions import Fenced, Refused
from mqlayer.redis.popping import Drained, Given, Nothing, Wish, receive_command, receive_reply
from mqlayer.routes.cache import RouteCache
from mqlayer.settings import Settings
from mqlayer.topics.nodes import arm_if_allowed

log = logging.getLogger(__name__)

Answer = Given | Nothing | Drained | Fenced | Refused

BLOCK_S: Final = 0.1
"""Longest wait in one read: what a notification changes is seen this late at most."""
MORE_LIMIT: Final = 64
"""How often in a row a partition is asked that has more to look at."""


class Asker:
    """Asks for one group; for one thread at a time, but for `nudge`."""

    def __init__(
        self,
        group: Group,
        listing: Listing,
        lines: Lines,
        settler: Settler,
        *,
        settings: Settings,
        database: Database,
        application: Database,
        routes: RouteCache,
    ) -> None:
        self._group, self._listing, self._lines, self._settler = group, listing, lines, settler
        self._settings, self._database, self._application, self._routes = settings, database, application, routes
        self._turn = 0
        self._news = listing.news
        self.asked = 0

    def nudge(self) -> None:
        """Have the partitions listed anew, beside whatever goes on. For any thread."""
        self._listing.expire()
        self._listing.refresh()

    def again(self, wish: Wish) -> list[PopMessage]:
        """Return what this attempt was given before, in whatever partitions can be asked."""
        self._listing.refresh()
        found: list[PopMessage] = []
        for spot in self._listing.spots:
            try:
                answer = self._ask(spot, wish._replace(only_again=True))
                if isinstance(answer, Given):
                    found += self._messages(spot, answer)
            except MqlayerError as error:
                self._stumbled(spot, error)
        return found

    def ask_all(self, wish: Wish, *, repeat: bool) -> list[PopMessage]:
        """Ask the partitions that it pays to ask, until one gives; return what it gave.

        `repeat`: ask again under attempts that were not answered. Raises what the last of them answered where none at
        all can be asked.
        """
        self._listing.refresh()
        spots = self._listing.spots
        for number in range(len(spots)):
            spot = spots[(self._turn + number) % len(spots)]
            if not spot.is_due(time.monotonic()):
                continue
            try:
                found = self._follow(spot, self._wish_for(spot, wish) if repeat else wish)
                spot.trouble = None
            except MqlayerError as error:
                self._stumbled(spot, error)
                continue
            if found:
                # The next call begins with the next partition: a busy one must not keep the others waiting.
                self._turn = (self._turn + number + 1) % len(spots)
                return found
        return []

    @property
    def trouble(self) -> MqlayerError | None:
        """Why no partition at all can be asked, None where one can."""
        if self._listing.gone is not None:
            return self._listing.gone
        troubles = [spot.trouble for spot in self._listing.spots]
        return troubles[-1] if troubles and all(troubles) else None

    def listen(self, wait_s: float) -> None:
        """Wait for news of partitions that had nothing; with 0, only look."""
        now = time.monotonic()
        spots = self._listing.spots
        if wait_s and (self._news.is_set() or any(spot.is_due(now) for spot in spots)):
            self._news.clear()
            return
        wait_s = min([wait_s, BLOCK_S, *(spot.due_in(now) for spot in spots)])
        asked: list[tuple[NodeConnection, dict[bytes, Spot]]] = []
        for node_id, streams in self._watched(now).items():
            try:
                line = self._lines.to(node_id)
                block = ("BLOCK", max(1, round(wait_s * 1000))) if wait_s else ()
                after = (entry for _, entry in streams.values())
                line.send([("XREAD", "COUNT", 1, *block, "STREAMS", *streams, *after)])
                asked.append((line, {key: spot for key, (spot, _) in streams.items()}))
            except MqlayerError as error:
                self._away(node_id, error)
        for line, of_key in asked:
            try:
                _wake(raise_for_reply(line.receive(1)[0], line.node.address), of_key)
            except MqlayerError as error:
                self._away(line.node.node_id, error)
        if not asked and wait_s:
            self._news.wait(wait_s)
        self._news.clear()

    def _watched(self, now: float) -> dict[NodeId, dict[bytes, tuple[Spot, bytes]]]:
        """Return by node which streams tell of news, of which partition, and behind which entry."""
        by_node: dict[NodeId, dict[bytes, tuple[Spot, bytes]]] = {}
        for spot in self._listing.spots:
            for key, after in spot.watched(now).items():
                by_node.setdefault(spot.one.node, {})[key] = (spot, after)
        return by_node

    def _wish_for(self, spot: Spot, wish: Wish) -> Wish:
        """Ask under the attempt that was not answered, if any: what was given then is ours."""
        before = spot.unanswered
        return wish._replace(attempt_id=before.attempt_id) if before and before.limit <= wish.limit else wish

    def _ask(self, spot: Spot, wish: Wish) -> Answer:
        line = self._lines.to(spot.one.node)
        answer = self._ask_once(line, spot, wish)
        for _ in range(MORE_LIMIT):
            if not isinstance(answer, Nothing) or answer.word != "more":
                break
            answer = self._ask_once(line, spot, wish)
        return answer

    def _ask_once(self, line: NodeConnection, spot: Spot, wish: Wish) -> Answer:
        self.asked += 1
        spot.unanswered = wish
        (reply,) = call_scripts(line, [receive_command(line, spot.place, wish)])
        answer = receive_reply(reply, line.node.address)
        if isinstance(answer, Given):
            failpoint("pop.after_receive")
        spot.unanswered = None
        return answer

    def _follow(self, spot: Spot, wish: Wish) -> list[PopMessage]:
        """Ask a partition, and follow what it says; return what it gave."""
        answer = self._ask(spot, wish)
        if isinstance(answer, Given):
            spot.quiet, spot.woken, spot.refused = None, False, 0
            return self._messages(spot, answer)
        if isinstance(answer, Nothing):
            spot.refused = 0
            spot.hush(answer, time.monotonic())
        elif isinstance(answer, Drained):
            self._say_drained(spot, answer)
        elif isinstance(answer, Fenced):
            self._fenced(spot)
        else:
            # The node lost it, though it is the armed run: re-arming sees to it.
            spot.rest(time.monotonic())
            self._mend(spot.one.node)
        return []

    def _messages(self, spot: Spot, given: Given) -> list[PopMessage]:
        """Return a batch as messages, but for void records, and for those that are to be handled in the successors."""
        found: list[PopMessage] = []
        beyond: list[Token] = []
        void: list[Token] = []
        for record, times in zip(given.records, given.times, strict=True):
            token = Token(spot.place.partition, spot.place.epoch, given.batch, record.offset)
            if spot.one.cut and self._is_cut_off(spot, record):
                beyond.append(token)
            elif record.void:
                void.append(token)
            else:
                found.append(message_of(record, attempt=times, token=token, replay=spot.one.replay))
        if beyond:
            log.warning("records_cut_off", extra={"partition": spot.one.partition, "count": len(beyond)})
        if beyond or void:
            self._settler.settle("ack", [*beyond, *void], handled=False)
        return found

    def _is_cut_off(self, spot: Spot, record: Record) -> bool:
        spot.marks = spot.marks or seal_marks(self._database, spot.one.partition)
        source, lp, seq = record.identity
        return seq > spot.marks.get(f"{source}:{lp}", seq)

    def _say_drained(self, spot: Spot, drained: Drained) -> None:
        """Tell Postgres that a sealed partition is through.

        Where it refuses, soon again: then the seal is not recorded yet, or another epoch is in force.
        """
        place = spot.place
        if drained_popped(self._database, self._group.group_id, place.partition, place.epoch, drained.seal_id):
            log.info("partition_drained", extra={"partition": str(place.partition), "group": self._group.name})
            spot.rest(time.monotonic())
        else:
            spot.put_off(time.monotonic())
        # Its successors may be readable now: who waits for them must not wait for a notice besides.
        self._listing.reread()

    def _fenced(self, spot: Spot) -> None:
        """Look for a higher epoch; where Postgres has none, its node has seen more than it gave out: ask for one."""
        if spot.refused == spot.place.epoch:
            renew_pop_epoch(self._database, self._group.group_id, spot.place.partition, spot.place.epoch)
        spot.refused = spot.place.epoch
        spot.rest_until = time.monotonic() + BLOCK_S / 2
        self._listing.expire()

    def _stumbled(self, spot: Spot, error: MqlayerError) -> None:
        log.warning("receive_waits", extra={"partition": spot.one.partition, "reason": str(error)})
        if isinstance(error, StoreUnavailable):
            self._away(spot.one.node, error)
        else:
            spot.rest(time.monotonic(), error)
        if isinstance(error, NodeNotArmed):
            self._mend(spot.one.node)

    def _away(self, node_id: NodeId, error: MqlayerError) -> None:
        """Leave all partitions of a node alone for a while: each of them would wait for it as long."""
        now = time.monotonic()
        for spot in self._listing.spots:
            if spot.one.node == node_id:
                spot.rest(now, error)

    def _mend(self, node_id: NodeId) -> None:
        """Arm a node that restarted or lost something, unless somebody did. Raises nothing."""
        try:
            arm_if_allowed(
                self._database,
                self._routes.node(node_id).name,
                prefix=self._settings.key_prefix,
                application=self._application,
                actor="receiver",
                unsafe=self._settings.allow_unsafe_redis,
            )
            self._routes.refresh_nodes()
        except MqlayerError as error:
            log.warning("node_not_armed", extra={"node_id": node_id, "reason": str(error)})
        self._listing.expire()


def _wake(found: Any, of_key: dict[bytes, Spot]) -> None:
    """Note which partitions have news."""
    for key, entries in found or ():
        spot = of_key[key]
        spot.woken = True
        if key == spot.log and not entries[0][0].endswith(b"-0"):
            spot.command_seen = True
