"""Pure rules that compare Postgres, nodes and archive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from mqlayer.doctor.findings import CheckStatus, Finding
from mqlayer.doctor.verify.expected_state import (
    ExpectedAfter,
    ExpectedBefore,
    ExpectedGroup,
    ExpectedPartition,
    OutboxCounter,
)
from mqlayer.doctor.verify.node_state import NodePartition

REARM: Final = "mqlayer node rearm NAME: it restores the partition by Postgres and the outbox"


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic in all stores. `actual`: None if missing; `rows_kept(lp, after, upto)`: in the outbox."""

    before: ExpectedBefore
    after: ExpectedAfter
    actual: Mapping[int, NodePartition | None]
    rows_kept: Callable[[int, int, int], int]

    def judged(self) -> Iterator[tuple[ExpectedPartition, NodePartition]]:
        """Yield partitions that exist and are not changing."""
        for expected in self.before.partitions:
            actual = self.actual.get(expected.partition)
            if actual is not None and not expected.changing:
                yield expected, actual

    def home_of(self, lp: int) -> tuple[ExpectedPartition, NodePartition] | None:
        """Return an LP's open partition, if judged."""
        at = (one for one in self.judged() if one[0].state == "open" and one[0].lp_from <= lp < one[0].lp_to)
        return next(at, None)


def partition_rule(state: TopicState) -> Iterator[Finding]:
    """A partition has its recorded node, range and state."""
    for expected in state.before.partitions:
        if expected.partition not in state.actual or expected.changing or expected.seal_unreachable:
            continue
        actual = state.actual[expected.partition]
        if actual is None:
            yield _wrong(
                "partition", expected, f"{expected.state} in Postgres, nothing on its node: it lost data", REARM
            )
        elif (actual.topic, actual.lp_from, actual.lp_to) != (state.before.topic, expected.lp_from, expected.lp_to):
            seen = f"its node has topic {actual.topic}, LPs [{actual.lp_from}, {actual.lp_to}) under its number"
            yield _wrong("partition", expected, seen, "another system uses this key prefix: give each its own")
        elif expected.state == "open" and actual.state == "sealed":
            seen = (
                f"open in Postgres, sealed on its node for change {actual.sealed_for}, of which Postgres knows nothing"
            )
            fix = f"it lost that change: mqlayer route reopen {state.before.topic} --yes"
            fix += ", see the page 'Handle a Postgres fail-over'"
            yield _wrong("partition", expected, seen, fix)
        elif actual.state != expected.state:
            yield _wrong("partition", expected, f"{expected.state} in Postgres, {actual.state} on its node", REARM)


def stream_rule(state: TopicState) -> Iterator[Finding]:
    """A stream has all records above the trim position."""
    fix = "somebody removed records by hand: they are in the outbox or the archive, or lost"
    for expected, actual in state.judged():
        if actual.behind > actual.next:
            seen = (
                f"records up to offset {actual.behind - 1}, it tells of {actual.next - 1}: a call ended in its middle"
            )
            yield _wrong("stream", expected, seen, REARM)
        elif actual.first_kept > actual.first and not actual.records:
            yield _wrong("stream", expected, f"it tells of {actual.next - actual.first} records, all are gone", REARM)
        elif actual.first_kept > actual.first:
            yield _wrong(
                "stream", expected, f"it begins at offset {actual.first_kept}, trimming came to {actual.first}", fix
            )
        elif actual.records != actual.next - actual.first_kept:
            seen = f"{actual.records} records at offsets {actual.first_kept} to {actual.next - 1}"
            yield _wrong("stream", expected, seen, fix)
        if actual.records > 0 and not actual.marks:
            yield _wrong("stream", expected, "it has records and no marks: somebody removed these", REARM)
        if actual.lost:
            seen = f"{actual.lost} messages of it were given up by an operator"
            yield Finding(
                "stream", _name(expected), CheckStatus.WARNING, seen, "nothing: mqlayer node rearm --accept-loss did it"
            )


