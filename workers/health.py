"""Health endpoints of Celery's own processes: a worker that hosts no consumers, and beat.

Both live as long as they answer: a broker that is away makes them unready, and starting them anew would not bring it
back. A worker that hosts consumers answers for these (see `bootstep`). A beat inside a worker has no endpoint of its
own: `mqlayer doctor` says whether jobs are late.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

from billiard.process import current_process
from celery.signals import after_task_publish, beat_init

from mqlayer.errors import MqlayerError
from mqlayer.health import Health, HealthEndpoint, Liveness
from mqlayer.settings import Settings

UNSENT_S: Final = 30.0
"""The most frequent job is due every 2 seconds; a broker that is started again may take some."""


class BareWorker:
    """Answers for a worker that hosts no consumers, from its main process; the pool's children have no endpoint.

    Raises Conflict or InvalidInput for a port that can't be had.
    """

    def __init__(self, worker: Any, settings: Settings) -> None:
        self._worker = worker
        self._endpoint = _endpoint(self, settings)

    def __call__(self) -> Health:
        """Say whether it has its broker."""
        consumer = getattr(self._worker, "consumer", None)
        # Its steps begin with the connection, and end with the loop that takes tasks.
        runs = consumer is not None and consumer.blueprint.started == len(consumer.steps)
        return Health() if runs else Health(waits=("it has no connection to the broker",))

    def start(self) -> None:
        """Begin to answer."""
        self._endpoint.start()

    def stop(self) -> None:
        """Answer no more."""
        self._endpoint.close()


class BeatHealth:
    """Answers for a beat."""

    def __init__(self) -> None:
        self._sent = Liveness()

    def __call__(self) -> Health:
        """Say whether the broker takes what is due."""
        return Health(waits=self._sent.stuck("what is due, and the broker takes it,", UNSENT_S))

    def note_sent(self, **_: Any) -> None:
        """Note that the broker took a task."""
        self._sent.note_turn()


@beat_init.connect
def answer_for_beat(**_: Any) -> None:
    """Open the endpoint of a beat that is a process of its own. A port in use ends its start with a clear error."""
    embedded = current_process().name != "MainProcess" or threading.current_thread() is not threading.main_thread()
    settings = Settings()
    if embedded or not settings.health_port:
        return
    health = BeatHealth()
    after_task_publish.connect(health.note_sent, weak=False)
    try:
        _endpoint(health, settings).start()
    except MqlayerError as error:
        # A signal's receiver must not raise: Celery would log it, and go on.
        sys.exit(f"mqlayer health: {error}")


def _endpoint(ask: Any, settings: Settings) -> HealthEndpoint:
    return HealthEndpoint(ask, host=settings.health_host, port=settings.health_port)
