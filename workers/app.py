"""The Celery application: triggers only. Rules live in mqlayer, due times and claims in Postgres.

    celery -A mqlayer.workers.app worker
    celery -A mqlayer.workers.app beat        (a second one does no harm)

Addresses come from MQLAYER_* variables. The broker is another Redis than the partitions' nodes, so that a full or lost
broker stops triggers, never messages. A relay does not need any of this: its task here only makes up for dead ones.
"""

from __future__ import annotations

from typing import Any, Final

from celery import Celery

from mqlayer.redis.access import broker_access, broker_url
from mqlayer.redis.addresses import check_broker_url
from mqlayer.settings import Settings
from mqlayer.workers import logs as logs  # noqa: PLC0414  # connects to Celery's signals
from mqlayer.workers.bootstep import CheckRights, host_consumers
from mqlayer.workers.schedule import beat_schedule

VISIBILITY_TIMEOUT_S: Final = 3600
"""After it the broker hands a task out again: every task here ends well before, and is idempotent besides."""
TASK_TIME_LIMIT_S: Final = 600


def _configuration(settings: Settings) -> dict[str, Any]:
    url = check_broker_url(broker_url(settings))
    return {
        "broker_url": url,
        **({"broker_use_ssl": broker_access(settings).tls()} if url.startswith("rediss:") else {}),
        "broker_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT_S},
        "broker_connection_retry_on_startup": True,
        # For ever: a worker also hosts consumers, which need no broker.
        "broker_connection_max_retries": None,
        # Only JSON: whoever can write to the broker must not be able to run code.
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "task_ignore_result": True,
        "task_default_queue": "mqlayer",
        "task_time_limit": TASK_TIME_LIMIT_S,
        # A task that its worker lost is due again at the next beat; nothing needs the broker's own redelivery.
        "task_acks_late": False,
        "worker_prefetch_multiplier": 1,
        "beat_schedule": beat_schedule(),
    }


app = Celery("mqlayer", include=["mqlayer.workers.tasks"])
app.conf.update(_configuration(Settings()))
host_consumers(app)
app.steps["worker"].add(CheckRights)
