"""Find a handler by its path."""

from __future__ import annotations

import sys
from typing import Final

from mqlayer.consuming.api.app import App, Consumer
from mqlayer.errors import InvalidInput
from mqlayer.runtime.named_objects import load_named

UNREGISTERED: Final = "debug"
"""The group of a handler that no App has for the topic."""


def load_consumer(path: str, topic: str) -> Consumer:
    """Import a handler; return it as its module's App has it for the topic, else in a group of its own.

    Raises as `load_app`.
    """
    handler = load_named(path, "handler")
    if not callable(handler):
        raise InvalidInput(f"{path!r} is a {type(handler).__name__}: give the name of a handler")
    module = sys.modules[path.partition(":")[0]]
    for app in (found for found in vars(module).values() if isinstance(found, App)):
        for consumer in app.consumers:
            if consumer.handler is handler and consumer.topic == topic:
                return consumer
    app = App()
    app.consumer(topic, group=UNREGISTERED)(handler)
    return app.consumers[0]
