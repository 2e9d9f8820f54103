"""The bank's consumption by ordered pop: a process that asks for batches, with neither membership nor partitions.

python -m examples.bank.receivers
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import msgspec
import psycopg

import mqlayer
from examples.bank.effects import CONCURRENCY, GROUP, TOPIC, Entry, ReadModel
from mqlayer.errors import AlreadyApplied, FenceError, MqlayerError, OutOfOrder, StaleToken
from mqlayer.logs import EventFormatter

READY: Final = "receiver_started"
WAIT_S: Final = 0.5
"""Longest wait for messages: a process that is asked to end does so after it."""

log = logging.getLogger("bank")

Line = list[mqlayer.PopMessage]


class Clerk:
    """Handles batches: the keys of one side by side, the messages of a key in turn."""

    def __init__(self, receiver: mqlayer.Receiver, model: ReadModel, pool: ThreadPoolExecutor) -> None:
        self._receiver, self._model, self._pool = receiver, model, pool

    def handle(self, batch: Iterable[mqlayer.PopMessage]) -> None:
        """Handle a batch, and acknowledge what has its effect."""
        done = [message for line in self._pool.map(self._handle_line, lines_of(batch)) for message in line]
        try:
            self._receiver.ack(done)
        except StaleToken as refusal:
            # Others have them by now, and find their effects.
            self._model.note_refusal(None, refusal)

    def _handle_line(self, line: Line) -> Line:
        """Return those of a key's messages that have their effect; the first that fails is given back."""
        for number, message in enumerate(line):
            try:
                self._apply(message)
            except (FenceError, StaleToken, OutOfOrder, psycopg.Error) as error:
                log.warning("message_given_back", extra={"reason": type(error).__name__})
                if isinstance(error, MqlayerError):
                    self._model.note_refusal(message.key, error)
                self._give_back(message)
                return line[:number]
        return line

    def _apply(self, message: mqlayer.PopMessage) -> None:
        entry = msgspec.json.decode(message.body, type=Entry)
        try:
            self._model.apply(message.key, entry, partial(self._receiver.fence, message=message))
        except AlreadyApplied as refusal:
            self._model.note_refusal(message.key, refusal)

    def _give_back(self, message: mqlayer.PopMessage) -> None:
        try:
            self._receiver.nack(message)
        except StaleToken as refusal:
            self._model.note_refusal(message.key, refusal)


def lines_of(batch: Iterable[mqlayer.PopMessage]) -> list[Line]:
    """Return the messages of a batch by key, each key's in order."""
    lines: dict[str | None, Line] = {}
    for message in batch:
        lines.setdefault(message.key, []).append(message)
    return list(lines.values())


def main() -> None:
    """Receive until asked to end."""
    _log_to_stderr()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    settings = mqlayer.Settings()
    model = ReadModel(settings)
    with ThreadPoolExecutor(CONCURRENCY) as pool, mqlayer.Receiver(TOPIC, group=GROUP, settings=settings) as receiver:
        clerk = Clerk(receiver, model, pool)
        log.info(READY)
        while not stopping.is_set():
            try:
                clerk.handle(receiver.receive(visibility_timeout_s=settings.lease_s, wait_s=WAIT_S))
            except MqlayerError as error:
                # What it had comes again, to whoever asks next.
                log.warning("receive_failed", extra={"reason": str(error)})
    model.close()


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


if __name__ == "__main__":
    main()
