"""How much a relay takes at once, and how often it does what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Bounds and intervals of a relay. Its memory depends on these, never on the backlog."""

    chunk_rows: int = 2_000
    """Rows read from the outbox at once."""
    chunk_bytes: int = 4_000_000
    """Bodies read at once; one row more may come on top."""
    max_in_flight: int = 2
    """Writes sent to a node and not answered yet, while the next chunk is read."""
    poll_min_s: float = 0.005
    poll_max_s: float = 0.2
    """Interval of polling: the first after news, doubled up to the second while there are none."""
    progress_s: float = 0.5
    sweep_s: float = 1.0
    """How often the counters are asked for what a scan can't show."""
    compare_s: float = 3.0
    """How often marks are compared with what was acknowledged."""
    heartbeat_s: float = 1.0
    delayed_s: float = 0.25
    """How often delayed messages are looked for at the least; sooner where one is known to be due."""
    topics_s: float = 60.0
    groups_s: float = 2.0
    """How often new groups are looked for, so that the outbox's database knows them by name."""
    stall_s: float = 0.25
    """How long a node may leave all others waiting; after it, its LPs wait alone."""
    late_ids: int = 5_000
    late_s: float = 2.0
    """How many ids, and for how long, are asked for again because their rows were not visible."""
    lps_at_once: int = 64
    """LPs read by seq in one query."""