def seal_rule(state: TopicState) -> Iterator[Finding]:
    """A sealed partition has its recorded seal and marks."""
    for expected, actual in state.judged():
        if expected.state != "sealed" or actual.state != "sealed" or expected.seal_unreachable:
            continue
        if actual.seal != expected.seal_id:
            yield _wrong("seal", expected, f"sealed by {actual.seal}, recorded is {expected.seal_id}", REARM)
            continue
        if actual.next != expected.seal_next and not expected.seal_cut:
            seen = f"it ends at offset {actual.next - 1}, recorded is {expected.seal_next - 1}"
            yield _wrong("seal", expected, seen, REARM)
        if not actual.has_command:
            yield _wrong("seal", expected, "its command record is not there: no group can end with it", REARM)
        for name, seq in expected.seal_marks.items():
            mark = actual.marks.get(name)
            # Marks of closed producers are removed some time after their end.
            if mark is not None and (mark < seq or (mark > seq and not expected.seal_cut)):
                yield _wrong("seal", expected, f"mark {name} is {mark}, recorded with the seal is {seq}", REARM)


def marks_rule(state: TopicState) -> Iterator[Finding]:
    """Outbox marks lie between relayed and assigned seqs."""
    source = state.before.source
    if source is None:
        return
    counters = {one.lp: one for one in state.after.counters}
    for expected, actual in state.judged():
        if expected.state != "open":
            continue
        for lp in range(expected.lp_from, expected.lp_to):
            mark = actual.marks.get(f"{source}:{lp}", 0)
            counted = counters.get(lp, OutboxCounter(lp, 0, 0, 0))
            if mark > counted.seq:
                seen = f"LP {lp} has seqs up to {mark}, the outbox gave out {counted.seq}: its database lost commits"
                fix = "see the page 'Handle a Postgres fail-over': these messages are out, their transactions are gone"
                yield _wrong("marks", expected, seen, fix)
            relayed = state.before.relayed.get(lp, 0)
            if mark < relayed:
                yield _behind(state, expected, lp, mark, relayed)


def _behind(state: TopicState, expected: ExpectedPartition, lp: int, mark: int, relayed: int) -> Finding:
    seen = f"LP {lp} has seqs up to {mark}, {relayed} are recorded as relayed: its node fell back"
    if state.rows_kept(lp, mark, relayed) == relayed - mark:
        return Finding(
            "marks", _name(expected), CheckStatus.WARNING, seen, "nothing: the outbox has them, a relay repeats them"
        )
    fix = "the outbox has not all of them any more: mqlayer node rearm NAME --accept-loss lets the LP go on"
    return _wrong("marks", expected, seen, fix)


def outbox_rule(state: TopicState) -> Iterator[Finding]:
    """The outbox has all rows above the relayed seqs."""
    for one in state.after.counters:
        if one.waiting != one.seq - one.relayed:
            seen = f"LP {one.lp}: {one.waiting} rows behind seq {one.relayed}, {one.seq} were given out"
            fix = "rows were removed by hand: the LP waits at the first that is missing"
            yield Finding("outbox", f"topic {state.before.topic}", CheckStatus.BROKEN, seen, fix)


def archive_rule(state: TopicState) -> Iterator[Finding]:
    """The archive is complete, and not ahead of the streams."""
    subject = f"topic {state.before.topic}"
    for expected, actual in state.judged():
        upto = state.before.archive_progress.get(expected.partition, 0)
        if upto > actual.next:
            seen = f"archived up to offset {upto - 1}, the stream ends at {actual.next - 1}: its node fell back"
            yield _wrong("archive", expected, seen, REARM)
        floor = state.after.archive_floor.get(expected.partition)
        if floor is not None and floor < actual.first_kept:
            seen = (
                f"archived up to offset {floor - 1}, the stream begins at {actual.first_kept}: neither has the records "
                "between"
            )
            fix = "its database lost commits, or archiving was off: the next pass notes gaps, mqlayer archive gaps"
            yield _wrong("archive", expected, seen, fix)
    for name, seq in state.before.archive_marks.items():
        at = state.home_of(int(name.split(":")[1]))
        mark = at[1].marks.get(name) if at is not None else None
        if at is not None and mark is not None and mark < seq:
            seen = f"{name} is archived up to {seq}, and in its partition up to {mark}: its node fell back"
            fix = "a relay repeats what an outbox sent; of direct producers the archive alone has it: mqlayer replay"
            verdict = CheckStatus.WARNING if name.startswith(f"{state.before.source}:") else CheckStatus.BROKEN
            yield Finding("archive", _name(at[0]), verdict, seen, fix)
    for name, first, last, records in state.after.archive_breaks:
        seen = f"{name} has {records} records for seqs {first} to {last}"
        yield Finding("archive", subject, CheckStatus.BROKEN, seen, "somebody changed the archive by hand: restore it")


