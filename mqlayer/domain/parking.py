"""Under which names messages are parked, and how people name a message."""

from __future__ import annotations

import re
from typing import Final

from mqlayer.domain.message import NO_KEY, Identity
from mqlayer.errors import InvalidInput

_IDENTITY: Final = re.compile(r"(\d{1,9}):(\d{1,4}):(\d{1,18})")


def own_name(identity: Identity) -> bytes:
    """Return the name under which a message that stands alone is parked: only it waits there."""
    return NO_KEY + str(identity).encode()


def parked_name(key: bytes, identity: Identity, *, alone: bool) -> bytes:
    """Return the name under which a message is parked: its key, or its own where it stands alone.

    `alone`: no message of its group waits for another: the group is not ordered, or its topic is best-effort. The query
    `redrive_messages_put` makes the same names.
    """
    return own_name(identity) if alone or key == NO_KEY else key


def parse_identity(text: str) -> Identity:
    """Return the identity that people write as source:lp:seq. Raises InvalidInput."""
    match = _IDENTITY.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text!r} names no message: say its source:lp:seq, such as 3:512:17")
    source, lp, seq = map(int, match.groups())
    return Identity(source, lp, seq)
