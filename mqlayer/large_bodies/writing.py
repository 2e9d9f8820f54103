"""Store a body before its message: in the caller's transaction, or in S3 with a row in it.

Rolling back leaves nothing in Postgres. In S3 it leaves an object without a row, or an unfinished upload, which the job
removes by age.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Final, NamedTuple
from uuid import uuid4

from mqlayer.domain.large_bodies import CHUNK_BYTES, BodyReference, chunks_of, reference_to
from mqlayer.errors import InvalidInput
from mqlayer.failpoints import failpoint
from mqlayer.large_bodies.object_store import object_store
from mqlayer.large_bodies.options import LargeBodyOptions
from mqlayer.large_bodies.sources import BodySource
from mqlayer.metrics import LARGE_BODY_BYTES
from mqlayer.postgres.caller_connections import Blocking, Statement, Statements
from mqlayer.postgres.queries import query

NO_IDENTITY: Final = (
    "this outbox has no identity yet, which objects in S3 carry: start a relay once, then publish again"
)


OPEN: Final = "00" * 32
"""Stands for the checksum up to the last chunk."""
PART_BYTES: Final = 8_388_608
"""Of an upload; S3 takes 5 MiB or more."""


class StoredBody(NamedTuple):
    """A body to store."""

    topic: str
    reference: BodyReference
    body: bytes
    options: LargeBodyOptions


def stored_body(topic: str, body: bytes, options: LargeBodyOptions) -> StoredBody:
    """Return a body with a new id."""
    return StoredBody(topic, reference_to(str(uuid4()), body), body, options)


def storing_source(
    topic: str, source: BodySource, options: LargeBodyOptions, *, direct: bool = False
) -> Statements[BodyReference]:
    """Store a body as it is read; return its reference. Raises BodyTooLarge, and what its reading raises.

    Then the caller's transaction may have chunks, or a bucket an unfinished upload: no message can name them.
    """
    body_id = str(uuid4())
    source.bound(options.limit)
    if options.store == "s3":
        location = yield from _location(options, body_id)
        parts = iter(lambda: source.read(PART_BYTES), b"")
        yield Blocking(lambda: object_store(options).upload(options.bucket, location, parts))
        failpoint("large_body.after_upload")
        reference = source.reference(body_id)
        yield _statement(topic, reference, direct=direct, bucket=options.bucket, location=location)
    else:
        reference, read = BodyReference(body_id, 0, OPEN), _Reading(source)
        yield Blocking(read)
        for number in count():
            chunk = read.chunk
            yield Blocking(read)
            if not read.chunk:
                reference = source.reference(body_id)
            yield _statement(topic, reference, direct=direct, number=number, data=chunk)
            if not read.chunk:
                break
        failpoint("large_body.after_chunks")
    LARGE_BODY_BYTES.add("written", options.store, reference.size)
    return reference


class _Reading:
    """Reads the next chunk, wherever that may wait."""

    def __init__(self, source: BodySource) -> None:
        self._source, self.chunk = source, b""

    def __call__(self) -> None:
        self.chunk = self._source.read(CHUNK_BYTES)


def storing(stored: StoredBody, *, direct: bool = False) -> Statements[None]:
    """Store a body. `direct`: its message goes past the outbox."""
    if stored.options.store == "s3":
        yield from _uploading(stored, direct=direct)
    else:
        yield from _writing(stored, direct=direct)
    LARGE_BODY_BYTES.add("written", stored.options.store, stored.reference.size)


def _uploading(stored: StoredBody, *, direct: bool) -> Statements[None]:
    options = stored.options
    location = yield from _location(options, stored.reference.body_id)
    # Before the row: one that is committed has its object.
    yield Blocking(lambda: object_store(options).put(options.bucket, location, stored.body))
    failpoint("large_body.after_upload")
    yield _statement(stored.topic, stored.reference, direct=direct, bucket=options.bucket, location=location)


def _location(options: LargeBodyOptions, body_id: str) -> Statements[str]:
    (scope,) = yield Statement(query("large_body_scope"), {}, in_transaction=True)
    if scope is None:
        raise InvalidInput(NO_IDENTITY)
    return f"{options.prefix}{scope}/{body_id}"


def _writing(stored: StoredBody, *, direct: bool) -> Statements[None]:
    for number, data in chunks_of(stored.body):
        yield _statement(stored.topic, stored.reference, direct=direct, number=number, data=bytes(data))
    failpoint("large_body.after_chunks")


def _statement(topic: str, reference: BodyReference, *, direct: bool, **place: Any) -> Statement:
    facts = {
        "topic": topic,
        "body_id": reference.body_id,
        "size": reference.size,
        "sha256": bytes.fromhex(reference.sha256),
        "direct": direct,
    }
    nowhere = {"bucket": None, "location": None, "number": 0, "data": None}
    return Statement(query("large_body_put"), facts | nowhere | place, in_transaction=True)
