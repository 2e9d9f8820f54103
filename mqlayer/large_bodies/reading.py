"""Fetch bodies by their references."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from typing import Final, TypeVar

from mqlayer.domain.body_streams import AsyncBodyStream, BodyStream
from mqlayer.domain.large_bodies import CHUNK_BYTES, BodyReference
from mqlayer.domain.message import Record
from mqlayer.errors import MissingBody
from mqlayer.large_bodies.object_store import object_store
from mqlayer.large_bodies.options import LargeBodyOptions
from mqlayer.metrics import LARGE_BODY_BYTES
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

RANGE_BYTES: Final = 4_194_304
"""Of an object, asked for at once."""
READ_CHUNKS: Final = 8
"""Of a body in Postgres, asked for at once: 2 MiB, twice in memory while an answer is decoded."""
RESERVED_BYTES: Final = 16_777_216
"""Of a whole body, at once; a longer one's buffer grows, since its size is only what a header says."""
Stream = TypeVar("Stream", BodyStream, AsyncBodyStream)
Chunk = tuple[int, str | None, str, bytes | None]
"""A row: its number, its body's bucket and location, its bytes."""


class BodyReader:
    """Fetches bodies for a process. Thread-safe. Raises MissingBody and the stores' errors."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def fetch(self, reference: BodyReference) -> bytes:
        """Return a body, by its digest whole."""
        # One buffer: chunks to join would take the size twice, and fresh pages of the system for each body.
        body = BytesIO()
        body.seek(max(0, min(reference.size, RESERVED_BYTES) - 1))
        body.write(b"0")
        body.seek(0)
        body.writelines(self.chunks(reference))
        body.truncate()
        return body.getvalue()

    def filled(self, record: Record) -> Record:
        """Return a record with its large body."""
        reference = record.large_body
        return record if reference is None else record.with_body(self.fetch(reference))

    def opened(self, reference: BodyReference) -> BodyStream:
        """Return a body as a stream; its first read fetches."""
        return BodyStream(self.chunks(reference), reference.size)

    def stream_of(self, kind: type[Stream], record: Record) -> Stream:
        """Return a record's body as a stream of a kind."""
        reference = record.large_body
        return kind.of(record.body) if reference is None else kind(self.chunks(reference), reference.size)

    def chunks(self, reference: BodyReference) -> Iterator[bytes]:
        """Yield a body's bytes in order; raise in place of the last ones where they aren't the body's."""
        digest, left = sha256(), reference.size
        for store, chunk in self._chunks(reference):
            digest.update(chunk)
            left -= len(chunk)
            if left < 0 or (left == 0 and digest.hexdigest() != reference.sha256):
                break
            LARGE_BODY_BYTES.add("read", store, len(chunk))
            yield chunk
        else:
            if left == 0:
                return
        raise MissingBody(reference.body_id, "its bytes are not those that were published")

    def _chunks(self, reference: BodyReference) -> Iterator[tuple[str, bytes]]:
        count = max(1, -(-reference.size // CHUNK_BYTES))
        for first in range(0, count, READ_CHUNKS):
            rows = self._read(reference, first, min(first + READ_CHUNKS, count) - 1)
            while rows:
                number, bucket, location, data = rows.popleft()
                if bucket is not None:
                    for found in self._ranges(reference, bucket, location):
                        yield "s3", found
                    return
                if data is None:
                    raise MissingBody(reference.body_id, f"chunk {number} is gone")
                yield "postgres", data

    def _ranges(self, reference: BodyReference, bucket: str, location: str) -> Iterator[bytes]:
        """Ask for ranges one by one: a slow handler holds no connection, and each is tried again by itself."""
        store = object_store(LargeBodyOptions.of(self._runtime.settings))
        for start in range(0, reference.size, RANGE_BYTES):
            found = store.get(bucket, location, start, RANGE_BYTES)
            if found is None:
                raise MissingBody(
                    reference.body_id, f"bucket {bucket} has no object {location} of {reference.size} bytes"
                )
            yield found

    def _read(self, reference: BodyReference, first: int, last: int) -> deque[Chunk]:
        application = self._runtime.application
        if application is None:
            raise MissingBody(reference.body_id, "this process has no way to the outbox's database")
        facts = {"body_id": reference.body_id, "first": first, "last": last}
        with application.connection() as connection:
            # As text, bytes are twice as many, and have to be decoded.
            rows = deque(connection.execute(query("large_body_read"), facts, binary=True))
        if not rows:
            raise MissingBody(reference.body_id, f"{application.address} has no such body")
        return rows
