"""Bodies outside of messages: the reference, a header. SQL twin: `large_body_use_v1`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Final, NamedTuple

BODY_HEADER: Final = "mq-body"
BODY_MARK: Final = f'"{BODY_HEADER}":'.encode()
"""In a record's facts where its body is elsewhere."""
CHUNK_BYTES: Final = 262_144
SMALLEST_THRESHOLD: Final = 16_384
LARGEST_LIMIT: Final = 1_000_000_000

_FORM: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}):(\d{1,10}):([0-9a-f]{64})")


class BodyReference(NamedTuple):
    """A stored body. `size`: bytes; `sha256`: hex."""

    body_id: str
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.body_id}:{self.size}:{self.sha256}"


def reference_to(body_id: str, body: bytes) -> BodyReference:
    """Return a body's reference."""
    return BodyReference(body_id, len(body), sha256(body).hexdigest())


def reference_in(text: str) -> BodyReference | None:
    """Parse a header's value; None: malformed."""
    found = _FORM.fullmatch(text)
    return None if found is None else BodyReference(found[1], int(found[2]), found[3])


def chunks_of(body: bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield numbered chunks."""
    view = memoryview(body)
    for number, start in enumerate(range(0, len(body), CHUNK_BYTES)):
        yield number, view[start : start + CHUNK_BYTES]
