"""Periodic tasks: each claims its job and calls the library; idempotent, safe to run concurrently."""

from __future__ import annotations

from mqlayer.archive import archive_pass, retain_by_topics
from mqlayer.domain import jobs
from mqlayer.groups import balance_by_rate, rebalance_groups
from mqlayer.groups.retirement import forget_instances, forget_retired, retire_absent
from mqlayer.idempotency import watch_versions
from mqlayer.maintenance import clean_fence, clean_inbox, drop_closed_marks, trim_pass
from mqlayer.outbox import clean_dedup, release_delayed, rotate
from mqlayer.redelivery import clean_attempts, reclaim_shared, retry_scan
from mqlayer.relay import relay_once
from mqlayer.routes import finish_changes, rearm_lost_nodes, retire_partitions
from mqlayer.workers.app import app
from mqlayer.workers.connections import application, control, settings
from mqlayer.workers.job_claims import claimed
from mqlayer.workers.schedule import task_name


@app.task(name=task_name(jobs.RELAY))
def relay() -> None:
    """Relay LPs whose relays died."""
    if claimed(control(), jobs.RELAY):
        relay_once(settings(), at_most_s=jobs.RELAY.every_s)


@app.task(name=task_name(jobs.TRIM))
def trim() -> None:
    """Trim records that all groups settled."""
    if claimed(control(), jobs.TRIM):
        trim_pass(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)


@app.task(name=task_name(jobs.ROTATE_OUTBOX))
def rotate_outbox() -> None:
    """Empty old outbox slots that are relayed."""
    if claimed(control(), jobs.ROTATE_OUTBOX):
        rotate(application())


@app.task(name=task_name(jobs.CLEAN_FENCE))
def clean_fence_rows() -> None:
    """Delete applied seqs beyond redelivery."""
    if claimed(control(), jobs.CLEAN_FENCE):
        clean_fence(application())


@app.task(name=task_name(jobs.CLEAN_MARKS))
def clean_marks() -> None:
    """Remove closed direct producers' marks."""
    if claimed(control(), jobs.CLEAN_MARKS):
        drop_closed_marks(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)


@app.task(name=task_name(jobs.REPAIR_ROUTES))
def repair_routes() -> None:
    """Finish abandoned route changes; retire drained partitions."""
    if claimed(control(), jobs.REPAIR_ROUTES):
        unsafe, prefix = settings().allow_unsafe_redis, settings().key_prefix
        finish_changes(control(), prefix=prefix, application=application(), unsafe=unsafe)
        retire_partitions(control(), prefix=prefix, unsafe=unsafe)


@app.task(name=task_name(jobs.REARM_NODES))
def rearm_nodes() -> None:
    """Arm returned nodes that no other process arms."""
    if claimed(control(), jobs.REARM_NODES):
        unsafe, prefix = settings().allow_unsafe_redis, settings().key_prefix
        rearm_lost_nodes(control(), prefix=prefix, application=application(), unsafe=unsafe)


@app.task(name=task_name(jobs.REBALANCE))
def rebalance() -> None:
    """Rebalance groups of dead members."""
    if claimed(control(), jobs.REBALANCE):
        rebalance_groups(control())


@app.task(name=task_name(jobs.BALANCE_BY_RATE))
def balance_groups_by_rate() -> None:
    """Measure partitions' rates; balance groups by them."""
    if claimed(control(), jobs.BALANCE_BY_RATE):
        balance_by_rate(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)


@app.task(name=task_name(jobs.RETRY_SCAN))
def scan_parked() -> None:
    """Notify groups of overdue keys; continue abandoned redrives; reclaim messages of dead shared members."""
    if claimed(control(), jobs.RETRY_SCAN):
        reclaim_shared(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)
        retry_scan(control(), at_most_s=jobs.RETRY_SCAN.every_s)


@app.task(name=task_name(jobs.CLEAN_ATTEMPTS))
def clean_failed_attempts() -> None:
    """Delete old failed attempts, except of parked or dead messages."""
    if claimed(control(), jobs.CLEAN_ATTEMPTS):
        clean_attempts(control())


@app.task(name=task_name(jobs.ARCHIVE))
def archive() -> None:
    """Archive the streams of archived topics."""
    if claimed(control(), jobs.ARCHIVE):
        unsafe, at_most_s = settings().allow_unsafe_redis, 0.8 * jobs.ARCHIVE.every_s
        archive_pass(control(), prefix=settings().key_prefix, at_most_s=at_most_s, unsafe=unsafe)


@app.task(name=task_name(jobs.RETAIN))
def retain() -> None:
    """Drop archive days past retention."""
    if claimed(control(), jobs.RETAIN):
        retain_by_topics(control())


@app.task(name=task_name(jobs.RELEASE_DELAYED))
def release_delayed_messages() -> None:
    """Publish due delayed messages."""
    if claimed(control(), jobs.RELEASE_DELAYED):
        release_delayed(application(), at_most_s=jobs.RELEASE_DELAYED.every_s)


@app.task(name=task_name(jobs.CLEAN_DEDUP))
def clean_dedup_ids() -> None:
    """Delete dedup ids past their window."""
    if claimed(control(), jobs.CLEAN_DEDUP):
        clean_dedup(application(), window_s=settings().dedup_window_s)


@app.task(name=task_name(jobs.CLEAN_INBOX))
def clean_inbox_rows() -> None:
    """Delete inbox rows beyond redelivery."""
    if claimed(control(), jobs.CLEAN_INBOX):
        horizon_s, unsafe = settings().inbox_horizon_s, settings().allow_unsafe_redis
        clean_inbox(control(), application(), prefix=settings().key_prefix, horizon_s=horizon_s, unsafe=unsafe)


@app.task(name=task_name(jobs.WATCH_VERSIONS))
def watch_entity_versions() -> None:
    """Report versions missing too long."""
    if claimed(control(), jobs.WATCH_VERSIONS):
        watch_versions(application())


@app.task(name=task_name(jobs.RETIRE_GROUPS))
def retire_groups() -> None:
    """Retire absent instances; clean up retired groups."""
    if claimed(control(), jobs.RETIRE_GROUPS):
        retire_absent(control())
        forget_retired(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)
        forget_instances(control())
