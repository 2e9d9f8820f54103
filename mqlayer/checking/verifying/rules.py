"""Where two stores say different things of a topic, what that means, and what to do. Pure rules.

Each takes what Postgres said before and after, and what the nodes hold, and yields what does not go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from mqlayer.checking.findings import Finding, Verdict
from mqlayer.checking.verifying.held import Held
from mqlayer.checking.verifying.wanted import After, Before, Counted, WantedGroup, WantedPartition

REARM: Final = "mqlayer node rearm NAME: it brings the partition to what Postgres says, and repeats what the outbox has"


@dataclass(frozen=True, slots=True)
class Asked:
    """A topic as all stores told it. `held`: partitions that may be judged, None where the node has nothing of one;
    `kept`: rows of an LP that the outbox still has, behind one seq and up to another."""

    before: Before
    after: After
    held: Mapping[int, Held | None]
    kept: Callable[[int, int, int], int]

    def judged(self) -> Iterator[tuple[WantedPartition, Held]]:
        """Yield the partitions that are on their nodes and that nothing changes now."""
        for wanted in self.before.partitions:
            held = self.held.get(wanted.partition)
            if held is not None and not wanted.changing:
                yield wanted, held

    def home_of(self, lp: int) -> tuple[WantedPartition, Held] | None:
        """Return the open partition of an LP, where it may be judged."""
        at = (one for one in self.judged() if one[0].state == "open" and one[0].lp_from <= lp < one[0].lp_to)
        return next(at, None)


def partition_rule(asked: Asked) -> Iterator[Finding]:
    """A partition is on its node, with the range and the state that Postgres says."""
    for wanted in asked.before.partitions:
        if wanted.partition not in asked.held or wanted.changing or wanted.seal_away:
            continue
        held = asked.held[wanted.partition]
        if held is None:
            yield _wrong("partition", wanted, f"{wanted.state} in Postgres, nothing on its node: it lost data", REARM)
        elif (held.topic, held.lp_from, held.lp_to) != (asked.before.topic, wanted.lp_from, wanted.lp_to):
            seen = f"its node has topic {held.topic}, LPs [{held.lp_from}, {held.lp_to}) under its number"
            yield _wrong("partition", wanted, seen, "another system uses this key prefix: give each its own")
        elif wanted.state == "open" and held.state == "sealed":
            seen = f"open in Postgres, sealed on its node for change {held.sealed_for}, of which Postgres knows nothing"
            fix = f"it lost that change: mqlayer route reopen {asked.before.topic} --yes"
            fix += ", see docs/how-to/fail-over-postgres.md"
            yield _wrong("partition", wanted, seen, fix)
        elif held.state != wanted.state:
            yield _wrong("partition", wanted, f"{wanted.state} in Postgres, {held.state} on its node", REARM)


def stream_rule(asked: Asked) -> Iterator[Finding]:
    """A stream has a record for every offset from where trimming came to."""
    fix = "somebody removed records by hand: they are in the outbox or the archive, or lost"
    for wanted, held in asked.judged():
        if held.behind > held.next:
            seen = f"records up to offset {held.behind - 1}, it tells of {held.next - 1}: a call ended in its middle"
            yield _wrong("stream", wanted, seen, REARM)
        elif held.kept > held.first and not held.records:
            yield _wrong("stream", wanted, f"it tells of {held.next - held.first} records, all are gone", REARM)
        elif held.kept > held.first:
            yield _wrong("stream", wanted, f"it begins at offset {held.kept}, trimming came to {held.first}", fix)
        elif held.records != held.next - held.kept:
            seen = f"{held.records} records at offsets {held.kept} to {held.next - 1}"
            yield _wrong("stream", wanted, seen, fix)
        if held.records > 0 and not held.marks:
            yield _wrong("stream", wanted, "it has records and no marks: somebody removed these", REARM)
        if held.lost:
            seen = f"{held.lost} messages of it were given up by an operator"
            yield Finding(
                "stream", _name(wanted), Verdict.WARNING, seen, "nothing: mqlayer node rearm --accept-loss did it"
            )


def seal_rule(asked: Asked) -> Iterator[Finding]:
    """A sealed partition is sealed by the very seal that is recorded, with the recorded marks."""
    for wanted, held in asked.judged():
        if wanted.state != "sealed" or held.state != "sealed" or wanted.seal_away:
            continue
        if held.seal != wanted.seal_id:
            yield _wrong("seal", wanted, f"sealed by {held.seal}, recorded is {wanted.seal_id}", REARM)
            continue
        if held.next != wanted.seal_next and not wanted.seal_cut:
            seen = f"it ends at offset {held.next - 1}, recorded is {wanted.seal_next - 1}"
            yield _wrong("seal", wanted, seen, REARM)
        if not held.has_command:
            yield _wrong("seal", wanted, "its command record is not there: no group can end with it", REARM)
        for name, seq in wanted.seal_marks.items():
            mark = held.marks.get(name)
            # Marks of closed producers are removed some time after their end.
            if mark is not None and (mark < seq or (mark > seq and not wanted.seal_cut)):
                yield _wrong("seal", wanted, f"mark {name} is {mark}, recorded with the seal is {seq}", REARM)


def marks_rule(asked: Asked) -> Iterator[Finding]:
    """The marks of the outbox lie between what is recorded as relayed and what was ever given out."""
    source = asked.before.source
    if source is None:
        return
    counters = {one.lp: one for one in asked.after.counters}
    for wanted, held in asked.judged():
        if wanted.state != "open":
            continue
        for lp in range(wanted.lp_from, wanted.lp_to):
            mark = held.marks.get(f"{source}:{lp}", 0)
            counted = counters.get(lp, Counted(lp, 0, 0, 0))
            if mark > counted.seq:
                seen = f"LP {lp} has seqs up to {mark}, the outbox gave out {counted.seq}: its database lost commits"
                fix = "see docs/how-to/fail-over-postgres.md: these messages are out, their transactions are gone"
                yield _wrong("marks", wanted, seen, fix)
            relayed = asked.before.relayed.get(lp, 0)
            if mark < relayed:
                yield _behind(asked, wanted, lp, mark, relayed)


def _behind(asked: Asked, wanted: WantedPartition, lp: int, mark: int, relayed: int) -> Finding:
    seen = f"LP {lp} has seqs up to {mark}, {relayed} are recorded as relayed: its node fell back"
    if asked.kept(lp, mark, relayed) == relayed - mark:
        return Finding(
            "marks", _name(wanted), Verdict.WARNING, seen, "nothing: the outbox has them, a relay repeats them"
        )
    fix = "the outbox has not all of them any more: mqlayer node rearm NAME --accept-loss lets the LP go on"
    return _wrong("marks", wanted, seen, fix)


def outbox_rule(asked: Asked) -> Iterator[Finding]:
    """The outbox has a row for every seq that is not recorded as relayed."""
    for one in asked.after.counters:
        if one.waiting != one.seq - one.relayed:
            seen = f"LP {one.lp}: {one.waiting} rows behind seq {one.relayed}, {one.seq} were given out"
            fix = "rows were removed by hand: the LP waits at the first that is missing"
            yield Finding("outbox", f"topic {asked.before.topic}", Verdict.BROKEN, seen, fix)


def archive_rule(asked: Asked) -> Iterator[Finding]:
    """The archive has no more than the partitions, and of what it has every seq."""
    subject = f"topic {asked.before.topic}"
    for wanted, held in asked.judged():
        upto = asked.before.archive_progress.get(wanted.partition, 0)
        if upto > held.next:
            seen = f"archived up to offset {upto - 1}, the stream ends at {held.next - 1}: its node fell back"
            yield _wrong("archive", wanted, seen, REARM)
        floor = asked.after.archive_floor.get(wanted.partition)
        if floor is not None and floor < held.kept:
            seen = f"archived up to offset {floor - 1}, the stream begins at {held.kept}: neither has what is between"
            fix = "its database lost commits, or archiving was off: the next pass notes gaps, mqlayer archive gaps"
            yield _wrong("archive", wanted, seen, fix)
    for name, seq in asked.before.archive_marks.items():
        at = asked.home_of(int(name.split(":")[1]))
        mark = at[1].marks.get(name) if at is not None else None
        if at is not None and mark is not None and mark < seq:
            seen = f"{name} is archived up to {seq}, and in its partition up to {mark}: its node fell back"
            fix = "a relay repeats what an outbox sent; of direct producers the archive alone has it: mqlayer replay"
            verdict = Verdict.WARNING if name.startswith(f"{asked.before.source}:") else Verdict.BROKEN
            yield Finding("archive", _name(at[0]), verdict, seen, fix)
    for name, first, last, records in asked.after.archive_breaks:
        seen = f"{name} has {records} records for seqs {first} to {last}"
        yield Finding("archive", subject, Verdict.BROKEN, seen, "somebody changed the archive by hand: restore it")


def group_rule(asked: Asked) -> Iterator[Finding]:
    """A group stands within its partition, drained what it is said to have, under an epoch that was given out."""
    for wanted, held in asked.judged():
        for group in asked.before.groups.get(wanted.partition, ()):
            look = held.looks.get(group.group_id)
            if look is None:
                continue
            if look.epoch > asked.after.epoch:
                seen = f"epoch {look.epoch} is in force, Postgres gave out {asked.after.epoch}: it lost commits"
                yield _of_group(wanted, group, seen, _FORGOTTEN)
            if look.position > look.next_offset:
                seen = f"it settled up to offset {look.position - 1}, the stream ends at {look.next_offset - 1}"
                yield _of_group(wanted, group, seen, f"mqlayer group seek {asked.before.topic} {group.name}")
            elif look.position < held.kept:
                seen = f"it is at offset {look.position}, records below {held.kept} are gone: it has not settled them"
                yield _of_group(wanted, group, seen, f"mqlayer replay, where {asked.before.topic} is archived")
            if group.drained and look.position < min(wanted.seal_next, look.next_offset):
                yield _drained_before(asked, wanted, group, look.position)


def _drained_before(asked: Asked, wanted: WantedPartition, group: WantedGroup, position: int) -> Finding:
    """Return what it means that a group stands before the end that it came to. A node that lost acks tells it again."""
    seen = f"Postgres says that it drained it, it is at offset {position} of {wanted.seal_next - 1}"
    if not group.armed_since:
        return _of_group(wanted, group, seen, f"mqlayer group seek {asked.before.topic} {group.name}")
    fix = "nothing: all of it was handled, and nobody consumes it any more"
    return Finding("group", _subject(wanted, group), Verdict.WARNING, f"{seen}: its node fell back since", fix)


def chain_rule(asked: Asked) -> Iterator[Finding]:
    """In each stream every source and LP is a chain, from the parents' marks to the mark."""
    for wanted, held in asked.judged():
        if held.chains is None:
            continue
        for one in held.chains.breaks:
            yield _wrong(
                "chain", wanted, f"offset {one.offset}: {one.name} goes from {one.before} to {one.seq}", _CHAIN
            )
        for name, (first, last) in held.chains.stretches.items():
            if held.marks.get(name, last) < last:
                yield _wrong("chain", wanted, f"{name} ends at {last}, its mark is {held.marks[name]}", _CHAIN)
            begin = wanted.came_with.get(name, 0) + 1
            if held.kept == 1 and first != begin and not held.lost:
                yield _wrong("chain", wanted, f"{name} begins at {first}, its parents left off before {begin}", _CHAIN)


_FORGOTTEN: Final = (
    "SELECT mqlayer.server_replaced_v1('{}') in the control database, see docs/how-to/fail-over-postgres.md"
)
_CHAIN: Final = "no script does this: somebody wrote to the node by hand, or it mixes two servers' data"


RULES: Final[Mapping[str, Callable[[Asked], Iterable[Finding]]]] = {
    "partition": partition_rule,
    "stream": stream_rule,
    "seal": seal_rule,
    "marks": marks_rule,
    "outbox": outbox_rule,
    "archive": archive_rule,
    "group": group_rule,
    "chain": chain_rule,
}
"""By the name under which they report."""


def _name(wanted: WantedPartition) -> str:
    return f"partition {wanted.partition}"


def _wrong(check: str, wanted: WantedPartition, seen: str, fix: str) -> Finding:
    return Finding(check, _name(wanted), Verdict.BROKEN, seen, fix)


def _of_group(wanted: WantedPartition, group: WantedGroup, seen: str, fix: str) -> Finding:
    return Finding("group", _subject(wanted, group), Verdict.BROKEN, seen, fix)


def _subject(wanted: WantedPartition, group: WantedGroup) -> str:
    return f"{group.name}, partition {wanted.partition}"
