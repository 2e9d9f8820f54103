"""The Celery application: triggers only; mqlayer has the rules, Postgres the claims.

    celery -A mqlayer.workers.app worker
    celery -A mqlayer.workers.app beat        (several do no harm)

The broker is no node, so its loss stops triggers, never messages.
"""

from __future__ import annotations

from typing import Any, Final

from celery import Celery

from mqlayer.env_file import export_env_file
from mqlayer.redis.access import broker_access, broker_url
from mqlayer.redis.addresses import check_broker_url
from mqlayer.settings import Settings
from mqlayer.workers import logs as logs  # noqa: PLC0414  # connects to Celery's signals
from mqlayer.workers.bootstep import CheckRights, host_consumers
from mqlayer.workers.schedule import beat_schedule
from mqlayer.workers.transport import use_transport

# The broker redelivers a task after this time; all tasks end earlier, and are idempotent.
VISIBILITY_TIMEOUT_S: Final = 3600
TASK_TIME_LIMIT_S: Final = 600


def _configuration(settings: Settings) -> dict[str, Any]:
    url = check_broker_url(broker_url(settings))
    return {
        "broker_url": url,
        **({"broker_use_ssl": broker_access(settings).tls()} if url.startswith("rediss:") else {}),
        "broker_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT_S},
        "broker_connection_retry_on_startup": True,
        # For ever: hosted consumers need no broker.
        "broker_connection_max_retries": None,
        # JSON only: a writer to the broker must not run code.
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "task_ignore_result": True,
        "task_default_queue": "mqlayer",
        "task_time_limit": TASK_TIME_LIMIT_S,
        # The next beat repeats a lost task, so the broker need not redeliver.
        "task_acks_late": False,
        "worker_prefetch_multiplier": 1,
        "beat_schedule": beat_schedule(),
    }


export_env_file()
use_transport()
app = Celery("mqlayer", include=["mqlayer.workers.tasks"])
app.conf.update(_configuration(Settings()))
host_consumers(app)
app.steps["worker"].add(CheckRights)
