"""Reads of nodes for pages: a silent node holds a page up for half a second at most."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mqlayer.runtime.runtime import Runtime

NODE_S: Final = 0.5


def impatient(runtime: Runtime) -> Runtime:
    """Return a runtime with short timeouts of nodes."""
    limits = {"connect_timeout_s": NODE_S, "socket_timeout_s": NODE_S}
    return replace(runtime, settings=runtime.settings.model_copy(update=limits))
