"""Rules about what must happen: every message is handled, nothing is settled without it, nothing waits for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.proof.evidence import NEVER, Evidence, Flow, Identity, Step, identity
from tests.proof.history import Deliver, Quarantined
from tests.proof.violations import Breach, Violation


def lost(evidence: Evidence, flows: Collection[Flow]) -> Iterator[Violation]:
    """Every message that exists was handled by every group of its topic, or quarantined with a reason.

    A group with fenced effects is judged by its sink: there a message must be.
    """
    done = _done(evidence)
    for group, topic in sorted(flows):
        for of, message in evidence.messages.items():
            if of[0] == topic and of not in done[group]:
                yield Violation(Breach.LOST, f"group {group}: {message}")


def _done(evidence: Evidence) -> Mapping[str, set[Identity]]:
    done: defaultdict[str, set[Identity]] = defaultdict(set)
    for effect in evidence.effects:
        if effect.outcome == "ok" and (effect.event.fenced or effect.event.group not in evidence.fenced_groups):
            done[effect.event.group].add(identity(effect.event))
    for deliver in evidence.delivers:
        if deliver.outcome == "ok" and deliver.event.group not in evidence.fenced_groups:
            done[deliver.event.group].add(identity(deliver.event))
    for aside in evidence.set_asides:
        if aside.possible:
            done[aside.event.group].add(identity(aside.event))
    return done


def acks_without_effect(evidence: Evidence) -> Iterator[Violation]:
    """Whatever is acknowledged was handled, or quarantined, before."""
    done = _first_done(evidence)
    for step in evidence.acks:
        if step.began < done.get((step.event.group, identity(step.event)), NEVER):
            yield Violation(Breach.ACK_WITHOUT_EFFECT, f"group {step.event.group}: {identity(step.event)}")


def _first_done(evidence: Evidence) -> Mapping[tuple[str, Identity], int]:
    done: dict[tuple[str, Identity], int] = {}

    def note(group: str, of: Identity, time: int) -> None:
        done[group, of] = min(done.get((group, of), NEVER), time)

    for deliver in evidence.delivers:
        if deliver.outcome == "ok":
            note(deliver.event.group, identity(deliver.event), deliver.ended)
    for effect in evidence.effects:
        if effect.outcome == "ok":
            # Read from a sink, it has no time, only a place.
            note(effect.event.group, identity(effect.event), effect.began if effect.event.place is None else 0)
    for aside in evidence.set_asides:
        if aside.possible:
            note(aside.event.group, identity(aside.event), aside.began)
    return done


@dataclass
class _Waiting:
    """What one LP has waiting for one group, and since when nothing happened."""

    name: str
    limit_ns: int
    count: int = 0
    quiet_from_ns: int = 0

    def advance(self, now_ns: int, *, healthy: bool) -> Iterator[Violation]:
        """Judge the time since the last change."""
        if self.count and healthy and now_ns - self.quiet_from_ns > self.limit_ns:
            quiet_s = (now_ns - self.quiet_from_ns) / 1e9
            yield Violation(
                Breach.UNSEEN_BACKLOG, f"{self.name}: {self.count} waited and nothing was delivered for {quiet_s:.3f} s"
            )


def unseen_backlog(evidence: Evidence, flows: Collection[Flow], limit_s: float) -> Iterator[Violation]:
    """While all is healthy, an LP with a message not yet delivered sees a delivery every `limit_s` seconds.

    The limit must be above the group's longest backoff and the longest run of a handler.
    """
    for flow in sorted(flows):
        for lp, changes in _changes(evidence, flow).items():
            name = f"group {flow[0]}, topic {flow[1]}, LP {lp}"
            yield from _stalls(_Waiting(name, int(limit_s * 1e9)), [*changes, *_health_changes(evidence)], evidence)


def _changes(evidence: Evidence, flow: Flow) -> Mapping[int, list[tuple[int, str]]]:
    """Return for each LP when messages came, were delivered for the first time, and again."""
    seen: dict[Identity, int] = {}
    changes: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    came: list[Step[Deliver] | Step[Quarantined]] = [*evidence.delivers, *evidence.set_asides]
    for step in sorted(came, key=lambda step: step.began_ns):
        if (step.event.group, step.event.topic) == flow:
            first = identity(step.event) not in seen
            seen.setdefault(identity(step.event), step.began_ns)
            changes[step.event.lp].append((step.began_ns, "first" if first else "again"))
    for of, message in evidence.messages.items():
        if of[0] == flow[1] and message.published is not None:
            # Seen before its publisher knew of its success: it waited for no time at all.
            came_ns = min(message.published.ended_ns, seen.get(of, NEVER))
            changes[of[2]].append((came_ns, "came"))
        elif of in seen:
            changes[of[2]].append((seen[of], "came"))
    return changes


def _health_changes(evidence: Evidence) -> Iterable[tuple[int, str]]:
    return ((step.began_ns, "healthy" if step.event.healthy else "broken") for step in evidence.healths)


def _stalls(waiting: _Waiting, changes: list[tuple[int, str]], evidence: Evidence) -> Iterator[Violation]:
    healthy = True
    # "came" sorts before "first": a message comes before it is delivered at the same time.
    for now_ns, change in [*sorted(changes), (evidence.ended_ns, "end")]:
        if change != "came" or not waiting.count:
            yield from waiting.advance(now_ns, healthy=healthy)
            waiting.quiet_from_ns = now_ns
        if change in {"healthy", "broken"}:
            healthy = change == "healthy"
        waiting.count += {"came": 1, "first": -1}.get(change, 0)
