"""Limits of a relay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """A relay's bounds and intervals. They bound its memory, whatever the backlog."""

    chunk_rows: int = 2_000
    """Rows per read."""
    chunk_bytes: int = 4_000_000
    """Bytes of bodies per read, exceeded by one row at most."""
    max_in_flight: int = 2
    """Unanswered writes per node."""
    poll_min_s: float = 0.001
    poll_max_s: float = 0.05
    """Polling interval: the first after news, doubled up to the second."""
    progress_s: float = 0.5
    sweep_s: float = 1.0
    """Sweep for rows that the scan missed."""
    compare_s: float = 3.0
    """Comparison of marks with acknowledged seqs."""
    heartbeat_s: float = 1.0
    delayed_s: float = 0.25
    """Maximum interval of releasing delayed messages."""
    topics_s: float = 60.0
    groups_s: float = 2.0
    """Copy of group names to the outbox's database."""
    stall_s: float = 0.25
    """How long a node may hold up others."""
    late_ids: int = 5_000
    late_s: float = 2.0
    """Number and age of ids queried again because their rows were invisible."""
    lps_at_once: int = 64
    """LPs per read by seq."""
