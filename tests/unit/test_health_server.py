"""The endpoint against clients that mean no good: a probe is answered, and what they cost is bounded."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http import HTTPStatus
from pathlib import Path

import pytest

from mqlayer.health import Health, HealthEndpoint, Reply, health_endpoint, server
from mqlayer.settings import Settings
from tests.fixtures.health_probes import ask, free_ports
from tests.fixtures.process_files import links_of
from tests.fixtures.wait import awake_s, wait_until

SLOW_CLIENTS = 200
PROBE_LIMIT_S = 4.0
"""It takes milliseconds; this machine may be busy with other tests. Less than the deadline of a slow client."""

HUGE = b"x" * 300_000
"""More than fits between a server and a client with a small window that does not read."""

Connect = Callable[[], socket.socket]


@pytest.fixture
def port() -> Iterator[int]:
    """The port of an endpoint with two routes of its own."""

    def fails() -> Reply:
        raise KeyError("s3cret")

    routes = {
        "/metrics": lambda: Reply(HTTPStatus.OK, b"up 1\n", "text/plain; version=0.0.4"),
        "/huge": lambda: Reply(HTTPStatus.OK, HUGE, "text/plain"),
        "/fails": fails,
    }
    number = free_ports()
    with health_endpoint(Settings(health_port=number), Health, routes=routes):
        yield number


@pytest.fixture
def connect(port: int) -> Iterator[Connect]:
    """Open connections that are closed after the test."""
    with ExitStack() as cleanup:

        def one() -> socket.socket:
            client = cleanup.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(10)
            client.connect(("127.0.0.1", port))
            return client

        yield one


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> float:
    """A deadline that a test can wait for."""
    monkeypatch.setattr(server, "REQUEST_LIMIT_S", 0.5)
    return 0.5


def answer_to(client: socket.socket, request: bytes) -> tuple[bytes, bytes]:
    """Return the head and the body of all that comes back before the server closes."""
    client.sendall(request)
    received = b"".join(iter(lambda: client.recv(65_536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


def silent(connect: Connect) -> socket.socket:
    return connect()


def half_a_head(connect: Connect) -> socket.socket:
    client = connect()
    client.sendall(b"GET /live HTTP/1.1\r\nHost: h\r\nX-Slow: ")
    return client


def unread_answer(connect: Connect) -> socket.socket:
    client = connect()
    client.sendall(b"GET /huge HTTP/1.1\r\nHost: h\r\n\r\n")
    return client


def trickle(clients: list[socket.socket], stopping: threading.Event) -> None:
    """Send each a byte of a head that never ends, again and again."""
    while not stopping.wait(0.02):
        for client in clients:
            with suppress(OSError):
                client.send(b"x")


@pytest.mark.parametrize("slow", [silent, half_a_head, unread_answer])
def test_a_probe_is_answered_beside_two_hundred_slow_clients(
    port: int, connect: Connect, slow: Callable[[Connect], socket.socket]
) -> None:
    # Which, not how many: threads of an earlier test may end meanwhile.
    threads, stopping = set(threading.enumerate()), threading.Event()
    clients = [slow(connect) for _ in range(SLOW_CLIENTS)]
    sender = threading.Thread(target=trickle, args=(clients if slow is half_a_head else [], stopping))
    sender.start()
    try:
        for _ in range(10):
            began = awake_s()
            assert ask(port, "/live").status == 200
            assert awake_s() - began < PROBE_LIMIT_S
        assert set(threading.enumerate()) - threads == {sender}
    finally:
        stopping.set()
        sender.join()


def test_sockets_are_bounded_and_the_oldest_makes_room(port: int, connect: Connect) -> None:
    oldest = connect()
    clients = [connect() for _ in range(3 * server.CONNECTIONS)]
    with suppress(ConnectionResetError):
        assert oldest.recv(1) == b""
    wait_until(lambda: ends_here(port) <= server.CONNECTIONS, what="no more sockets than there is room")
    assert answer_to(clients[-1], b"GET /live HTTP/1.0\r\n\r\n")[0].startswith(b"HTTP/1.1 200 ")


def ends_here(port: int) -> int:
    """Count the connections of this port that this process has the serving end of."""
    wanted, found = f":{port:04X}", 0
    own = set(links_of("self"))
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        listens = fields[3] == "0A"
        found += fields[1].endswith(wanted) and not listens and f"socket:[{fields[9]}]" in own
    return found


@pytest.mark.parametrize("slow", [silent, half_a_head, unread_answer])
def test_a_deadline_ends_a_connection_however_often_it_sends(
    short_limit: float, connect: Connect, slow: Callable[[Connect], socket.socket]
) -> None:
    client = slow(connect)
    began = awake_s()

    def is_over() -> bool:
        try:
            client.send(b"x")
        except OSError:
            return True
        return False

    wait_until(is_over, what="the server ends the connection")
    assert awake_s() - began < short_limit + PROBE_LIMIT_S


@pytest.mark.parametrize(
    ("request_", "status", "body"),
    [
        (b"GET /live HTTP/1.0\r\n\r\n", 200, b'"live": true'),
        (b"GET /live?a=b HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc", 200, b'"live": true'),
        (b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n", 200, b"up 1\n"),
        (b"HEAD /metrics HTTP/1.1\r\nHost: h\r\n\r\n", 200, b""),
        (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", 404, b"ask for /live, /ready, /metrics, /huge or /fails"),
        (b"GET /fails HTTP/1.1\r\nHost: h\r\n\r\n", 500, b"it can't say: KeyError"),
        (b"POST /live HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx", 405, b"Method Not Allowed"),
        (b"GET /live HTTP/1.1\r\n\r\n", 400, b"Bad Request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 not HTTP\r\n\r\n", 400, b"Bad Request"),
        (b"GET /live HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: odd\r\n\r\n", 501, b"Not Implemented"),
        (b"GET /live HTTP/1.1\r\nHost: h\r\nX-Big: " + b"x" * 100_000, 431, b"Request Header Fields Too Large"),
        (b"GET /" + b"x" * 100_000, 431, b"Request Header Fields Too Large"),
    ],
)
def test_each_request_has_its_answer(connect: Connect, request_: bytes, status: int, body: bytes) -> None:
    head, received = answer_to(connect(), request_)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nConnection: close" in head
    assert body in received
    assert b"s3cret" not in received


def test_of_requests_sent_at_once_the_first_is_answered(connect: Connect) -> None:
    head, body = answer_to(connect(), b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n" * 50)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1" not in body


def test_a_client_that_goes_on_sending_is_ended(connect: Connect) -> None:
    client = connect()
    client.sendall(b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        client.sendall(b"x" * 500 * server.DISCARDED_BYTES)


def test_a_whole_answer_reaches_a_client_that_reads(connect: Connect) -> None:
    _, body = answer_to(connect(), b"GET /huge HTTP/1.1\r\nHost: h\r\n\r\n")
    assert body == HUGE


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_keeps_no_connection_open(port: int, connect: Connect, short_limit: float) -> None:
    """A connection that the parent ends would otherwise stay open for as long as the child lives."""
    client = half_a_head(connect)
    # Connections are accepted in turn: after this answer, that one was.
    assert ask(port, "/live").status == 200
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_what_is_open_ends_with_the_endpoint() -> None:
    number = free_ports()
    with health_endpoint(Settings(health_port=number), Health):
        client = socket.create_connection(("127.0.0.1", number), timeout=10)
        wait_until(lambda: ends_here(number) == 1, what="accepted")
    with client, suppress(ConnectionResetError):
        assert client.recv(1) == b""


def test_an_endpoint_that_never_began_is_closed_as_any_other() -> None:
    number = free_ports()
    HealthEndpoint(Health, host="127.0.0.1", port=number).close()
    HealthEndpoint(Health, host="127.0.0.1", port=number).close()
