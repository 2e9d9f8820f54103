"""Sending batches to their partitions, and what the answers mean for the lanes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from mqlayer.errors import MqlayerError, NodeOutOfMemory, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.redis.nodes import NodeConnection
from mqlayer.redis.packets import append_packet, bulk_number, marks_packet
from mqlayer.redis.partitions import HELD_STATES, Refused, RunOutcome, append_reply, marks_reply
from mqlayer.relay.lanes import Batch, Lane, Lanes, Target, Unsendable
from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.links import Append, Flight, Link, Links, MarksQuestion
from mqlayer.relay.pauses import ROUTE_FIRST_S
from mqlayer.relay.targets import Targets, retarget

log = logging.getLogger(__name__)

ASK_LIMIT_AFTER: Final = 4
"""After so many refusals of a full partition its limit is asked for again: somebody may have raised it."""


class Sender:
    """Appends to partitions, several writes in flight per node, and keeps the lanes honest.

    `moved` are lanes whose acknowledged seq is past what Postgres was told; `fallen` those whose mark went back;
    `gone` are rows that are neither in the outbox nor in Redis. The owner takes them and empties the collections.
    `ended`: nodes take nothing more of the source.
    """

    def __init__(self, *, prefix: str, lanes: Lanes, links: Links, targets: Targets, limits: RelayLimits) -> None:
        self._prefix, self._limits = prefix, limits
        self._lanes, self._links, self._targets = lanes, links, targets
        self.moved: dict[int, Lane] = {}
        self.fallen: dict[int, Lane] = {}
        self.gone: list[Unsendable] = []
        self.ended = False
        self.appended_count = 0
        self.source_id = 0
        self._suspects: dict[int, tuple[Lane, int, int]] = {}

    @property
    def in_flight(self) -> bool:
        """Whether any answer is awaited."""
        return any(link.flights for link in self._links)

    def send(self, batches: Sequence[Batch]) -> None:
        """Send batches, in one write per node."""
        if not batches:
            return
        by_link: dict[Link, list[Batch]] = {}
        for batch in batches:
            by_link.setdefault(self._links.link(batch.target.node_id), []).append(batch)
        failpoint("relay.before_append")
        for link, group in by_link.items():
            asked = [Append(b.target, [(r.lane, r.first, len(r.messages)) for r in b.runs]) for b in group]
            # The target was ready when the batch was made; a line that broke since is noticed by the write.
            packets = [self._append(link.line, link.token, b) for b in group] if link.line is not None else []
            if not self._links.send(link, packets, asked):
                self._rewind_flights(link)

    def ask_marks(self, links: Iterable[Link]) -> None:
        """Ask nodes for the marks of our lanes: when newly connected, and every few seconds."""
        for link, by_target in self._lanes_of(links).items():
            if link.line is None:
                continue
            asked = [MarksQuestion(target, lanes) for target, lanes in by_target.items()]
            if not asked:
                link.synced, link.failures = True, 0
            elif not self._links.send(link, [self._marks(link.line, question) for question in asked], asked):
                self._rewind_flights(link)

    def give_up(self, link: Link, error: MqlayerError) -> None:
        """Use a line no more: what is under way on it is sent again on another one."""
        self._links.drop(link, error)
        self._rewind_flights(link)

    def suspect(self, lane: Lane) -> None:
        """Rows after what was sent are missing: let the next comparison of marks say whether Redis has them."""
        self._suspects[lane.chain] = (lane, lane.sent, self._links.flight_number)
        self._lanes.behind.pop(lane.chain, None)

    def collect(self, *, allowed: int) -> None:
        """Take answers until every node has at most so many writes unanswered, or has stalled."""
        for link in self._links:
            while link.flights and link.line is not None:
                must = len(link.flights) > allowed and not link.stalled
                try:
                    if not self._answer(link, self._limits.stall_s if must else 0.0):
                        link.stalled = link.stalled or must
                        break
                except StoreUnavailable as error:
                    self.give_up(link, error)

    def _answer(self, link: Link, wait_s: float) -> bool:
        """Take one answer, if it comes within the time."""
        got = self._links.answered(link, wait_s=wait_s)
        if got is None:
            return False
        flight, replies = got
        failpoint("relay.after_append")
        try:
            for asked, reply in zip(flight.asked, replies, strict=True):
                if isinstance(asked, Append):
                    self._on_append(link, flight, asked, reply)
                else:
                    self._on_marks(link, flight, asked, reply)
        except StoreUnavailable:
            link.flights.appendleft(flight)
            raise
        if link.line is not None and any(isinstance(asked, MarksQuestion) for asked in flight.asked):
            link.synced, link.failures = True, 0
        return True

    def _on_append(self, link: Link, flight: Flight, append: Append, reply: Any) -> None:
        try:
            answer = append_reply(reply, link.address)
        except NodeOutOfMemory as error:
            self._wait(append, flight.number, "relay_node_out_of_memory", str(error))
            return
        if isinstance(answer, Refused):
            self._on_refusal(link, append, flight.number, answer)
            return
        append.target.pause_count = 0
        if answer.outcomes is None:
            for lane, first, count in append.runs:
                self.advance(lane, first + count - 1)
                self.appended_count += count
            return
        for (lane, _, _), outcome in zip(append.runs, answer.outcomes, strict=True):
            self._on_outcome(flight, append.target, lane, outcome)

    def _on_outcome(self, flight: Flight, target: Target, lane: Lane, outcome: RunOutcome) -> None:
        self.appended_count += outcome.appended
        if outcome.word in ("ok", "dup"):
            self.advance(lane, outcome.mark)
        elif flight.number <= lane.rewound_at:
            # Sent before the lane was rewound: nothing new.
            return
        elif outcome.word == "gap":
            self._back_to(lane, outcome.mark)
        else:
            self._lanes.rewind(lane, lane.acked, self._links.flight_number)
            self._refresh(target, lane.topic_id, "unowned")

    def _on_refusal(self, link: Link, append: Append, flight_number: int, refused: Refused) -> None:
        target = append.target
        if refused.word == "full":
            reason = f"it holds its limit of {target.backlog_limit} messages"
            self._wait(append, flight_number, "relay_partition_full", reason)
            if target.pause_count % ASK_LIMIT_AFTER == 0:
                self._ask_route(append.runs[0][0].topic_id)
            return
        if refused.word == "toolarge":
            raise MqlayerError(f"partition {target.partition} refused a batch of {refused.fact} messages")
        self._send_again(append, flight_number)
        if refused.word == "ended":
            self.ended = True
            return
        if refused.word == "stale":
            # It lost what it was told, or a relay said an older term late: say ours again, and compare.
            raise StoreUnavailable(link.address, "another term of the outbox's Postgres counts on it")
        self._without(link, target, append.runs[0][0].topic_id, refused.word)

    def _without(self, link: Link, target: Target, topic_id: int, word: str) -> None:
        """Go by a newer route; where that names the same partition, and the node does not have it, have it armed."""
        changed = self._refresh(target, topic_id, word)
        if word == "absent" and not changed:
            link.suspect = True
            raise StoreUnavailable(link.address, f"partition {target.partition} is gone from it: the node lost data")

    def _refresh(self, target: Target, topic_id: int, word: str) -> bool:
        """Ask for a newer route; where there is none yet, leave the target alone for a while."""
        changed = self._ask_route(topic_id)
        if not changed:
            wait_s = self._targets.pause(target, time.monotonic(), first_s=ROUTE_FIRST_S)
            facts = {"partition": target.partition, "word": word, "retry_s": round(wait_s, 3)}
            log.info("relay_partition_refused", extra=facts)
        return changed

    def _ask_route(self, topic_id: int) -> bool:
        """Ask for a topic's route and limits as they are now; say whether its version is another one."""
        changed = self._targets.refresh(topic_id)
        if changed:
            retarget(self._lanes, self._targets, {topic_id})
        return changed

    def _wait(self, append: Append, flight_number: int, event: str, reason: str) -> None:
        """Leave a partition alone for a while; its lanes go on from what it has."""
        target = append.target
        self._send_again(append, flight_number)
        wait_s = self._targets.pause(target, time.monotonic())
        shown = log.warning if target.pause_count in (1, 5) or target.pause_count % 30 == 0 else log.debug
        shown(event, extra={"partition": target.partition, "reason": reason, "retry_s": round(wait_s, 3)})

    def _on_marks(self, link: Link, flight: Flight, question: MarksQuestion, reply: Any) -> None:
        state, marks = marks_reply(reply, link.address)
        if state not in HELD_STATES:
            # Marks that are not there say nothing: its node lost it, and whoever arms that brings them back.
            self._without(link, question.target, question.lanes[0].topic_id, state or "absent")
            return
        for lane, mark in zip(question.lanes, marks, strict=True):
            # Between question and answer the lane may have got another partition.
            if lane.target is not question.target or flight.number <= lane.rewound_at:
                continue
            if mark < lane.acked:
                self._back_to(lane, mark)
            elif mark > lane.acked:
                self.advance(lane, mark)
            self._judge(lane, mark, flight.number)

    def advance(self, lane: Lane, mark: int) -> None:
        """Note that Redis holds a lane up to a mark."""
        lane.advance(mark)
        self.moved[lane.chain] = lane

    def _judge(self, lane: Lane, mark: int, flight_number: int) -> None:
        """Decide on rows that were missing, where the mark was asked for since: they are gone, or it moved on."""
        suspected, seq, at_flight = self._suspects.get(lane.chain, (None, 0, 0))
        if suspected is not lane or flight_number <= at_flight:
            return
        del self._suspects[lane.chain]
        if lane.chain in self._lanes.behind:
            # It was rewound meanwhile and is read again anyway.
            return
        if mark == seq == lane.sent:
            self._lanes.hold(lane)
            self.gone.append(Unsendable(lane, seq + 1, "gone from the outbox, and Redis does not hold it"))
        else:
            self._lanes.fall_behind(lane)

    def _back_to(self, lane: Lane, mark: int) -> None:
        if mark < lane.acked:
            log.warning("relay_node_fell_back", extra={"lp": lane.lp, "acked": lane.acked, "mark": mark})
        if mark < lane.recorded:
            self.fallen[lane.chain] = lane
        self.moved.pop(lane.chain, None)
        self._lanes.rewind(lane, mark, self._links.flight_number)

    def _send_again(self, append: Append, flight_number: int) -> None:
        """Rewind the lanes of an append, but for those that were rewound since it was sent."""
        for lane, _, _ in append.runs:
            if flight_number > lane.rewound_at:
                self._lanes.rewind(lane, lane.acked, self._links.flight_number)

    def _rewind_flights(self, link: Link) -> None:
        """Take everything that was under way on a line as unknown: it is sent again after the marks are compared."""
        for flight in link.flights:
            for asked in flight.asked:
                if isinstance(asked, Append):
                    self._send_again(asked, flight.number)
        link.flights.clear()

    def _append(self, line: NodeConnection, token: str, batch: Batch) -> bytes:
        heads: list[bytes] = []
        messages: list[bytes] = []
        for lane, first, of_lane in batch.runs:
            heads += (bulk_number(lane.lp), bulk_number(first), bulk_number(len(of_lane)))
            messages += of_lane
        target = batch.target
        return append_packet(
            line,
            self._prefix,
            target.partition,
            self.source_id,
            heads,
            messages,
            count=batch.count,
            backlog=target.backlog_limit,
            term=token,
        )

    def _marks(self, line: NodeConnection, question: MarksQuestion) -> bytes:
        lps = [lane.lp for lane in question.lanes]
        return marks_packet(line, self._prefix, question.target.partition, self.source_id, lps)

    def _lanes_of(self, links: Iterable[Link]) -> dict[Link, dict[Target, list[Lane]]]:
        found: dict[Link, dict[Target, list[Lane]]] = {link: {} for link in links}
        by_node: dict[int, Link] = {link.node_id: link for link in found}
        for lane in self._lanes:
            link = by_node.get(lane.target.node_id)
            # Of a partition that is not compared a mark says nothing of our rows.
            if link is not None and lane.target.partition in link.compared:
                found[link].setdefault(lane.target, []).append(lane)
        return found
