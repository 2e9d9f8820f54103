"""Tasks: each claims its job and calls the library. Idempotent, safe to run twice at once, ids only."""

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
    """Relay what waits in LPs whose relays died."""
    if claimed(control(), jobs.RELAY):
        relay_once(settings(), at_most_s=jobs.RELAY.every_s)


@app.task(name=task_name(jobs.TRIM))
def trim() -> None:
    """Drop records that every group has settled."""
    if claimed(control(), jobs.TRIM):
        trim_pass(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)


@app.task(name=task_name(jobs.ROTATE_OUTBOX))
def rotate_outbox() -> None:
    """Empty the outbox's slots of time that are in Redis as a whole."""
    if claimed(control(), jobs.ROTATE_OUTBOX):
        rotate(application())


@app.task(name=task_name(jobs.CLEAN_FENCE))
def clean_fence_rows() -> None:
    """Forget applied seqs that no redelivery can reach any more."""
    if claimed(control(), jobs.CLEAN_FENCE):
        clean_fence(application())


@app.task(name=task_name(jobs.CLEAN_MARKS))
def clean_marks() -> None:
    """Remove the marks of direct producers that ended."""
    if claimed(control(), jobs.CLEAN_MARKS):
        drop_closed_marks(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)


@app.task(name=task_name(jobs.REPAIR_ROUTES))
def repair_routes() -> None:
    """Finish route changes that their drivers left, and retire partitions that every group has drained."""
    if claimed(control(), jobs.REPAIR_ROUTES):
        unsafe, prefix = settings().allow_unsafe_redis, settings().key_prefix
        finish_changes(control(), prefix=prefix, application=application(), unsafe=unsafe)
        retire_partitions(control(), prefix=prefix, unsafe=unsafe)


@app.task(name=task_name(jobs.REARM_NODES))
def rearm_nodes() -> None:
    """Bring nodes back into service that restarted and that nobody else met since."""
    if claimed(control(), jobs.REARM_NODES):
        unsafe, prefix = settings().allow_unsafe_redis, settings().key_prefix
        rearm_lost_nodes(control(), prefix=prefix, application=application(), unsafe=unsafe)


@app.task(name=task_name(jobs.REBALANCE))
def rebalance() -> None:
    """Hand over what members left behind that died without a word."""
    if claimed(control(), jobs.REBALANCE):
        rebalance_groups(control())


@app.task(name=task_name(jobs.BALANCE_BY_RATE))
def balance_groups_by_rate() -> None:
    """Measure how fast partitions grow, and spread them anew over the members of groups that go by it."""
    if claimed(control(), jobs.BALANCE_BY_RATE):
        balance_by_rate(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)


@app.task(name=task_name(jobs.RETRY_SCAN))
def scan_parked() -> None:
    """Tell groups again whose parked keys nobody takes up, go on with redrives that nobody works on; and make due what
    members of shared groups have that are gone."""
    if claimed(control(), jobs.RETRY_SCAN):
        reclaim_shared(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)
        retry_scan(control(), at_most_s=jobs.RETRY_SCAN.every_s)


@app.task(name=task_name(jobs.CLEAN_ATTEMPTS))
def clean_failed_attempts() -> None:
    """Forget old failed attempts of messages that are neither parked nor dead."""
    if claimed(control(), jobs.CLEAN_ATTEMPTS):
        clean_attempts(control())


@app.task(name=task_name(jobs.ARCHIVE))
def archive() -> None:
    """Move what stands in the streams of archived topics into the archive."""
    if claimed(control(), jobs.ARCHIVE):
        unsafe, at_most_s = settings().allow_unsafe_redis, 0.8 * jobs.ARCHIVE.every_s
        archive_pass(control(), prefix=settings().key_prefix, at_most_s=at_most_s, unsafe=unsafe)


@app.task(name=task_name(jobs.RETAIN))
def retain() -> None:
    """Drop the days of the archive that are older than their topics are to be kept."""
    if claimed(control(), jobs.RETAIN):
        retain_by_topics(control())


@app.task(name=task_name(jobs.RELEASE_DELAYED))
def release_delayed_messages() -> None:
    """Publish delayed messages that are due, also while no relay runs."""
    if claimed(control(), jobs.RELEASE_DELAYED):
        release_delayed(application(), at_most_s=jobs.RELEASE_DELAYED.every_s)


@app.task(name=task_name(jobs.CLEAN_DEDUP))
def clean_dedup_ids() -> None:
    """Forget the outbox's dedup ids whose window is over."""
    if claimed(control(), jobs.CLEAN_DEDUP):
        clean_dedup(application(), window_s=settings().dedup_window_s)


@app.task(name=task_name(jobs.CLEAN_INBOX))
def clean_inbox_rows() -> None:
    """Forget what the inbox knows of messages that no redelivery can reach any more."""
    if claimed(control(), jobs.CLEAN_INBOX):
        horizon_s, unsafe = settings().inbox_horizon_s, settings().allow_unsafe_redis
        clean_inbox(control(), application(), prefix=settings().key_prefix, horizon_s=horizon_s, unsafe=unsafe)


@app.task(name=task_name(jobs.WATCH_VERSIONS))
def watch_entity_versions() -> None:
    """Raise the alarm for versions that have been missing for too long."""
    if claimed(control(), jobs.WATCH_VERSIONS):
        watch_versions(application())


@app.task(name=task_name(jobs.RETIRE_GROUPS))
def retire_groups() -> None:
    """Drop the positions of instances that are away for too long, and what retired groups have on the nodes."""
    if claimed(control(), jobs.RETIRE_GROUPS):
        retire_absent(control())
        forget_retired(control(), prefix=settings().key_prefix, unsafe=settings().allow_unsafe_redis)
        forget_instances(control())
