"""Store a body before its message: in the caller's transaction, or in S3 with a row in it.

Rolling back leaves nothing in Postgres. In S3 it leaves an object without a row, which the job removes by age.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from uuid import uuid4

from mqlayer.domain.large_bodies import BodyReference, chunks_of, reference_to
from mqlayer.errors import InvalidInput
from mqlayer.failpoints import failpoint
from mqlayer.large_bodies.object_store import object_store
from mqlayer.large_bodies.options import LargeBodyOptions
from mqlayer.metrics import LARGE_BODY_BYTES
from mqlayer.postgres.caller_connections import Blocking, Statement, Statements
from mqlayer.postgres.queries import query

NO_IDENTITY: Final = (
    "this outbox has no identity yet, which objects in S3 carry: start a relay once, then publish again"
)


class StoredBody(NamedTuple):
    """A body to store."""

    topic: str
    reference: BodyReference
    body: bytes
    options: LargeBodyOptions


def stored_body(topic: str, body: bytes, options: LargeBodyOptions) -> StoredBody:
    """Return a body with a new id."""
    return StoredBody(topic, reference_to(str(uuid4()), body), body, options)


def storing(stored: StoredBody, *, direct: bool = False) -> Statements[None]:
    """Store a body. `direct`: its message goes past the outbox."""
    if stored.options.store == "s3":
        yield from _uploading(stored, direct=direct)
    else:
        yield from _writing(stored, direct=direct)
    LARGE_BODY_BYTES.add("written", stored.options.store, stored.reference.size)


def _uploading(stored: StoredBody, *, direct: bool) -> Statements[None]:
    (scope,) = yield Statement(query("large_body_scope"), {}, in_transaction=True)
    if scope is None:
        raise InvalidInput(NO_IDENTITY)
    options = stored.options
    location = f"{options.prefix}{scope}/{stored.reference.body_id}"
    # Before the row: one that is committed has its object.
    yield Blocking(lambda: object_store(options).put(options.bucket, location, stored.body))
    failpoint("large_body.after_upload")
    yield _statement(stored, direct=direct, bucket=options.bucket, location=location)


def _writing(stored: StoredBody, *, direct: bool) -> Statements[None]:
    for number, data in chunks_of(stored.body):
        yield _statement(stored, direct=direct, number=number, data=bytes(data))
    failpoint("large_body.after_chunks")


def _statement(stored: StoredBody, *, direct: bool, **place: Any) -> Statement:
    reference = stored.reference
    facts = {
        "topic": stored.topic,
        "body_id": reference.body_id,
        "size": reference.size,
        "sha256": bytes.fromhex(reference.sha256),
        "direct": direct,
    }
    nowhere = {"bucket": None, "location": None, "number": 0, "data": None}
    return Statement(query("large_body_put"), facts | nowhere | place, in_transaction=True)
