"""Dedup ids: publishers' names for messages, to detect repetitions.

An id belongs to its message's key; without a key, to the topic, and it decides the LP. SQL twin: `dedup_token_v1`.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import NO_KEY, Identity
from mqlayer.domain.routing import Lp, lp_of
from mqlayer.errors import InvalidInput

DEDUP_ID_LIMIT: Final = 128
"""Bytes of UTF-8."""
IDS_PER_PARTITION: Final = 100_000
"""More ids push out the oldest before their window ends."""
TOKEN_BYTES: Final = 16


def encode_dedup_id(dedup_id: Any) -> bytes:
    """Return an id's UTF-8. Raises InvalidInput."""
    # Applications may pass any type.
    if not isinstance(dedup_id, str) or not dedup_id or "\0" in dedup_id:
        raise InvalidInput(f"a dedup id is text, not empty and without NUL, not {type(dedup_id).__name__} as given")
    try:
        data = dedup_id.encode()
    except UnicodeEncodeError:
        raise InvalidInput("a dedup id that is not valid Unicode") from None
    if len(data) > DEDUP_ID_LIMIT:
        raise InvalidInput(f"a dedup id of {len(data)} bytes, the limit is {DEDUP_ID_LIMIT}")
    return data


def token_of(key: bytes | None, dedup_id: bytes) -> bytes:
    """Return the stored form of key and id."""
    return sha256((NO_KEY if key is None else key) + b"\xff" + dedup_id).digest()[:TOKEN_BYTES]


def lp_of_unkeyed(dedup_id: bytes) -> Lp:
    """Return a keyless message's LP."""
    return lp_of(dedup_id)


class FirstPosition(NamedTuple):
    """Where the first message with an id is."""

    identity: Identity
    offset: int
    partition: int | None
    """None: the partition asked."""

    @classmethod
    def of(cls, text: bytes) -> FirstPosition | None:
        """Parse log_append_once's answer; None for an unknown id."""
        if not text:
            return None
        lp, source, seq, offset, *partition = map(int, text.split(b":"))
        return cls(Identity(source, lp, seq), offset, partition[0] if partition else None)
