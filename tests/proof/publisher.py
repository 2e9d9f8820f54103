"""A process that publishes directly until it is killed: `python -m tests.proof.publisher COUNT`.

It writes a line per message that was acknowledged, key and number, once it knows it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from mqlayer.errors import AcknowledgedLoss, PartlyPublished, PublishAborted
from mqlayer.producing import Message, Producer, Receipt

KEYS = 7


def publish(count: int) -> None:
    """Publish numbered messages of some keys, in all ways."""
    with Producer(name="doomed") as producer:
        for number in range(count):
            key, body = f"k{number % KEYS}", b"%d" % number
            with suppress(AcknowledgedLoss, PublishAborted, PartlyPublished):
                if number % 3 == 0:
                    producer.send("orders", key=key, body=body)
                    say(key, number)
                elif number % 3 == 1:
                    producer.send_many("orders", [Message(key, body)])
                    say(key, number)
                else:
                    producer.send_async("orders", key=key, body=body).add_done_callback(teller(key, number))


def teller(key: str, number: int) -> Callable[[Future[Receipt]], None]:
    """Return what says that a message was acknowledged, when its future tells."""

    def tell(future: Future[Receipt]) -> None:
        if future.exception() is None:
            say(key, number)

    return tell


def say(key: str, number: int) -> None:
    """Write in one piece, so that a kill leaves whole lines."""
    sys.stdout.write(f"{key} {number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    publish(int(sys.argv[1]))
