"""Bodies as streams, for handlers and receivers: chunk by chunk, never whole in memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final, Self

from mqlayer.arguments import explain

READ_BYTES: Final = 262_144
"""Kept in memory, besides the chunk that is being read."""


class BodyStream(io.BufferedReader):
    """A body as a binary file to read once, from front to end; `size`: its bytes.

    Reads raise MissingBody where it can't be fetched, or at its end has another SHA-256: the last chunk is then not
    returned. So do all later reads. No connection is held between reads.
    """

    def __init__(self, chunks: Iterable[bytes], size: int) -> None:
        super().__init__(_Chunks(iter(chunks)), READ_BYTES)
        self.size = size

    @classmethod
    def of(cls, body: bytes) -> Self:
        """Return a body in memory as a stream."""
        return cls((body,), len(body))


class AsyncBodyStream:
    """As BodyStream, to await; `async for` yields chunks."""

    def __init__(self, chunks: Iterable[bytes], size: int) -> None:
        self._stream, self.size = BodyStream(chunks, size), size

    @classmethod
    def of(cls, body: bytes) -> Self:
        """Return a body in memory as a stream."""
        return cls((body,), len(body))

    @explain
    async def read(self, size: int = -1) -> bytes:
        """Return so many bytes, fewer at the end; -1: all that are left."""
        return await asyncio.to_thread(self._stream.read, size)

    async def close(self) -> None:
        """Read no more."""
        await asyncio.to_thread(self._stream.close)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while chunk := await self.read(READ_BYTES):
            yield chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


STREAMS: Final[tuple[Any, ...]] = (BodyStream, AsyncBodyStream)


class _Chunks(io.RawIOBase):
    """Chunks as a raw file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        super().__init__()
        self._chunks, self._left = chunks, memoryview(b"")
        self._failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = self._next()
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _next(self) -> bytes | None:
        """Return the next chunk. A failed read stays failed: an ended generator would look like the body's end."""
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._chunks, None)
        except Exception as error:
            self._failure = error
            raise
