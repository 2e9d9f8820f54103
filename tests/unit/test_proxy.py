"""The test proxy does to connections what it was told, and nothing else."""

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.fixtures.wait import wait_until
from tests.proof.proxy import Direction, TcpProxy

LIMIT_S = 10.0
"""How long a test waits for what must come."""

QUIET_S = 0.05
"""How long a test watches that something does not come."""


class EchoServer(socketserver.ThreadingTCPServer):
    """Sends back what it receives and remembers that it did the work."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.received = b""
        self.changed = threading.Condition()

    @property
    def port(self) -> int:
        port: int = self.server_address[1]
        return port

    def note(self, data: bytes) -> None:
        with self.changed:
            self.received += data
            self.changed.notify_all()

    def wait_until_received(self, data: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.received == data, LIMIT_S), self.received


class EchoHandler(socketserver.BaseRequestHandler):
    server: EchoServer

    def handle(self) -> None:
        try:
            while data := self.request.recv(65_536):
                self.server.note(data)
                self.request.sendall(data)
        except OSError:
            return


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with EchoServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def proxy(server: EchoServer) -> Iterator[TcpProxy]:
    with TcpProxy("127.0.0.1", server.port, seed=7) as running:
        yield running


@pytest.fixture
def connect(proxy: TcpProxy) -> Iterator[Callable[[], socket.socket]]:
    opened: list[socket.socket] = []

    def open_connection() -> socket.socket:
        opened.append(socket.create_connection((proxy.host, proxy.port), timeout=LIMIT_S))
        return opened[-1]

    yield open_connection
    for connection in opened:
        connection.close()


Connect = Callable[[], socket.socket]


def receive(connection: socket.socket, count: int) -> bytes:
    """Return `count` bytes, or what came before the end."""
    received = b""
    while len(received) < count and (data := connection.recv(count - len(received))):
        received += data
    return received


def receive_until_end(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(65_536):
            received += data
    except ConnectionResetError:
        pass
    return received


def assert_silent(connection: socket.socket) -> None:
    connection.settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(LIMIT_S)


def test_bytes_pass_both_ways(connect: Connect) -> None:
    """A megabyte comes back as it was sent."""
    connection = connect()
    body = bytes(range(256)) * 4_096
    sending = threading.Thread(target=connection.sendall, args=(body,))
    sending.start()
    assert receive(connection, len(body)) == body
    sending.join()


def test_the_end_of_one_direction_is_passed_on(connect: Connect) -> None:
    """After the client's FIN the server's last words still arrive."""
    connection = connect()
    connection.sendall(b"last words")
    connection.shutdown(socket.SHUT_WR)
    assert receive_until_end(connection) == b"last words"


def test_connections_are_independent(connect: Connect, proxy: TcpProxy) -> None:
    """Fifty at once; each gets its own bytes."""
    connections = [connect() for _ in range(50)]
    for number, connection in enumerate(connections):
        connection.sendall(b"%02d" % number)
    assert [receive(connection, 2) for connection in connections] == [b"%02d" % n for n in range(50)]
    assert (proxy.connection_count, proxy.accepted_count) == (50, 50)


@pytest.mark.parametrize("count", [0, 1, 10])
def test_a_reply_is_cut_after_n_bytes_though_the_server_did_the_work(
    connect: Connect, proxy: TcpProxy, server: EchoServer, count: int
) -> None:
    """The server has all the request; exactly n bytes of the reply arrive."""
    connection = connect()
    proxy.cut_after(server_bytes=count)
    connection.sendall(b"a request of 24 bytes ..")
    assert receive_until_end(connection) == b"a request of 24 bytes .."[:count]
    proxy.wait_for_cut()
    server.wait_until_received(b"a request of 24 bytes ..")


def test_a_request_is_cut_after_n_bytes(connect: Connect, proxy: TcpProxy, server: EchoServer) -> None:
    """The server gets the first five bytes and no more."""
    connection = connect()
    proxy.cut_after(client_bytes=5)
    connection.sendall(b"a request")
    receive_until_end(connection)
    server.wait_until_received(b"a req")


def test_bytes_are_counted_from_the_order_on(connect: Connect, proxy: TcpProxy) -> None:
    """What passed before does not count, and earlier replies use the count up."""
    connection = connect()
    connection.sendall(b"before")
    assert receive(connection, 6) == b"before"
    proxy.cut_after(server_bytes=3)
    connection.sendall(b"ab")
    assert receive(connection, 2) == b"ab"
    connection.sendall(b"cd")
    assert receive_until_end(connection) == b"c"


def test_one_order_cuts_one_connection(connect: Connect, proxy: TcpProxy) -> None:
    """The retry on a new connection goes through."""
    proxy.cut_after(server_bytes=0)
    first = connect()
    first.sendall(b"lost")
    assert receive_until_end(first) == b""
    second = connect()
    second.sendall(b"retried")
    assert receive(second, 7) == b"retried"
    assert proxy.cut_count == 1


def test_an_order_may_cut_several_connections(connect: Connect, proxy: TcpProxy) -> None:
    """Two are ended, the third is spared."""
    proxy.cut_after(server_bytes=0, times=2)
    replies = []
    for connection in (connect(), connect(), connect()):
        connection.sendall(b"reply")
        replies.append(receive(connection, 5))
    assert replies == [b"", b"", b"reply"]


def test_heal_takes_back_an_order_to_cut(connect: Connect, proxy: TcpProxy) -> None:
    """Nothing is cut after it."""
    connection = connect()
    proxy.cut_after(server_bytes=0, client_bytes=0)
    proxy.heal()
    connection.sendall(b"spared")
    assert receive(connection, 6) == b"spared"


def test_waiting_for_a_cut_that_does_not_come_fails(proxy: TcpProxy) -> None:
    """With the numbers."""
    with pytest.raises(TimeoutError, match="0 of 1 connections were cut"):
        proxy.wait_for_cut(timeout_s=0.01)


@pytest.mark.parametrize("direction", [None, "client_to_server", "server_to_client"])
def test_a_blackhole_holds_back_until_it_is_healed(
    connect: Connect, proxy: TcpProxy, direction: Direction | None
) -> None:
    """Silence, no end; then everything, in order."""
    connection = connect()
    proxy.blackhole(direction)
    connection.sendall(b"one ")
    connection.sendall(b"two")
    assert_silent(connection)
    proxy.heal()
    assert receive(connection, 7) == b"one two"


def test_a_blackhole_one_way_lets_the_other_way_pass(connect: Connect, proxy: TcpProxy, server: EchoServer) -> None:
    """The server does the work, its reply does not come."""
    connection = connect()
    proxy.blackhole("server_to_client")
    connection.sendall(b"work")
    server.wait_until_received(b"work")
    assert_silent(connection)


def test_a_delay_with_jitter_keeps_the_order(connect: Connect, proxy: TcpProxy) -> None:
    """Nothing comes before the delay, and everything in order after it."""
    connection = connect()
    proxy.delay(0.03, jitter_s=0.02, direction="client_to_server")
    began_at = time.monotonic()
    for number in range(10):
        connection.sendall(b"%d" % number)
    assert receive(connection, 10) == b"0123456789"
    assert time.monotonic() - began_at >= 0.03


def test_half_open_accepts_and_never_answers(connect: Connect, proxy: TcpProxy, server: EchoServer) -> None:
    """The server never hears of it, also after heal; a later connection works."""
    proxy.half_open()
    silent = connect()
    silent.sendall(b"hello?")
    wait_until(lambda: proxy.connection_count == 1, what="1 connections at the proxy")
    proxy.heal()
    assert_silent(silent)
    answered = connect()
    answered.sendall(b"hello")
    assert receive(answered, 5) == b"hello"
    assert server.received == b"hello"


def test_new_connections_are_reset_and_open_ones_spared(connect: Connect, proxy: TcpProxy) -> None:
    """The client of a new one sees a reset."""
    earlier = connect()
    earlier.sendall(b"a")
    assert receive(earlier, 1) == b"a"
    proxy.reset_new()
    with pytest.raises(ConnectionResetError):
        connect().recv(1)
    earlier.sendall(b"b")
    assert receive(earlier, 1) == b"b"


def test_new_connections_are_refused_until_healed(connect: Connect, proxy: TcpProxy) -> None:
    """Refused at connect; open ones go on; the port is the same afterwards."""
    earlier = connect()
    wait_until(lambda: proxy.connection_count == 1, what="1 connections at the proxy")
    proxy.refuse_new()
    with pytest.raises(ConnectionRefusedError):
        connect()
    earlier.sendall(b"a")
    assert receive(earlier, 1) == b"a"
    proxy.heal()
    later = connect()
    later.sendall(b"b")
    assert receive(later, 1) == b"b"


def test_reset_all_resets_every_open_connection(connect: Connect, proxy: TcpProxy) -> None:
    """All clients see a reset, also those that a blackhole holds."""
    connections = [connect() for _ in range(3)]
    wait_until(lambda: proxy.connection_count == 3, what="3 connections at the proxy")
    proxy.blackhole()
    connections[0].sendall(b"held")
    assert proxy.reset_all() == 3
    for connection in connections:
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    assert proxy.connection_count == 0


def test_a_server_that_is_not_there_shows_as_a_reset() -> None:
    """The client is told; the proxy goes on."""
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        with (
            TcpProxy(*nobody.getsockname()) as proxy,
            pytest.raises(ConnectionResetError),
            socket.create_connection((proxy.host, proxy.port), timeout=LIMIT_S) as connection,
        ):
            connection.recv(1)


def test_the_end_of_the_proxy_ends_its_connections(server: EchoServer) -> None:
    """No client is left hanging."""
    with TcpProxy("127.0.0.1", server.port) as proxy:
        connection = socket.create_connection((proxy.host, proxy.port), timeout=LIMIT_S)
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
    assert receive_until_end(connection) == b""
    connection.close()
