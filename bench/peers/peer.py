"""A system that the load is put on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from bench.peers.load import CheckedHandler, KeyedBody

if TYPE_CHECKING:
    from bench.peers.ground import Ground

PublishBatch = Callable[[Sequence[KeyedBody]], None]
"""Publishes messages and returns once the system has stored them."""

QUEUES: Final = ("rates", "latency", "order")
"""A queue for each of the measurements: none meets what another left."""


class PeerMissing(Exception):
    """A system can't be had on this machine; the text says why."""


class PeerServers(NamedTuple):
    """The running servers of a system: where clients find them, the processes whose time counts, and versions."""

    url: str
    pids: tuple[int, ...]
    versions: str


class Peer(ABC):
    """A system. `serve` runs in the runner, `publisher` and `consume` in the clients' processes."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    """What pip installs for its clients; none: they run in the project's environment."""
    stored: ClassVar[str]
    """What a publisher knows when its call returns."""
    shape: ClassVar[str]
    """How eight handlers share the keys."""
    sources: ClassVar[tuple[str, ...]] = ()
    """Where the system's own documents give these settings."""

    most_messages: ClassVar[int | None] = None
    """The most that it can take within the run's patience; the table tells the number that each got."""
    in_postgres: ClassVar[bool] = False
    """Whether PeerServers.url is a database whose planner must know the tables before the clients consume."""
    promises_order: ClassVar[bool] = True
    """Whether its documents promise the order of a key over eight handlers."""

    @abstractmethod
    def serve(self, ground: Ground) -> AbstractContextManager[PeerServers]:
        """Lend running servers with the empty queues of QUEUES. Raises PeerMissing."""

    @abstractmethod
    def publisher(self, url: str, queue: str) -> AbstractContextManager[PublishBatch]:
        """Lend a way to publish; each thread has its own."""

    @abstractmethod
    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        """Consume with eight handlers at once until it is done, acknowledging each message after its handler."""

    def client(self, ground: Ground) -> list[str | Path]:
        """Return the command of its clients, to which the runner adds the arguments of `bench.peers.client`."""
        return [ground.python(self), "-m", "bench.peers.client"]


def client_module(name: str) -> Any:
    """Import a module that the clients' environment has, and others may not."""
    return import_module(name)
