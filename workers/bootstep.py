"""Consumers inside a Celery worker, on their own thread.

The step is in the worker's blueprint, because Celery restarts the consumer's when it loses the broker. It follows Pool
and Beat, because threads and connections don't survive a fork.

States of the host: *connecting* (repeated while stores are unavailable) -> *consuming* -> *stopped*.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final

from celery import Celery, bootsteps
from celery.exceptions import ImproperlyConfigured
from click import Option

from mqlayer.consuming import App
from mqlayer.consuming.api.app_loader import load_app
from mqlayer.errors import AccessDenied, MqlayerError, PermissionDenied, StoreUnavailable, VersionRefused, redact
from mqlayer.health import Health, HealthEndpoint, metrics_route
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database, address_of, connect, driver_errors
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.rights import Right, SchemaName, require
from mqlayer.randomness import RNG
from mqlayer.redis.acl_check import RequiredAccess
from mqlayer.redis.roles import RedisRole
from mqlayer.redis.server_info import check_access
from mqlayer.settings import Settings
from mqlayer.topics import list_nodes
from mqlayer.workers.health import BareWorker

log = event_logger(__name__)

VARIABLE: Final = "MQLAYER_CONSUMERS"
GREEN_POOLS: Final = ("celery.concurrency.eventlet", "celery.concurrency.gevent")
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
COLD_STOP_S: Final = 1.0


class ConsumerHost:
    """Runs an application's consumers on a thread until `stop`, with a health endpoint.

    Raises Conflict or InvalidInput for an unusable port.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._stopping = threading.Event()
        self._reason = "it has not begun to connect"
        self._endpoint: HealthEndpoint | None = None
        settings = app.settings
        if settings.health_port:
            self._endpoint = HealthEndpoint(
                self.health,
                host=settings.health_host,
                port=settings.health_port,
                counts=app.counts_as_json,
                routes=metrics_route(settings, self.health),
            )
        self._thread = threading.Thread(target=self._connect, name="mqlayer-consumer-host", daemon=True)

    def start(self) -> None:
        """Start connecting; return at once."""
        if self._endpoint is not None:
            self._endpoint.start()
        self._thread.start()

    def health(self) -> Health:
        """Return the consumers' health. Thread-safe."""
        if self._stopping.is_set():
            return Health(waits=("it is stopping",))
        return Health(waits=(self._reason,)) if self._reason else self._app.health()

    def stop(self) -> None:
        """Stop; wait for running handlers up to their drain limit."""
        self._stop(None)

    def terminate(self) -> None:
        """Stop in about 1 s; abandoned messages are handled elsewhere."""
        self._stop(COLD_STOP_S)

    def _stop(self, timeout_s: float | None) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._app.stop(timeout_s)
        if self._endpoint is not None:
            self._endpoint.close()

    def _connect(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._stopping.is_set():
            try:
                self._app.start()
            except MqlayerError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001  # the worker's tasks must go on
                reason = redact(f"{type(error).__name__}: {error}")
            else:
                self._reason = ""
                return
            self._reason = reason
            log.warning("consumers_blocked", extra={"reason": reason, "again_in_s": wait_s})
            self._stopping.wait(wait_s * RNG.uniform(0.8, 1.0))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


class HostConsumers(bootsteps.StartStopStep):
    """Hosts consumers of `--mqlayer-app module:app` or MQLAYER_CONSUMERS, else a health endpoint."""

    label = "mqlayer consumers"
    requires = ("celery.worker.components:Pool", "celery.worker.components:Beat")

    def __init__(self, worker: Any, mqlayer_app: str | None = None, **options: Any) -> None:
        self._path = mqlayer_app or os.environ.get(VARIABLE, "")
        self.enabled = bool(self._path or Settings().health_port)
        super().__init__(worker, **options)

    def create(self, worker: Any) -> ConsumerHost | BareWorker:
        """Return the host. Raises ImproperlyConfigured for a wrong path, pool or port."""
        try:
            return self._host(worker) if self._path else BareWorker(worker, Settings())
        except MqlayerError as error:
            raise ImproperlyConfigured(f"mqlayer {'consumers' if self._path else 'health'}: {error}") from error

    def _host(self, worker: Any) -> ConsumerHost:
        if worker.pool_cls.__module__ in GREEN_POOLS:
            raise ImproperlyConfigured("mqlayer consumers need the prefork, threads or solo pool")
        return ConsumerHost(load_app(self._path))


class CheckRights(bootsteps.Step):
    """Refuses a worker whose code is too old, or whose Postgres role or Redis user lacks rights to the jobs."""

    label = "mqlayer rights"

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        settings = Settings()
        try:
            self._check("control", settings.control_dsn())
            self._check("application", settings.application_dsn())
            self._check_nodes(settings)
        except (PermissionDenied, AccessDenied, VersionRefused) as error:
            raise ImproperlyConfigured(f"mqlayer jobs: {error}") from error
        except MqlayerError as error:
            # The jobs meet the outage too, and wait.
            log.info("rights_not_checked", extra={"reason": str(error)})

    @staticmethod
    def _check(schema: SchemaName, dsn: str) -> None:
        with connect(dsn, application="mqlayer worker") as connection, driver_errors(address_of(dsn)):
            require(connection, schema, Right.WORK)
            check_schema(connection, schema, address_of(dsn))

    @staticmethod
    def _check_nodes(settings: Settings) -> None:
        with Database(settings.control_dsn(), application="mqlayer worker", max_size=1) as database:
            nodes = list_nodes(database)
        for node in nodes:
            try:
                check_access(node, RequiredAccess(RedisRole.WORKER, settings.key_prefix))
            except AccessDenied:
                raise
            except StoreUnavailable as error:
                log.info("rights_not_checked", extra={"reason": str(error)})


def host_consumers(app: Celery) -> None:
    """Let an application's workers host consumers."""
    option = Option(("--mqlayer-app",), metavar="MODULE:APP", help=f"Consumers to host; else ${VARIABLE}.")
    app.user_options["worker"].add(option)
    app.steps["worker"].add(HostConsumers)
