"""The ways in which a history can break the promise, each with its name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Breach(StrEnum):
    """A kind of broken promise; the value is its name in verdicts."""

    LOST = "lost"
    """A message that exists was never handled by a group, and nothing says why."""

    ABORTED = "aborted"
    """A message of a rolled-back publish was appended, delivered, or had an effect."""

    PHANTOM = "phantom"
    """A message that nobody published was appended, delivered, or had an effect."""

    INCONSISTENT = "inconsistent"
    """One identity has two contents, or one position two messages."""

    DUPLICATE_EFFECT = "duplicate_effect"
    """A fenced effect of one message is in the sink twice."""

    DUPLICATE_IN_STREAM = "duplicate_in_stream"
    """One message is at two positions."""

    INVERSION = "inversion"
    """A message was delivered, or had its fenced effect, before one of its key with a lower seq."""

    REAL_TIME_INVERSION = "real_time_inversion"
    """A was published completely before B began to be, and B came first."""

    CHAIN_BREAK = "chain_break"
    """The seqs of a source in an LP, read over all partitions along their lineage, are not 1, 2, 3 and so on."""

    BEHIND_SEAL = "behind_seal"
    """A message stands in a partition behind the command record that closed it."""

    STALE_EFFECT = "stale_effect"
    """A fenced effect has a lower epoch than one before it in its group and LP."""

    STALE_ACK = "stale_ack"
    """An ack begun after a higher epoch had been taken was accepted."""

    BEFORE_GATE = "before_gate"
    """A successor partition was delivered before it was opened, or before its parents were drained or settled."""

    SKIP_WITHOUT_RECORD = "skip_without_record"
    """A later message of a key was delivered, this one never handled, and nothing says why."""

    ACK_WITHOUT_EFFECT = "ack_without_effect"
    """A message was acknowledged that had neither been handled nor quarantined."""

    TWO_OWNERS = "two_owners"
    """Two members held a partition for a group at once, by valid epochs or unexpired leases."""

    REPLAY_OF_SETTLED = "replay_of_settled"
    """A handled message was delivered again after its ack had been accepted."""

    REPLAY_OUT_OF_ORDER = "replay_out_of_order"
    """An owner's deliveries of a key passed over a message that nobody had acknowledged."""

    UNSEEN_BACKLOG = "unseen_backlog"
    """Nothing of an LP was delivered for too long, while a message waited and nothing was broken."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise, in words."""

    breach: Breach
    detail: str

    def __str__(self) -> str:
        return f"{self.breach}: {self.detail}"
