"""Fetch bodies by their references."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import count

from mqlayer.domain.large_bodies import CHUNK_BYTES, BodyReference
from mqlayer.domain.message import Record
from mqlayer.errors import MissingBody
from mqlayer.large_bodies.object_store import object_store
from mqlayer.large_bodies.options import LargeBodyOptions
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime


class BodyReader:
    """Fetches bodies for a process. Thread-safe. Raises MissingBody and the stores' errors."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def fetch(self, reference: BodyReference) -> bytes:
        """Return a body, by its digest whole."""
        return b"".join(self.chunks(reference))

    def filled(self, record: Record) -> Record:
        """Return a record with its large body."""
        reference = record.large_body
        return record if reference is None else record.with_body(self.fetch(reference))

    def chunks(self, reference: BodyReference) -> Iterator[bytes]:
        """Yield a body's bytes in order; raise at the end where they aren't the body's."""
        digest, size = sha256(), 0
        for chunk in self._chunks(reference):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
        if size != reference.size or digest.hexdigest() != reference.sha256:
            raise MissingBody(reference.body_id, "its bytes are not those that were published")

    def _chunks(self, reference: BodyReference) -> Iterator[bytes]:
        left = reference.size
        for number in count():
            bucket, location, data = self._read(reference, number)
            if bucket is not None:
                options = LargeBodyOptions.of(self._runtime.settings)
                found = object_store(options).get(bucket, location)
                if found is None:
                    raise MissingBody(reference.body_id, f"bucket {bucket} has no object {location}")
                yield found
                return
            if data is None:
                raise MissingBody(reference.body_id, f"chunk {number} is gone")
            yield bytes(data)
            left -= CHUNK_BYTES
            if left <= 0:
                return

    def _read(self, reference: BodyReference, number: int) -> tuple[str | None, str, bytes | None]:
        application = self._runtime.application
        if application is None:
            raise MissingBody(reference.body_id, "this process has no way to the outbox's database")
        facts = {"body_id": reference.body_id, "number": number}
        with application.connection() as connection:
            row = connection.execute(query("large_body_read"), facts).fetchone()
        if row is None:
            raise MissingBody(reference.body_id, f"{application.address} has no such body")
        return row[0], row[1], row[2]
