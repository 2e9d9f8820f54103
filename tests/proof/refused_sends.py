"""Sends that are to be refused."""

from __future__ import annotations

from typing import Any

from mqlayer.errors import PublishUnknown
from mqlayer.producing import Producer


def send_to_the_end(producer: Producer, topic: str, *, timeout_s: float, **facts: Any) -> None:
    """Send a message that is to be refused; where its time ends while a try is under way, its future tells that."""
    try:
        producer.send(topic, timeout_s=timeout_s, **facts)
    except PublishUnknown as error:
        if error.future is None:
            raise
        error.future.result(20)
