"""Endpoints of a Celery worker without consumers, of beat, and, with metrics on, of prefork children.

A lost broker makes the first two unready, never dead. A beat inside a worker has none: `mqlayer doctor` reports late
jobs.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

from billiard.process import current_process
from celery.signals import after_task_publish, beat_init, worker_process_init
from celery.utils.log import current_process_index

from mqlayer.errors import MqlayerError
from mqlayer.health import Health, HealthEndpoint, Liveness, metrics_route
from mqlayer.logs import event_logger
from mqlayer.metrics import count_anew
from mqlayer.settings import Settings

log = event_logger(__name__)

# The most frequent job is due every 2 s; a broker's restart takes longer.
UNSENT_S: Final = 30.0


class BareWorker:
    """Health of such a worker. Raises Conflict or InvalidInput for an unusable port."""

    def __init__(self, worker: Any, settings: Settings) -> None:
        self._worker = worker
        self._endpoint = _endpoint(self, settings)

    def __call__(self) -> Health:
        """Return health."""
        consumer = getattr(self._worker, "consumer", None)
        # Steps begin with the connection and end with the task loop.
        runs = consumer is not None and consumer.blueprint.started == len(consumer.steps)
        return Health() if runs else Health(waits=("it has no connection to the broker",))

    def start(self) -> None:
        """Start answering."""
        self._endpoint.start()

    def stop(self) -> None:
        """Stop answering."""
        self._endpoint.close()


class BeatHealth:
    """A beat's health: the broker takes due tasks."""

    def __init__(self) -> None:
        self._sent = Liveness()

    def __call__(self) -> Health:
        """Return health."""
        return Health(waits=self._sent.stuck("what is due, and the broker takes it,", UNSENT_S))

    def note_sent(self, **_: Any) -> None:
        """Record a task that was sent."""
        self._sent.note_turn()


@beat_init.connect
def answer_for_beat(**_: Any) -> None:
    """Open a separate beat's endpoint; a used port ends the process."""
    embedded = current_process().name != "MainProcess" or threading.current_thread() is not threading.main_thread()
    settings = Settings()
    if embedded or not settings.health_port:
        return
    health = BeatHealth()
    after_task_publish.connect(health.note_sent, weak=False)
    try:
        _endpoint(health, settings).start()
    except MqlayerError as error:
        # Celery would log a receiver's exception, and go on.
        sys.exit(f"mqlayer health: {error}")


@worker_process_init.connect
def answer_for_child(**_: Any) -> None:
    """Open a prefork child's page, on a port behind its worker's by its place in the pool; a used port is logged."""
    place, settings = current_process_index(), Settings()
    # The other pools send this signal in the worker's own process.
    if place is None or not (settings.metrics and settings.health_port):
        return
    count_anew()
    port = settings.health_port + place
    try:
        _endpoint(Health, settings, port).start()
    except MqlayerError as error:
        log.warning("child_without_metrics", extra={"port": port, "reason": str(error)})


def _endpoint(ask: Any, settings: Settings, port: int | None = None) -> HealthEndpoint:
    routes = metrics_route(settings, ask)
    return HealthEndpoint(ask, host=settings.health_host, port=port or settings.health_port, routes=routes)