def group_rule(state: TopicState) -> Iterator[Finding]:
    """Positions, drained partitions and epochs are possible."""
    for expected, actual in state.judged():
        for group in state.before.groups.get(expected.partition, ()):
            position = actual.positions.get(group.group_id)
            if position is None:
                continue
            if position.epoch > state.after.epoch:
                seen = f"epoch {position.epoch} is in force, Postgres gave out {state.after.epoch}: it lost commits"
                yield _of_group(expected, group, seen, _FORGOTTEN)
            if position.position > position.next_offset:
                seen = f"it settled up to offset {position.position - 1}, the stream ends at {position.next_offset - 1}"
                yield _of_group(expected, group, seen, f"mqlayer group seek {state.before.topic} {group.name}")
            elif position.position < actual.first_kept:
                seen = (
                    f"it is at offset {position.position}, records below {actual.first_kept} are gone: it has "
                    f"not settled them"
                )
                yield _of_group(expected, group, seen, f"mqlayer replay, where {state.before.topic} is archived")
            if group.drained and position.position < min(expected.seal_next, position.next_offset):
                yield _drained_before(state, expected, group, position.position)


def _drained_before(state: TopicState, expected: ExpectedPartition, group: ExpectedGroup, position: int) -> Finding:
    """Only a warning after an arming: the node lost acks."""
    seen = f"Postgres says that it drained it, it is at offset {position} of {expected.seal_next - 1}"
    if not group.armed_since:
        return _of_group(expected, group, seen, f"mqlayer group seek {state.before.topic} {group.name}")
    fix = "nothing: all of it was handled, and nobody consumes it any more"
    return Finding("group", _subject(expected, group), CheckStatus.WARNING, f"{seen}: its node fell back since", fix)


def chain_rule(state: TopicState) -> Iterator[Finding]:
    """Each chain is dense, from the parents' marks to its own."""
    for expected, actual in state.judged():
        if actual.chains is None:
            continue
        for one in actual.chains.breaks:
            yield _wrong(
                "chain", expected, f"offset {one.offset}: {one.name} goes from {one.before} to {one.seq}", _CHAIN
            )
        for name, (first, last) in actual.chains.ranges.items():
            if actual.marks.get(name, last) < last:
                yield _wrong("chain", expected, f"{name} ends at {last}, its mark is {actual.marks[name]}", _CHAIN)
            begin = expected.came_with.get(name, 0) + 1
            if actual.first_kept == 1 and first != begin and not actual.lost:
                yield _wrong(
                    "chain", expected, f"{name} begins at {first}, its parents left off before {begin}", _CHAIN
                )


_FORGOTTEN: Final = (
    "SELECT mqlayer.server_replaced_v1('{}') in the control database, see the page 'Handle a Postgres fail-over'"
)
_CHAIN: Final = "no script does this: somebody wrote to the node by hand, or it mixes two servers' data"


RULES: Final[Mapping[str, Callable[[TopicState], Iterable[Finding]]]] = {
    "partition": partition_rule,
    "stream": stream_rule,
    "seal": seal_rule,
    "marks": marks_rule,
    "outbox": outbox_rule,
    "archive": archive_rule,
    "group": group_rule,
    "chain": chain_rule,
}


def _name(expected: ExpectedPartition) -> str:
    return f"partition {expected.partition}"


def _wrong(check: str, expected: ExpectedPartition, seen: str, fix: str) -> Finding:
    return Finding(check, _name(expected), CheckStatus.BROKEN, seen, fix)


def _of_group(expected: ExpectedPartition, group: ExpectedGroup, seen: str, fix: str) -> Finding:
    return Finding("group", _subject(expected, group), CheckStatus.BROKEN, seen, fix)


def _subject(expected: ExpectedPartition, group: ExpectedGroup) -> str:
    return f"{group.name}, partition {expected.partition}"
