"""A small HTTP server: asyncio and h11 on one thread (docs/design/decisions/0051-health-endpoint.md).

A connection carries one request under one deadline. When full, the oldest is closed for a new one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, cast

import h11

CONNECTIONS: Final = 128
BACKLOG: Final = 64
"""Accepts per turn; below CONNECTIONS, so each is read before it may be closed."""

QUEUE: Final = 1024
"""Kernel's accept queue."""

REQUEST_LIMIT_S: Final = 5.0
REQUEST_BYTES: Final = 16_384
DISCARDED_BYTES: Final = 262_144
"""Bytes dropped behind a request before the connection closes."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A route's answer."""

    status: HTTPStatus
    body: bytes
    content_type: str = "application/json"


AnswerPath = Callable[[str], Reply]
"""Answers a path without query; quick, raises nothing."""


class HttpServer:
    """Answers GET and HEAD in a daemon thread."""

    def __init__(self, listener: socket.socket, answer: AnswerPath, *, name: str) -> None:
        self.answer = answer
        self._listener = listener
        self._connections: dict[_HttpConnection, None] = {}
        self._runner = asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start to answer; returns at once."""
        # Creates the loop now, because `close` needs it.
        self._runner.get_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop, end connections, release the port."""
        if self._thread.ident is not None:
            with suppress(RuntimeError):  # the loop ended by itself
                self._runner.get_loop().call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._listener.close()

    def forget(self) -> None:
        """Close all sockets in a forked child."""
        self._listener.close()
        if self._connections:
            nothing = os.open(os.devnull, os.O_RDWR)
            for connection in self._connections:
                connection.replace_socket(nothing)
            os.close(nothing)

    def admit(self, connection: _HttpConnection) -> None:
        """Add a connection; when full, end the oldest."""
        if len(self._connections) >= CONNECTIONS:
            oldest = next(iter(self._connections))
            self.release(oldest)
            oldest.abort()
        self._connections[connection] = None

    def release(self, connection: _HttpConnection) -> None:
        """Forget a connection; idempotent."""
        self._connections.pop(connection, None)

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _HttpConnection(self), sock=self._listener, backlog=BACKLOG)
        self._listener.listen(QUEUE)
        await self._stopping.wait()
        server.close()
        for connection in list(self._connections):
            connection.abort()
        # Aborted transports close their sockets in the next turn.
        await asyncio.sleep(0)


class _HttpConnection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES)
        self._answered = False
        self._discarded = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_LIMIT_S, self._transport.abort)
        self._server.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the base class's
        self._deadline.cancel()
        self._server.release(self)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            self._discard(data)
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._refuse(HTTPStatus(error.error_status_hint))
        else:
            if isinstance(event, h11.Request):
                self._answer(event)

    def abort(self) -> None:
        self._transport.abort()

    def replace_socket(self, other: int) -> None:
        # Objects here still hold the number, so it is not closed but pointed elsewhere.
        number = self._transport.get_extra_info("socket").fileno()
        if number >= 0:
            os.dup2(other, number)

    def _answer(self, request: h11.Request) -> None:
        if request.method in (b"GET", b"HEAD"):
            path = request.target.partition(b"?")[0].decode("ascii", "replace")
            self._send(self._server.answer(path), with_body=request.method == b"GET")
        else:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    def _refuse(self, status: HTTPStatus) -> None:
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send(Reply(status, status.phrase.encode() + b"\n", "text/plain"))
        else:
            self.abort()

    def _send(self, reply: Reply, *, with_body: bool = True) -> None:
        headers = [
            ("Content-Type", reply.content_type),
            ("Content-Length", str(len(reply.body))),
            ("Connection", "close"),
            ("Server", "mqlayer"),
        ]
        if reply.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", "GET, HEAD"))
        events: list[h11.Event] = [h11.Response(status_code=reply.status, headers=headers, reason=reply.status.phrase)]
        if with_body:
            events.append(h11.Data(data=reply.body))
        events.append(h11.EndOfMessage())
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))
        # The client or the deadline closes: closing with unread bytes would reset the reply.
        self._transport.write_eof()
        self._answered = True

    def _discard(self, data: bytes) -> None:
        self._discarded += len(data)
        if self._discarded > DISCARDED_BYTES:
            self.abort()
