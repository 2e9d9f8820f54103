"""Under which names messages are parked."""

from __future__ import annotations

from mqlayer.domain.message import NO_KEY, Identity


def own_name(identity: Identity) -> bytes:
    """Return the name under which a message that stands alone is parked: only it waits there."""
    return NO_KEY + str(identity).encode()


def parked_name(key: bytes, identity: Identity, *, alone: bool) -> bytes:
    """Return the name under which a message is parked: its key, or its own where it stands alone.

    `alone`: no message of its group waits for another: the group is not ordered, or its topic is best-effort. The query
    `redrive_messages_put` makes the same names.
    """
    return own_name(identity) if alone or key == NO_KEY else key
