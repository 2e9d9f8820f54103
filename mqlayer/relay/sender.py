"""Appends, and the effects of answers on cursors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from mqlayer.domain.durability import NODE
from mqlayer.errors import MqlayerError, NodeOutOfMemory, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger, is_reported
from mqlayer.metrics import Meters
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import (
    LIVE_STATES,
    NO_TERM,
    Refused,
    RunOutcome,
    TermToken,
    append_reply,
    marks_reply,
)
from mqlayer.redis.wire import append_packet, append_start, bulk_number, marks_packet
from mqlayer.relay.backoff import ROUTE_FIRST_S
from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.lp_cursors import LpCursor, LpCursors, RelayBatch, Target, Unsendable
from mqlayer.relay.relay_nodes import AppendRequest, MarksRequest, PendingWrite, RelayNode, RelayNodes
from mqlayer.relay.relay_spans import RelaySpans
from mqlayer.relay.targets import Targets, retarget

log = event_logger(__name__)

ASK_LIMIT_AFTER: Final = 4
"""Refusals after which a full partition's limit is read again."""


class Sender:
    """Appends to partitions, and corrects the cursors.

    `moved`: cursors acknowledged past the recorded seq. `unconfirmed`: those whose topics wait for more. `fallen`:
    cursors whose mark fell below it. `missing`: rows in neither outbox nor Redis. The owner empties these. `ended`:
    nodes refuse the source.
    """

    def __init__(
        self, *, prefix: str, cursors: LpCursors, nodes: RelayNodes, targets: Targets, limits: RelayLimits
    ) -> None:
        self._prefix, self._limits = prefix, limits
        self._cursors, self._nodes, self._targets = cursors, nodes, targets
        self.moved: dict[int, LpCursor] = {}
        self.unconfirmed: dict[Target, dict[LpCursor, int]] = {}
        self.fallen: dict[int, LpCursor] = {}
        self.missing: list[Unsendable] = []
        self.ended = False
        self.appended_count = 0
        self.source_id = 0
        self.meters: Meters | None = None
        self.spans: RelaySpans | None = None
        self._suspects: dict[int, tuple[LpCursor, int, int]] = {}

    @property
    def has_pending(self) -> bool:
        """Whether any answer is outstanding."""
        return any(node.pending_writes for node in self._nodes)

    def send(self, batches: Sequence[RelayBatch]) -> None:
        """Send in one write per node."""
        if not batches:
            return
        by_node: dict[RelayNode, list[RelayBatch]] = {}
        for batch in batches:
            by_node.setdefault(self._nodes.node(batch.target.node_id), []).append(batch)
        failpoint("relay.before_append")
        for node, group in by_node.items():
            requests = [_append_request(batch, self.spans) for batch in group]
            # Its target was ready at planning; the write notices a broken connection.
            packets = (
                [self._append(node.connection, node.token, b) for b in group] if node.connection is not None else []
            )
            if not self._nodes.send(node, packets, requests):
                self._rewind_writes(node)

    def ask_marks(self, nodes: Iterable[RelayNode]) -> None:
        """Request nodes' marks."""
        for node, by_target in _cursors_of(self._cursors, nodes).items():
            if node.connection is None:
                continue
            requests = [MarksRequest(target, cursors) for target, cursors in by_target.items()]
            if not requests:
                node.synced, node.failures = True, 0
            elif not self._nodes.send(
                node,
                [_marks_packet(node.connection, self._prefix, self.source_id, question) for question in requests],
                requests,
            ):
                self._rewind_writes(node)

    def drop_connection(self, node: RelayNode, error: MqlayerError) -> None:
        """Drop a connection; unanswered messages are sent again."""
        self._nodes.drop(node, error)
        self._rewind_writes(node)

    def suspect(self, cursor: LpCursor) -> None:
        """Let the next marks tell whether Redis has the rows after `sent`."""
        self._suspects[cursor.chain] = (cursor, cursor.sent, self._nodes.write_number)
        self._cursors.behind.pop(cursor.chain, None)

    def collect(self, *, allowed: int) -> None:
        """Take answers until each node has at most `allowed` unanswered writes, or stalls."""
        for node in self._nodes:
            while node.pending_writes and node.connection is not None:
                must = len(node.pending_writes) > allowed and not node.stalled
                if not self._take(node, self._limits.stall_s if must else 0.0):
                    node.stalled = node.stalled or must
                    break

    def await_answers(self, wait_s: float) -> None:
        """Take answers, for this time at most."""
        until = time.monotonic() + wait_s
        for node in self._nodes:
            while node.pending_writes and self._take(node, max(0.0, until - time.monotonic())):
                pass

    def _take(self, node: RelayNode, wait_s: float) -> bool:
        try:
            return self._answer(node, wait_s)
        except StoreUnavailable as error:
            self.drop_connection(node, error)
            return True

    def _answer(self, node: RelayNode, wait_s: float) -> bool:
        got = self._nodes.answered(node, wait_s=wait_s)
        if got is None:
            return False
        write, replies = got
        failpoint("relay.after_append")
        try:
            for requests, reply in zip(write.requests, replies, strict=True):
                if isinstance(requests, AppendRequest):
                    self._on_append(node, write, requests, reply)
                else:
                    self._on_marks(node, write, requests, reply)
        except StoreUnavailable:
            node.pending_writes.appendleft(write)
            raise
        if node.connection is not None and any(isinstance(requests, MarksRequest) for requests in write.requests):
            node.synced, node.failures = True, 0
        return True

    def _record(self, write: PendingWrite, append: AppendRequest, error: str) -> None:
        topic = self._targets.name(append.runs[0][0].topic_id)
        if self.spans is not None and append.traced:
            self.spans.appended(topic, write, append, error)
        if self.meters is not None:
            count = sum(count for _, _, count in append.runs)
            self.meters.sent(topic, count, time.monotonic() - write.sent_at, error)

    def _on_append(self, node: RelayNode, write: PendingWrite, append: AppendRequest, reply: Any) -> None:
        try:
            answer = append_reply(reply, node.address)
        except NodeOutOfMemory as error:
            self._record(write, append, type(error).__name__)
            self._wait(append, write.number, "relay_node_out_of_memory", str(error))
            return
        if self.meters is not None or append.traced:
            self._record(write, append, answer.status if isinstance(answer, Refused) else "")
        if isinstance(answer, Refused):
            self._on_refusal(node, append, write.number, answer)
            return
        append.target.pause_count = 0
        if answer.outcomes is None:
            for cursor, first, count in append.runs:
                self.advance(cursor, first + count - 1, append.target)
                self.appended_count += count
            return
        for (cursor, _, _), outcome in zip(append.runs, answer.outcomes, strict=True):
            self._on_outcome(write, append.target, cursor, outcome)

    def _on_outcome(self, write: PendingWrite, target: Target, cursor: LpCursor, outcome: RunOutcome) -> None:
        self.appended_count += outcome.appended
        if outcome.status in ("ok", "dup"):
            self.advance(cursor, outcome.mark, target)
        elif write.number <= cursor.rewound_at:
            # Sent before the rewind: no news.
            return
        elif outcome.status == "gap":
            self._rewind_to(cursor, outcome.mark)
        else:
            self._cursors.rewind(cursor, cursor.acked, self._nodes.write_number)
            self._refresh(target, cursor.topic_id, "unowned")

    def _on_refusal(self, node: RelayNode, append: AppendRequest, write_number: int, refused: Refused) -> None:
        target = append.target
        if refused.status == "full":
            reason = f"it holds its limit of {target.backlog_limit} messages"
            self._wait(append, write_number, "relay_partition_full", reason)
            if target.pause_count % ASK_LIMIT_AFTER == 0:
                self._ask_route(append.runs[0][0].topic_id)
            return
        if refused.status == "too_large":
            raise MqlayerError(f"partition {target.partition} refused a batch of {refused.fact} messages")
        self._send_again(append, write_number)
        if refused.status == "ended":
            self.ended = True
            return
        if refused.status == "stale":
            # It lost our term, or another relay registered an older one: connect anew, register and compare.
            raise StoreUnavailable(node.address, "another term of the outbox's Postgres counts on it")
        self._without(node, target, append.runs[0][0].topic_id, refused.status)

    def _without(self, node: RelayNode, target: Target, topic_id: int, status: str) -> None:
        # An absent partition without a newer route means that the node lost data: have it armed.
        changed = self._refresh(target, topic_id, status)
        if status == "absent" and not changed:
            node.suspect = True
            raise StoreUnavailable(node.address, f"partition {target.partition} is gone from it: the node lost data")

    def _refresh(self, target: Target, topic_id: int, status: str) -> bool:
        changed = self._ask_route(topic_id)
        if not changed:
            wait_s = self._targets.pause(target, time.monotonic(), first_s=ROUTE_FIRST_S)
            facts = {"partition": target.partition, "word": status, "retry_s": round(wait_s, 3)}
            log.info("relay_partition_refused", extra=facts)
        return changed

    def _ask_route(self, topic_id: int) -> bool:
        changed = self._targets.refresh(topic_id)
        if changed:
            retarget(self._cursors, self._targets, {topic_id})
        return changed

    def _wait(self, append: AppendRequest, write_number: int, event: str, reason: str) -> None:
        target = append.target
        self._send_again(append, write_number)
        wait_s = self._targets.pause(target, time.monotonic())
        shown = log.warning if is_reported(target.pause_count) else log.debug
        shown(event, extra={"partition": target.partition, "reason": reason, "retry_s": round(wait_s, 3)})

    def _on_marks(self, node: RelayNode, write: PendingWrite, question: MarksRequest, reply: Any) -> None:
        state, marks = marks_reply(reply, node.address)
        if state not in LIVE_STATES:
            # Absent marks prove nothing: the node lost them, and arming restores them.
            self._without(node, question.target, question.cursors[0].topic_id, state or "absent")
            return
        for cursor, mark in zip(question.cursors, marks, strict=True):
            # The cursor may have another target since the request.
            if cursor.target is not question.target or write.number <= cursor.rewound_at:
                continue
            if mark < cursor.acked:
                self._rewind_to(cursor, mark)
            elif mark > cursor.acked:
                self.advance(cursor, mark, question.target)
            self._judge(cursor, mark, write.number)

    def advance(self, cursor: LpCursor, mark: int, at: Target) -> None:
        """Note that Redis holds messages up to a mark."""
        cursor.advance(mark)
        if at.durability == NODE:
            self.moved[cursor.chain] = cursor
        else:
            self.unconfirmed.setdefault(at, {})[cursor] = mark

    def _judge(self, cursor: LpCursor, mark: int, write_number: int) -> None:
        # Only a mark requested after the suspicion decides whether the rows are gone.
        suspected, seq, at_write = self._suspects.get(cursor.chain, (None, 0, 0))
        if suspected is not cursor or write_number <= at_write:
            return
        del self._suspects[cursor.chain]
        if cursor.chain in self._cursors.behind:
            # A rewind meanwhile makes it read again anyway.
            return
        if mark == seq == cursor.sent:
            self._cursors.block(cursor)
            self.missing.append(Unsendable(cursor, seq + 1, "gone from the outbox, and Redis does not hold it"))
        else:
            self._cursors.fall_behind(cursor)

    def _rewind_to(self, cursor: LpCursor, mark: int) -> None:
        if mark < cursor.acked:
            log.warning("relay_node_lost_data", extra={"lp": cursor.lp, "acked": cursor.acked, "mark": mark})
        if mark < cursor.recorded:
            self.fallen[cursor.chain] = cursor
        self.moved.pop(cursor.chain, None)
        for seqs in self.unconfirmed.values():
            seqs.pop(cursor, None)
        self._cursors.rewind(cursor, mark, self._nodes.write_number)

    def _send_again(self, append: AppendRequest, write_number: int) -> None:
        for cursor, _, _ in append.runs:
            if write_number > cursor.rewound_at:
                self._cursors.rewind(cursor, cursor.acked, self._nodes.write_number)

    def _rewind_writes(self, node: RelayNode) -> None:
        # Unanswered writes are unknown: send them again, once marks are compared.
        for write in node.pending_writes:
            for requests in write.requests:
                if isinstance(requests, AppendRequest):
                    self._send_again(requests, write.number)
        node.pending_writes.clear()

    def _append(self, connection: NodeConnection, token: TermToken, batch: RelayBatch) -> bytes:
        heads: list[bytes] = []
        messages: list[bytes] = []
        for cursor, first, of_cursor in batch.runs:
            heads += (bulk_number(cursor.lp), bulk_number(first), bulk_number(len(of_cursor)))
            messages += of_cursor
        target = batch.target
        digest = connection.digest("log_append")
        start = append_start(
            digest,
            self._prefix,
            target.partition,
            self.source_id,
            target.backlog_limit,
            token if isinstance(token, str) else token.get(target.partition, NO_TERM),
            cluster=connection.is_cluster,
        )
        return append_packet(start, heads, messages, count=batch.count)


def _append_request(batch: RelayBatch, spans: RelaySpans | None) -> AppendRequest:
    runs = [(run.cursor, run.first, len(run.messages)) for run in batch.runs]
    return AppendRequest(batch.target, runs, () if spans is None else spans.facts_of(batch))


def _marks_packet(connection: NodeConnection, prefix: str, source_id: int, question: MarksRequest) -> bytes:
    lps = [cursor.lp for cursor in question.cursors]
    return marks_packet(connection, prefix, question.target.partition, source_id, lps)


def _cursors_of(cursors: LpCursors, nodes: Iterable[RelayNode]) -> dict[RelayNode, dict[Target, list[LpCursor]]]:
    found: dict[RelayNode, dict[Target, list[LpCursor]]] = {node: {} for node in nodes}
    by_node: dict[int, RelayNode] = {node.node_id: node for node in found}
    for cursor in cursors:
        node = by_node.get(cursor.target.node_id)
        # Marks of an uncompared partition say nothing about our rows.
        if node is not None and cursor.target.partition in node.compared:
            found[node].setdefault(cursor.target, []).append(cursor)
    return found
