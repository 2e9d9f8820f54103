"""Names under which messages are parked."""

from __future__ import annotations

from mqlayer.domain.message import NO_KEY, Identity


def own_name(identity: Identity) -> bytes:
    """Return the parking name for a message alone."""
    return NO_KEY + str(identity).encode()


def parked_name(key: bytes, identity: Identity, *, alone: bool) -> bytes:
    """Return the parking name: the key, or the message's own if keyless or `alone`.

    `alone`: an unordered group or best-effort topic. SQL twin: `redrive_messages_put`.
    """
    return own_name(identity) if alone or key == NO_KEY else key
