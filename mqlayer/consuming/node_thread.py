"""A thread that works on one connection to a node, pass after pass, until it is stopped. No error ends it."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from mqlayer.consuming.clock import clock
from mqlayer.consuming.faults import where
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed
from mqlayer.health import Health, Turns
from mqlayer.redis.nodes import NodeConnection

log = logging.getLogger(__name__)


class NodeThread(ABC):
    """What the reading and the settling thread of a node have in common. `wake` has it look for work at once.

    `work` names what it does in log events and in the thread's name; `node_lost` is told when the node is not the
    armed run.
    """

    def __init__(self, line: NodeConnection, node_lost: Callable[[NodeId], None], *, name: str, work: str) -> None:
        self._line, self._node_lost, self._work = line, node_lost, work
        self.wake = threading.Event()
        self._turns = Turns()
        # Why the last pass did not go well; empty when it did.
        self._trouble = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-{work}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Have it end what it is at."""
        self._stopping.set()
        self.wake.set()

    def join(self, until: float) -> None:
        """Wait until it has ended, up to a time of this process's clock."""
        self._thread.join(max(0.0, until - clock()))

    def health(self, limit_s: float) -> Health:
        """Say whether it turns, and what keeps its last pass from being done."""
        name, trouble = self._line.node.name, self._trouble
        # One that is about to be started can be seen by others already.
        if self._thread.ident is not None and not self._thread.is_alive():
            return Health(stuck=(f"{self._work} of node {name} ended",))
        waits = (f"node {name}: {trouble}",) if trouble else ()
        return Health(self._turns.stuck(f"{self._work} of node {name}", limit_s), waits)

    @abstractmethod
    def _loop(self) -> None:
        """Make passes until `_stopping`."""

    @abstractmethod
    def _pass(self) -> None:
        """Do what there is to do now."""

    def _run(self) -> None:
        self._loop()
        self._line.close()

    def _try_pass(self) -> bool:
        """Make a pass; say whether it went well. Whatever went wrong is said, and tried again."""
        self._turns.note()
        try:
            return self._pass_or_repair()
        except MqlayerError as error:
            self._trouble = str(error)
            log.warning("%s_waits", self._work, extra={"reason": str(error)})
        except Exception as error:  # noqa: BLE001 - a thread that died would leave a member that does no more of this
            self._line.close()
            self._trouble = where(error)
            log.error("%s_failed", self._work, extra={"node": self._line.node.name, "error": where(error)})
        return False

    def _pass_or_repair(self) -> bool:
        """Make a pass; where the node is not the armed run, tell of it and say that there was none."""
        try:
            self._pass()
        except NodeNotArmed as error:
            self._trouble = str(error)
            self._node_lost(self._line.node.node_id)
            return False
        self._trouble = ""
        return True


def end_all(threads: Iterable[NodeThread], timeout_s: float) -> None:
    """End threads side by side: those whose nodes are silent take no longer together than one of them."""
    until, ending = clock() + timeout_s, list(threads)
    for thread in ending:
        thread.end()
    for thread in ending:
        thread.join(until)
