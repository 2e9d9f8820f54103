"""What of a group waits or ended outside of Redis: parked keys, dead messages, failed attempts, as owners write it."""

from mqlayer.parking.ledger import (
    BATCH,
    AttemptNote,
    Burial,
    DeathCause,
    KeyEntry,
    KeyRef,
    KeyState,
    Ledger,
    Loaded,
    NotOwner,
    Page,
    ParkCause,
    Turn,
    Written,
    tried,
)

__all__ = [
    "BATCH",
    "AttemptNote",
    "Burial",
    "DeathCause",
    "KeyEntry",
    "KeyRef",
    "KeyState",
    "Ledger",
    "Loaded",
    "NotOwner",
    "Page",
    "ParkCause",
    "Turn",
    "Written",
    "tried",
]
