"""How long it takes after a fault until everything flows again, by the histories."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tests.chaos.harness.nemesis import Struck
from tests.proof.history import Deliver, Publish, Record

SETS: Final = 16
"""LPs are looked at in so many sets: a fault is over when something that was committed after it is handled in each."""
SECOND_NS: Final = 1_000_000_000
EMPTIED: Final = "wipe"
"""The kind of fault that empties a node."""


class Recovery(NamedTuple):
    """How long it took after a fault, and who was last; and whether all that an emptied node had held was being handled
    again then, which takes the longer the more that was."""

    seconds: float
    kind: str
    target: str
    last: str = ""
    refilling: bool = False


def recoveries(records: Iterable[Record], struck: Sequence[Struck]) -> list[Recovery]:
    """Return how long each fault took.

    A recovery lasts from the end of a fault until in every set of LPs, of those to which anything was published within
    the time, a message that was committed after that end was handled by every group.
    """
    flows = _flows(records)
    took = [_recovery(flows, one) for one in struck]
    spans = [(one.ended_ns, one.ended_ns + int(how.seconds * SECOND_NS)) for one, how in zip(struck, took, strict=True)]
    refills = [(one.began_ns, until) for one, (_, until) in zip(struck, spans, strict=True) if one.kind == EMPTIED]
    return [
        how._replace(refilling=any(begun <= until and since <= ended for begun, ended in refills))
        for how, (since, until) in zip(took, spans, strict=True)
    ]


def summary(took: Iterable[Recovery], *, longest: int) -> dict[str, Any]:
    """Return the p50, p99 and longest recovery in seconds, and which faults took longest: of all, and of those that did
    not overlap an emptied node's refilling."""
    all_of_them = list(took)
    otherwise = [one for one in all_of_them if not one.refilling]
    return (
        _times(all_of_them, longest)
        | {"while_refilling": len(all_of_them) - len(otherwise)}
        | {"otherwise": _times(otherwise, longest)}
    )


def _times(took: Iterable[Recovery], longest: int) -> dict[str, Any]:
    falling = sorted(took, reverse=True)
    seconds = [one.seconds for one in falling[::-1]] or [0.0]
    return {
        "p50_s": round(seconds[len(seconds) // 2], 2),
        "p99_s": round(seconds[int(0.99 * (len(seconds) - 1))], 2),
        "longest_s": round(seconds[-1], 2),
        "longest": [f"{one.seconds:.1f} s {one.kind} {one.target}, {one.last}" for one in falling[:longest]],
    }


Flow = tuple[list[int], list[int]]
"""Of one set and group: commits, rising, and the earliest time at which one of these or of a later one was handled."""


def _flows(records: Iterable[Record]) -> dict[tuple[str, int], Flow]:
    committed: dict[tuple[int, int, int], int] = {}
    handled: dict[tuple[str, int, int, int], int] = {}
    for record in records:
        event = record.event
        if record.phase != "ok":
            continue
        if isinstance(event, Publish):
            committed.setdefault((event.source, event.lp, event.seq), record.at_ns)
        elif isinstance(event, Deliver):
            handled.setdefault((event.group, event.source, event.lp, event.seq), record.at_ns)
    return _by_set(committed, handled)


def _by_set(
    committed: Mapping[tuple[int, int, int], int], handled: Mapping[tuple[str, int, int, int], int]
) -> dict[tuple[str, int], Flow]:
    pairs: defaultdict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for (group, source, lp, seq), at in handled.items():
        begun = committed.get((source, lp, seq))
        if begun is not None:
            pairs[group, lp * SETS // 1024].append((begun, at))
    flows: dict[tuple[str, int], Flow] = {}
    for name, of_set in pairs.items():
        of_set.sort()
        earliest, best = [0] * len(of_set), 1 << 62
        for place in range(len(of_set) - 1, -1, -1):
            best = min(best, of_set[place][1])
            earliest[place] = best
        flows[name] = ([begun for begun, _ in of_set], earliest)
    return flows


def _recovery(flows: Mapping[tuple[str, int], Flow], struck: Struck) -> Recovery:
    longest, last = 0, ""
    for (group, number), (commits, earliest) in flows.items():
        place = bisect_left(commits, struck.ended_ns)
        if place < len(commits) and earliest[place] - struck.ended_ns > longest:
            longest = earliest[place] - struck.ended_ns
            last = f"{group} from LP {number * 1024 // SETS}"
    return Recovery(longest / SECOND_NS, struck.kind, struck.target, last)
