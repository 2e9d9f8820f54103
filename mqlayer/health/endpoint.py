"""`GET /live` and `GET /ready` of a process, and its `GET /counts` where it counts, on threads of its own.

Python's own server: three paths, no body, no state, a few requests a minute from this machine. It is off unless a port
is set, holds nothing that the process needs, and ends with it. Each answer is made of what threads noted as they went
along, so a probe asks no store.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from mqlayer.errors import Conflict, InvalidInput, redact
from mqlayer.health.reports import Health
from mqlayer.settings import Settings

log = logging.getLogger(__name__)

REQUESTS_AT_ONCE: Final = 8
REQUEST_LIMIT_S: Final = 5.0
LOOK_EVERY_S: Final = 0.2

Ask = Callable[[], Health]
Counts = Callable[[], object]


class HealthEndpoint:
    """Answers on a port until it is closed."""

    def __init__(self, ask: Ask, *, host: str, port: int, counts: Counts | None = None) -> None:
        """Take the port. `counts`: what to answer as JSON where counts are asked for.

        Raises Conflict where another has it, InvalidInput where it can't be had.
        """
        if not 0 < port < 65_536:
            raise InvalidInput(f"health port {port}: set MQLAYER_HEALTH_PORT so that each process gets one up to 65535")
        try:
            self._server = _Server(ask, counts, host, port)
        except OSError as error:
            raise _refusal(error, host, port) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(LOOK_EVERY_S,), name="mqlayer-health", daemon=True
        )
        _endpoints.add(self)

    def start(self) -> None:
        """Begin to answer; returns at once."""
        self._thread.start()
        host, port = self._server.server_address[:2]
        log.info("health_endpoint", extra={"host": host, "port": port})

    def close(self) -> None:
        """Answer no more, and let the port go."""
        if self._thread.ident is not None:
            self._server.shutdown()
        self._server.server_close()

    def forget(self) -> None:
        """Let go of the port in a process that was forked off: the one that took it goes on answering."""
        self._server.socket.close()


class _Server(ThreadingMixIn, TCPServer):
    """A thread per request, few at once: one that never sends its request keeps no other waiting."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, ask: Ask, counts: Counts | None, host: str, port: int) -> None:
        self.ask, self.counts = ask, counts
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._room = threading.BoundedSemaphore(REQUESTS_AT_ONCE)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or not at all where too many ask."""
        if self._room.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:
                self._room.release()
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's
        """Whoever asked is gone."""
        log.debug("health_request_failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_LIMIT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/counts" and self.server.counts is not None:
            self._answer(HTTPStatus.OK, self.server.counts())
            return
        if path not in ("/live", "/ready"):
            known = "/live or /ready" if self.server.counts is None else "/live, /ready or /counts"
            self._answer(HTTPStatus.NOT_FOUND, {"reasons": [f"ask for {known}"]})
            return
        health = _asked(self.server.ask)
        well = health.live if path == "/live" else health.ready
        reasons = health.stuck if path == "/live" else (*health.stuck, *health.waits)
        facts = {"live": health.live, "ready": health.ready, "reasons": [redact(reason) for reason in reasons]}
        self._answer(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, facts)

    def do_HEAD(self) -> None:
        self.do_GET()

    def version_string(self) -> str:
        return "mqlayer"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Probes are no events."""

    def _answer(self, status: HTTPStatus, facts: object) -> None:
        body = json.dumps(facts).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def health_endpoint(
    settings: Settings, ask: Ask, *, port: int | None = None, counts: Counts | None = None
) -> Iterator[None]:
    """Answer for as long as the block runs, on the port given or else that of the settings; nothing where it is 0."""
    number = settings.health_port if port is None else port
    if not number:
        yield
        return
    endpoint = HealthEndpoint(ask, host=settings.health_host, port=number, counts=counts)
    endpoint.start()
    try:
        yield
    finally:
        endpoint.close()


def _asked(ask: Ask) -> Health:
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, whoever asks has to get an answer
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


# Celery forks new children while it runs; with our socket they would keep the port for ever.
os.register_at_fork(after_in_child=_forget_all)
