"""Tasks: each claims its job and calls the library. Idempotent, safe to run twice at once, ids only."""

from __future__ import annotations

from mqlayer.changes import bring_back_nodes, finish_changes, retire_partitions
from mqlayer.outbox import rotate
from mqlayer.relay import relay_once
from mqlayer.trimming import clean_fence, drop_closed_marks, trim_pass
from mqlayer.workers import schedule
from mqlayer.workers.app import app
from mqlayer.workers.claims import claimed
from mqlayer.workers.stores import application, control, settings


@app.task(name=schedule.RELAY.task)
def relay() -> None:
    """Relay what waits in LPs whose relays died."""
    if claimed(control(), schedule.RELAY):
        relay_once(settings(), at_most_s=schedule.RELAY.every_s)


@app.task(name=schedule.TRIM.task)
def trim() -> None:
    """Drop records that every group has settled."""
    if claimed(control(), schedule.TRIM):
        trim_pass(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)


@app.task(name=schedule.ROTATE_OUTBOX.task)
def rotate_outbox() -> None:
    """Empty the outbox's slots of time that are in Redis as a whole."""
    if claimed(control(), schedule.ROTATE_OUTBOX):
        rotate(application())


@app.task(name=schedule.CLEAN_FENCE.task)
def clean_fence_rows() -> None:
    """Forget applied seqs that no redelivery can reach any more."""
    if claimed(control(), schedule.CLEAN_FENCE):
        clean_fence(application())


@app.task(name=schedule.CLEAN_MARKS.task)
def clean_marks() -> None:
    """Remove the marks of direct producers that ended."""
    if claimed(control(), schedule.CLEAN_MARKS):
        drop_closed_marks(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)


@app.task(name=schedule.REPAIR_ROUTES.task)
def repair_routes() -> None:
    """Finish route changes that their drivers left, and retire partitions that every group has drained."""
    if claimed(control(), schedule.REPAIR_ROUTES):
        unsafe, prefix = settings().allow_unsafe_redis, settings().key_prefix
        finish_changes(control(), prefix=prefix, application=application(), unsafe=unsafe)
        bring_back_nodes(control(), prefix=prefix, application=application(), unsafe=unsafe)
        retire_partitions(control(), prefix=prefix, unsafe=unsafe)
