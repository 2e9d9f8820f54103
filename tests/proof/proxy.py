"""A TCP proxy that gives a test a bad network on demand.

    with TcpProxy("127.0.0.1", redis_port) as proxy:
        client = connect(proxy.host, proxy.port)
        proxy.cut_after(server_bytes=0)     # the server does the work, its reply is lost
        ...
        proxy.heal()

Every method returns when its effect is in force.
As TCP promises, bytes are never dropped from the middle of a stream and never reordered: they pass, wait,
or the connection ends.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import uvloop

__all__ = ["Direction", "TcpProxy"]

Direction = Literal["client_to_server", "server_to_client"]
Welcome = Literal["forward", "half_open", "reset", "refuse"]

HOST: Final = "127.0.0.1"
START_LIMIT_S: Final = 10.0
CHUNK_BYTES: Final = 65_536
CHUNKS_UNDER_WAY: Final = 256
DIRECTIONS: Final[tuple[Direction, ...]] = ("client_to_server", "server_to_client")

_Result = TypeVar("_Result")
_WelcomeClient = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class TcpProxy:
    """Forward connections to one server, as well or as badly as the test says.

    The seed decides the jitter: the same seed and the same arrivals give the same delays.
    """

    def __init__(self, target_host: str, target_port: int, *, seed: int = 0) -> None:
        self._target = (target_host, target_port)
        self._lanes = {way: _Lane(random.Random(f"{seed}/{way}")) for way in DIRECTIONS}
        self._door = _Door()
        self._welcome: Welcome = "forward"
        self._connections: set[_Connection] = set()
        self._accepted_count = 0
        self._cut_count = 0
        self._cut_seen = threading.Condition()
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="tcp-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result(START_LIMIT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    @property
    def host(self) -> str:
        """Where clients connect."""
        return HOST

    @property
    def port(self) -> int:
        """Where clients connect; the same for the proxy's whole life."""
        return self._door.port

    @property
    def connection_count(self) -> int:
        """How many connections are open now."""
        return len(self._connections)

    @property
    def accepted_count(self) -> int:
        """How many connections were ever accepted."""
        return self._accepted_count

    @property
    def cut_count(self) -> int:
        """How many connections `cut_after` has ended."""
        return self._cut_count

    def wait_for_cut(self, count: int = 1, *, timeout_s: float = 10.0) -> None:
        """Return when `cut_after` has ended `count` connections since the start; else TimeoutError."""
        with self._cut_seen:
            if not self._cut_seen.wait_for(lambda: self._cut_count >= count, timeout_s):
                raise TimeoutError(f"{self._cut_count} of {count} connections were cut in {timeout_s:g} s")

    def aim(self, target_host: str, target_port: int) -> None:
        """Forward new connections to another server; open ones go on with theirs."""

        async def aim_on_loop() -> None:
            self._target = (target_host, target_port)

        self._on_loop(aim_on_loop())

    def delay(self, delay_s: float, *, jitter_s: float = 0.0, direction: Direction | None = None) -> None:
        """Hold every chunk back for `delay_s` and up to `jitter_s` more; both ways unless one is named."""

        def slow(lane: _Lane) -> None:
            lane.delay_s, lane.jitter_s = delay_s, jitter_s

        self._change_lanes(slow, direction)

    def blackhole(self, direction: Direction | None = None) -> None:
        """Let nothing arrive and tell nobody; what is sent meanwhile, even an end, arrives after `heal`."""
        self._change_lanes(lambda lane: lane.passable.clear(), direction)

    def cut_after(self, *, server_bytes: int | None = None, client_bytes: int | None = None, times: int = 1) -> None:
        """Let exactly n more bytes of the server (or the client) pass on each connection; the next ends it.

        So `server_bytes=0` loses the reply after the server did the work, `client_bytes=0` the request.
        When `times` connections were ended so, all others are spared.
        """
        if server_bytes is not None:
            self._change_lanes(lambda lane: lane.arm(server_bytes, times), "server_to_client")
        if client_bytes is not None:
            self._change_lanes(lambda lane: lane.arm(client_bytes, times), "client_to_server")

    def half_open(self) -> None:
        """Accept new connections and never answer them, not even after `heal`."""
        self._on_loop(self._change_welcome("half_open"))

    def reset_new(self) -> None:
        """Accept new connections and reset them at once."""
        self._on_loop(self._change_welcome("reset"))

    def refuse_new(self) -> None:
        """Refuse new connections as a machine does where no server runs; open ones go on."""
        self._on_loop(self._change_welcome("refuse"))

    def reset_all(self) -> int:
        """Reset every open connection on both its sides; return how many there were."""
        return self._on_loop(self._reset_all())

    def heal(self) -> None:
        """Forward everything again; what was held back arrives."""
        self._change_lanes(_Lane.heal)
        self._on_loop(self._change_welcome("forward"))

    def _change_lanes(self, change: "Callable[[_Lane], None]", direction: Direction | None = None) -> None:
        async def change_on_loop() -> None:
            for way in DIRECTIONS if direction is None else (direction,):
                change(self._lanes[way])

        self._on_loop(change_on_loop())

    def _on_loop(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self) -> None:
        # Half of what asyncio's own loop takes: all traffic of a chaos run comes through here.
        with self._door, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve_until_stopped())

    async def _serve_until_stopped(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        await self._door.open(self._welcome_client)
        self._started.set_result(None)
        await self._stopping.wait()
        self._door.shut()
        await self._end_all()

    async def _end_all(self) -> None:
        """End what is open, and what was accepted and is not served yet."""
        while others := asyncio.all_tasks() - {_current_task()}:
            await self._reset_all()
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)

    async def _change_welcome(self, welcome: Welcome) -> None:
        self._welcome = welcome
        if welcome == "refuse":
            self._door.shut()
        else:
            await self._door.open(self._welcome_client)

    async def _reset_all(self) -> int:
        open_now = list(self._connections)
        for connection in open_now:
            connection.reset()
        await asyncio.gather(*(connection.task for connection in open_now), return_exceptions=True)
        return len(open_now)

    async def _welcome_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(_current_task(), [writer])
        self._accepted_count += 1
        self._connections.add(connection)
        try:
            await self._handle(connection, reader, writer)
        except asyncio.CancelledError:
            # Streams of Python 3.11 report a task that was cancelled as a failed one.
            if not connection.was_reset:
                raise
        finally:
            self._connections.discard(connection)
            connection.close()

    async def _handle(
        self, connection: "_Connection", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._welcome == "reset":
            _reset(writer)
        elif self._welcome == "half_open":
            await asyncio.Event().wait()  # until reset_all or the end cancels this task
        else:
            await self._forward(connection, reader, writer)

    async def _forward(
        self, connection: "_Connection", client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        try:
            server, to_server = await asyncio.open_connection(*self._target)
            connection.writers.append(to_server)
            async with asyncio.TaskGroup() as group:
                lanes = self._lanes
                group.create_task(lanes["client_to_server"].carry(connection, client, to_server))
                group.create_task(lanes["server_to_client"].carry(connection, server, to_client))
        except* _CutReached:
            self._count_cut()
        except* OSError:
            connection.abort()

    def _count_cut(self) -> None:
        with self._cut_seen:
            self._cut_count += 1
            self._cut_seen.notify_all()


class _CutReached(Exception):
    """The connection has passed all bytes that `cut_after` allows it."""


class _Door:
    """The port on which clients knock: kept for the proxy's whole life, listened on only while it is open."""

    def __init__(self) -> None:
        # Bound but not listening: clients are refused, and no other program can take the port meanwhile.
        self._kept = _bound_socket(0)
        self.port: int = self._kept.getsockname()[1]
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    async def open(self, welcome: _WelcomeClient) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(welcome, sock=_bound_socket(self.port))

    def shut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


@dataclass(eq=False)
class _Connection:
    """One client's connection: the task that serves it, and what it writes to."""

    task: "asyncio.Task[None]"
    writers: list[asyncio.StreamWriter]
    was_reset: bool = False

    def close(self) -> None:
        """End it orderly: what was written still arrives."""
        for writer in self.writers:
            writer.close()

    def abort(self) -> None:
        """Reset both sides."""
        for writer in self.writers:
            _reset(writer)

    def reset(self) -> None:
        """Reset both sides and stop serving it."""
        self.was_reset = True
        self.abort()
        self.task.cancel()


@dataclass
class _Cut:
    """An order to end connections after some bytes; counts for each connection what has passed since."""

    after_bytes: int
    times: int
    passed: "Counter[_Connection]" = field(default_factory=Counter)

    def allow(self, connection: _Connection, wanted_bytes: int) -> int:
        """Return how many of these bytes the connection may still pass."""
        allowed = min(wanted_bytes, self.after_bytes - self.passed[connection])
        self.passed[connection] += allowed
        return allowed


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one read gave: bytes, their end (empty), or the error that ended them."""

    release_at: float
    content: bytes | OSError


@dataclass
class _Lane:
    """One direction of all connections, and how it treats what it carries."""

    rng: random.Random
    delay_s: float = 0.0
    jitter_s: float = 0.0
    cut: _Cut | None = None
    passable: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.passable.set()

    def arm(self, after_bytes: int, times: int) -> None:
        self.cut = _Cut(after_bytes, times)

    def heal(self) -> None:
        self.delay_s = self.jitter_s = 0.0
        self.cut = None
        self.passable.set()

    async def carry(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bring everything from the reader to the writer; _CutReached or OSError when that ends early."""
        under_way: asyncio.Queue[_Chunk] = asyncio.Queue(CHUNKS_UNDER_WAY)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._collect(reader, under_way))
            group.create_task(self._deliver(connection, under_way, writer))

    async def _collect(self, reader: asyncio.StreamReader, under_way: asyncio.Queue[_Chunk]) -> None:
        content: bytes | OSError = b"."
        while content and isinstance(content, bytes):
            content = await _read(reader)
            await under_way.put(_Chunk(self._release_at(), content))

    def _release_at(self) -> float:
        return asyncio.get_running_loop().time() + self.delay_s + self.rng.uniform(0, self.jitter_s)

    async def _deliver(
        self, connection: _Connection, under_way: asyncio.Queue[_Chunk], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            chunk = await under_way.get()
            await asyncio.sleep(chunk.release_at - asyncio.get_running_loop().time())
            await self.passable.wait()
            if isinstance(chunk.content, OSError):
                raise chunk.content
            _refuse_if_closed(writer)
            if not chunk.content:
                writer.write_eof()
                return
            await self._write(connection, chunk.content, writer)

    async def _write(self, connection: _Connection, data: bytes, writer: asyncio.StreamWriter) -> None:
        cut = self.cut
        allowed = len(data) if cut is None else cut.allow(connection, len(data))
        writer.write(data[:allowed])
        await writer.drain()
        if cut is not None and allowed < len(data):
            self._use_up(cut)
            raise _CutReached

    def _use_up(self, cut: _Cut) -> None:
        cut.times -= 1
        if cut.times == 0 and self.cut is cut:
            self.cut = None


async def _read(reader: asyncio.StreamReader) -> bytes | OSError:
    try:
        return await reader.read(CHUNK_BYTES)
    except OSError as error:
        return error


def _refuse_if_closed(writer: asyncio.StreamWriter) -> None:
    """Where asyncio's own transport takes what comes too late, uvloop's says that it was used wrongly."""
    if writer.transport.is_closing():
        raise ConnectionResetError("the line is closed")


def _reset(writer: asyncio.StreamWriter) -> None:
    connected: socket.socket | None = writer.get_extra_info("socket")
    if connected is None or connected.fileno() < 0:
        # Closed already, by asyncio's word (None) or uvloop's (-1): there is nothing to reset.
        return
    # Closing with a linger time of zero sends RST in place of FIN.
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _bound_socket(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((HOST, port))
    return bound


def _current_task() -> "asyncio.Task[None]":
    task = asyncio.current_task()
    assert task is not None
    return task
