"""Protocol versions: which code and which schema fit together (docs/design/upgrades.md).

A process knows the versions `least` to `most`, and writes the one in force.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

TOO_OLD: Final = "upgrade mqlayer on this machine"
TOO_NEW: Final = "run `mqlayer upgrade finalize` of the release between"


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The versions that code knows."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class ServedProtocols:
    """The versions that a schema serves.

    `serves_from`: code that ends below is drained and refused; above `in_force` while that goes on. `serves_to`: the
    highest one that `mqlayer migrate` prepared.
    """

    serves_from: int
    in_force: int
    serves_to: int

    def refuses(self, code: ProtocolRange) -> str:
        """Say how code that is refused comes in; empty if it is admitted."""
        if code.most < self.serves_from:
            return TOO_OLD
        return TOO_NEW if code.least > self.in_force else ""

    @property
    def pending(self) -> bool:
        """Whether a version waits to be finalized."""
        return self.in_force < self.serves_to


@dataclass(frozen=True, slots=True)
class Feature:
    """A change of the written form: off before its version is in force in its schema."""

    name: str
    since: int
    schema: Literal["control", "application"]
    text: str


RELEASE: Final = "0.1.0"
"""As `mqlayer.__version__`."""
PROTOCOL: Final = ProtocolRange(1, 2)
"""The versions that this code knows. A release that adds one keeps the one before."""
PRODUCER_TOPICS: Final = Feature(
    "producer-topics",
    since=2,
    schema="control",
    text="direct producers say their topics before the first message; `topic delete` names those that live",
)
POP_KEY_CLASSES: Final = Feature(
    "pop-key-classes",
    since=2,
    schema="control",
    text="groups with ordered pop may have key classes; receivers of the release before know none",
)
DURABILITY: Final = Feature(
    "durability",
    since=2,
    schema="control",
    text="topics may have a durability class; relays and producers of the release before confirm earlier",
)
KEEP_UNTIL_EXPORTED: Final = Feature(
    "keep-until-exported",
    since=2,
    schema="control",
    text="retention may wait for exports; retention and readers of snapshots of the release before know none",
)
REPLAY_EXPORTS: Final = Feature(
    "replay-exports",
    since=2,
    schema="control",
    text="replays may read exports; workers of the release before know none",
)
FEATURES: Final[tuple[Feature, ...]] = (
    PRODUCER_TOPICS,
    POP_KEY_CLASSES,
    DURABILITY,
    KEEP_UNTIL_EXPORTED,
    REPLAY_EXPORTS,
)
"""By version. CONTRIBUTING.md says how one is added."""
