"""A thread that repeats passes over one node's connection. No error ends it."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.error_text import where
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed
from mqlayer.health import Health, Liveness
from mqlayer.redis.node_connection import NodeConnection

log = logging.getLogger(__name__)


class NodeThread(ABC):
    """Base of readers and settlers; `wake` starts a pass.

    `work` names thread and log events; `node_lost` is called where the node's run is not armed.
    """

    def __init__(
        self, connection: NodeConnection, node_lost: Callable[[NodeId], None], *, name: str, work: str
    ) -> None:
        self._connection, self._node_lost, self._work = connection, node_lost, work
        self.wake = threading.Event()
        self._liveness = Liveness()
        # Error of the last pass, or empty.
        self._last_error = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-{work}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()
        self.wake.set()

    def join(self, until: float) -> None:
        """Wait for the end, until a time of `clock`."""
        self._thread.join(max(0.0, until - clock()))

    def health(self, limit_s: float) -> Health:
        """Report the thread and its last error."""
        name, last_error = self._connection.node.name, self._last_error
        # Other threads may see it before it starts.
        if self._thread.ident is not None and not self._thread.is_alive():
            return Health(stuck=(f"{self._work} of node {name} ended",))
        waits = (f"node {name}: {last_error}",) if last_error else ()
        return Health(self._liveness.stuck(f"{self._work} of node {name}", limit_s), waits)

    @abstractmethod
    def _loop(self) -> None:
        """Make passes until `_stopping`."""

    @abstractmethod
    def _pass(self) -> None:
        """Do the present work."""

    def _run(self) -> None:
        self._loop()
        self._connection.close()

    def _try_pass(self) -> bool:
        self._liveness.note_turn()
        try:
            return self._pass_or_repair()
        except MqlayerError as error:
            self._last_error = str(error)
            log.warning("%s_waits", self._work, extra={"reason": str(error)})
        except Exception as error:  # noqa: BLE001 - a thread that died would leave a member that does no more of this
            self._connection.close()
            self._last_error = where(error)
            log.error("%s_failed", self._work, extra={"node": self._connection.node.name, "error": where(error)})
        return False

    def _pass_or_repair(self) -> bool:
        try:
            self._pass()
        except NodeNotArmed as error:
            self._last_error = str(error)
            self._node_lost(self._connection.node.node_id)
            return False
        self._last_error = ""
        return True


def end_all(threads: Iterable[NodeThread], timeout_s: float) -> None:
    """End threads in parallel, so that silent nodes cost one timeout."""
    until, ending = clock() + timeout_s, list(threads)
    for thread in ending:
        thread.end()
    for thread in ending:
        thread.join(until)
