"""`GET /live`, `/ready`, `/counts` and own routes, from memory; off without a port."""

from __future__ import annotations

import errno
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Final

from mqlayer.errors import Conflict, InvalidInput, redact
from mqlayer.health.reports import Health
from mqlayer.health.server import HttpServer, Reply
from mqlayer.logs import event_logger
from mqlayer.metrics import CONTENT_TYPE, meters_of, metrics_page
from mqlayer.settings import Settings

log = event_logger(__name__)

HealthCheck = Callable[[], Health]
Counts = Callable[[], object]
Responder = Callable[[], Reply]
"""Answers a path from memory, on the endpoint's only thread."""


class HealthEndpoint:
    """Answers on a port until closed."""

    def __init__(
        self,
        ask: HealthCheck,
        *,
        host: str,
        port: int,
        counts: Counts | None = None,
        routes: Mapping[str, Responder] | None = None,
    ) -> None:
        """Bind the port. `counts`: JSON of `/counts`. Raises Conflict for a port in use, else InvalidInput."""
        if not 0 < port < 65_536:
            raise InvalidInput(f"health port {port}: set MQLAYER_HEALTH_PORT so that each process gets one up to 65535")
        self._routes: dict[str, Responder] = {"/live": lambda: _live(ask), "/ready": lambda: _ready(ask)}
        if counts is not None:
            self._routes["/counts"] = lambda: _json(HTTPStatus.OK, counts())
        self._routes.update(routes or {})
        self._address = (host, port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server(self._address, family=family)
        except OSError as error:
            raise _refusal(error, host, port) from error
        self._server = HttpServer(listener, self._answer, name="mqlayer-health")
        _endpoints.add(self)

    def start(self) -> None:
        """Start to answer; returns at once."""
        self._server.start()
        host, port = self._address
        log.info("health_endpoint", extra={"host": host, "port": port})

    def close(self) -> None:
        """Stop, and release the port."""
        self._server.close()

    def forget(self) -> None:
        """Release the port in a forked child."""
        self._server.forget()

    def _answer(self, path: str) -> Reply:
        route = self._routes.get(path)
        if route is None:
            *most, last = self._routes
            return _json(HTTPStatus.NOT_FOUND, {"reasons": [f"ask for {', '.join(most)} or {last}"]})
        try:
            return route()
        except Exception as error:  # noqa: BLE001 - the client needs an answer
            reason = f"it can't say: {type(error).__name__}"
            return _json(HTTPStatus.INTERNAL_SERVER_ERROR, {"reasons": [reason]})


@contextmanager
def health_endpoint(
    settings: Settings,
    ask: HealthCheck,
    *,
    port: int | None = None,
    counts: Counts | None = None,
    routes: Mapping[str, Responder] | None = None,
) -> Iterator[None]:
    """Answer during the block, on `port` or the settings' one; 0: off."""
    number = settings.health_port if port is None else port
    if not number:
        yield
        return
    every = {**metrics_route(settings, ask), **(routes or {})}
    endpoint = HealthEndpoint(ask, host=settings.health_host, port=number, counts=counts, routes=every)
    endpoint.start()
    try:
        yield
    finally:
        endpoint.close()


def metrics_route(settings: Settings, ask: HealthCheck) -> dict[str, Responder]:
    """Return the route `/metrics`, which tells `ask` too; none with metrics off."""
    meters, page = meters_of(settings), metrics_page(settings)
    if meters is None or page is None:
        return {}
    meters.ready = lambda: _ask(ask).ready
    return {"/metrics": lambda: Reply(HTTPStatus.OK, page(), CONTENT_TYPE)}


def _live(ask: HealthCheck) -> Reply:
    health = _ask(ask)
    return _as_json(health, well=health.live, reasons=health.stuck)


def _ready(ask: HealthCheck) -> Reply:
    health = _ask(ask)
    return _as_json(health, well=health.ready, reasons=(*health.stuck, *health.waits))


def _as_json(health: Health, *, well: bool, reasons: tuple[str, ...]) -> Reply:
    facts = {"live": health.live, "ready": health.ready, "reasons": [redact(reason) for reason in reasons]}
    return _json(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, facts)


def _json(status: HTTPStatus, facts: object) -> Reply:
    return Reply(status, json.dumps(facts).encode() + b"\n")


def _ask(ask: HealthCheck) -> Health:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - the client needs an answer
        return Health(stuck=(f"it can't say: {type(error).__name__}",))


def _refusal(error: OSError, host: str, port: int) -> Conflict | InvalidInput:
    if error.errno == errno.EADDRINUSE:
        return Conflict(
            f"health port {port} of {host} is in use",
            "set MQLAYER_HEALTH_PORT to a free one, several processes take the ports from there on; 0 turns it off",
        )
    reason = error.strerror or type(error).__name__
    return InvalidInput(f"no health endpoint on {host}, port {port} ({reason}): see MQLAYER_HEALTH_HOST and _PORT")


_endpoints: Final[weakref.WeakSet[HealthEndpoint]] = weakref.WeakSet()


def _forget_all() -> None:
    for endpoint in list(_endpoints):
        with suppress(OSError):
            endpoint.forget()


# Celery forks children while it runs; they would keep the port bound.
os.register_at_fork(after_in_child=_forget_all)
