"""Verdicts of rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mqlayer.autopilot.auto_topics import AutoCluster, AutoTopic
from mqlayer.domain.route_changes import ChangeKind
from mqlayer.domain.routing import NodeId


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change that a rule wants.

    `points`: LPs of a split, none: its load is not sampled yet; `node`: of a move; `share`: the foretold part of the
    heaviest successor in the parents' load.
    """

    kind: ChangeKind
    partitions: tuple[int, ...]
    reason: str
    points: tuple[int, ...] = ()
    node: NodeId | None = None
    share: float = 1.0

    @property
    def grows_by(self) -> int:
        """Partitions that it adds."""
        return len(self.points) if self.kind == "split" else 1 - len(self.partitions)


@dataclass(frozen=True, slots=True)
class RefusedChange:
    """A change that would not help. `alarm`: an operator should know."""

    kind: ChangeKind
    partitions: tuple[int, ...]
    reason: str
    key: str | None = None
    lp: int | None = None
    alarm: bool = False


Verdict = Proposal | RefusedChange
AutoRule = Callable[[AutoTopic, AutoCluster], Iterable[Verdict]]
"""Yields verdicts, the most urgent first. Pure."""


@dataclass(frozen=True, slots=True)
class AutoDecision:
    """What a pass does with a topic. `waits`: why the first wanted change is not made now."""

    chosen: Proposal | None = None
    wanted: Proposal | None = None
    waits: str = ""
    refused: tuple[RefusedChange, ...] = ()
