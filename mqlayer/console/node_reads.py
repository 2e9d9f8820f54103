"""Reads of nodes for pages: a silent node holds a page up for a second, and then no page for some."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Final

from mqlayer.errors import StoreUnavailable
from mqlayer.redis.cluster_connection import ClusterConnection
from mqlayer.redis.node_connection import NodeConnection, ServerFacts
from mqlayer.runtime.runtime import Runtime

NODE_S: Final = 1.0
SILENT_S: Final = 5.0
"""A node that did not answer in time is not asked again for so long, and then by one page."""


@dataclass(slots=True)
class SilentNodes:
    """Addresses that did not answer in time, with the reason; safe for threads."""

    _known: dict[str, tuple[float, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reason(self, url: str) -> str:
        """Return why not to ask a node, empty if the caller may."""
        with self._lock:
            until, reason = self._known.get(url, (0.0, ""))
            if reason and until <= time.monotonic():
                self._known[url] = time.monotonic() + SILENT_S, reason
                return ""
            return reason

    def note(self, url: str, reason: str) -> None:
        """Note a node's silence."""
        with self._lock:
            self._known[url] = time.monotonic() + SILENT_S, reason

    def forget(self, url: str) -> None:
        """Note a node's answer."""
        with self._lock:
            self._known.pop(url, None)


SILENT: Final = SilentNodes()


class _Impatient(NodeConnection):
    """Does not ask silent nodes."""

    def connect(self) -> ServerFacts:
        """Connect as NodeConnection does."""
        if self.facts is not None:
            return super().connect()
        url, began = self.node.url, time.monotonic()
        if reason := SILENT.reason(url):
            raise StoreUnavailable(self.node.address, reason)
        try:
            facts = super().connect()
        except StoreUnavailable as error:
            if time.monotonic() - began >= NODE_S / 2:
                SILENT.note(url, error.reason)
            else:
                SILENT.forget(url)
            raise
        SILENT.forget(url)
        return facts


class ImpatientConnection(_Impatient):
    """A connection that does not ask silent nodes."""


class ImpatientClusterConnection(_Impatient, ClusterConnection):
    """The same to a cluster."""


class ImpatientRuntime(Runtime):
    """A runtime whose nodes have short timeouts."""

    __slots__ = ()
    connection_class = ImpatientConnection
    cluster_connection_class = ImpatientClusterConnection


def impatient(runtime: Runtime) -> Runtime:
    """Return a runtime for reads of pages."""
    limits = {"connect_timeout_s": NODE_S, "socket_timeout_s": NODE_S}
    settings = runtime.settings.model_copy(update=limits)
    return ImpatientRuntime(runtime.control, settings, runtime.application, runtime.actor)
