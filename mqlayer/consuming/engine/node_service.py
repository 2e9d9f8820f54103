"""Background work over one node's connection."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.runtime.service import Service


class NodeService(Service):
    """Base of readers and settlers.

    `work` names thread and log events; `node_lost` is called where the node's run is not armed.
    """

    def __init__(
        self, connection: NodeConnection, node_lost: Callable[[NodeId], None], *, name: str, work: str, retry_s: float
    ) -> None:
        title = f"{work} of node {connection.node.name}"
        super().__init__(f"{name}-{work}", title=title, event=work, retry_s=retry_s)
        self._connection, self._node_lost = connection, node_lost

    @abstractmethod
    def _serve(self) -> None:
        """Do the present work."""

    def _pass(self) -> None:
        try:
            self._serve()
        except NodeNotArmed as error:
            # Arming may wait for long: meanwhile, health tells why.
            self.last_error = str(error)
            self._node_lost(self._connection.node.node_id)
            raise

    def _waits(self) -> tuple[str, ...]:
        return (f"node {self._connection.node.name}: {self.last_error}",) if self.last_error else ()

    def _after_failure(self, error: Exception) -> None:
        if not isinstance(error, MqlayerError):
            self._connection.close()

    def _report(self, error: Exception) -> None:
        # Losing and arming a node are logged.
        if not isinstance(error, NodeNotArmed):
            super()._report(error)

    def _close(self) -> None:
        self._connection.close()

    def _facts(self) -> Mapping[str, Any]:
        return {"node": self._connection.node.name}
