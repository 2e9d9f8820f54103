"""Bodies that a caller gives as a binary file, or chunk by chunk, to be read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

from mqlayer.domain.large_bodies import BodyReference
from mqlayer.errors import BodyTooLarge, InvalidInput


class BodySource:
    """A body to read once; `size`: bytes read so far. Raises InvalidInput for text, BodyTooLarge over a limit."""

    def __init__(self, topic: str, read: Callable[[int], Any]) -> None:
        self.size = 0
        self._topic, self._read, self._digest = topic, read, sha256()
        self._limit: int | None = None
        # Of an iterator, a chunk may be longer than what was asked for.
        self._kept = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Return so many bytes, fewer at the end."""
        parts: list[memoryview] = []
        while size > 0 and (part := self._kept or memoryview(self._next(size))):
            parts.append(part[:size])
            self._kept = part[size:]
            size -= len(parts[-1])
        return b"".join(parts)

    def put_back(self, data: bytes) -> None:
        """Have the next read begin with what the last one returned."""
        self._kept = memoryview(data + bytes(self._kept))

    def bound(self, limit: int) -> None:
        """Read no more than so many bytes in all."""
        self._limit = limit
        self._check()

    def reference(self, body_id: str) -> BodyReference:
        """Return the reference of the body read."""
        return BodyReference(body_id, self.size, self._digest.hexdigest())

    def _next(self, size: int) -> bytes:
        part = self._read(size)
        if not isinstance(part, bytes | bytearray | memoryview):
            raise InvalidInput(f"a body that is read gives bytes, not {type(part).__name__}: open its file as 'rb'")
        # A view of other items than bytes counts these.
        data = bytes(part)
        self.size += len(data)
        self._check()
        self._digest.update(data)
        return data

    def _check(self) -> None:
        if self._limit is not None and self.size > self._limit:
            raise BodyTooLarge(self._topic, self.size, self._limit)


def source_of(topic: str, body: Any) -> BodySource | None:
    """Return a file or an iterator as a source; None for other bodies."""
    read = getattr(body, "read", None)
    if callable(read) and not isinstance(body, type):
        return BodySource(topic, read)
    if isinstance(body, Iterator):
        # An empty chunk is not the end, as it is a file's.
        return BodySource(topic, lambda _: next((part for part in body if not _is_empty(part)), b""))
    return None


def _is_empty(part: Any) -> bool:
    return isinstance(part, bytes | bytearray | memoryview) and not len(part)
