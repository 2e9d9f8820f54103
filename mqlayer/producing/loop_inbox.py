"""Passes settled messages to an event loop, many per wake-up."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from mqlayer.errors import InvalidInput
from mqlayer.producing.listeners import BatchListener


class LoopInbox:
    """Settled listeners and freed room for a loop. `put` and `note_change` may run in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._settled: deque[LoopListener] = deque()
        self._changed: asyncio.Future[None] | None = None
        self._called = False

    def check_loop(self) -> None:
        """Raise InvalidInput in another loop."""
        if asyncio.get_running_loop() is not self.loop:
            raise InvalidInput("the producer was started in another event loop: make one for each loop")

    def put(self, listener: LoopListener) -> None:
        """Finish a listener in the loop."""
        self._settled.append(listener)
        self._call()

    def note_change(self) -> None:
        """Wake waits for room or for the end of all messages."""
        if self._changed is not None:
            self._call()

    def next_change(self) -> asyncio.Future[None]:
        """Return a future of the next change; get it before reading the state."""
        if self._changed is None:
            self._changed = self.loop.create_future()
        return self._changed

    def _call(self) -> None:
        if not self._called:
            self._called = True
            # A loop that ended without stopping its producer hears nothing any more.
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared first: a later item schedules a call of its own.
        self._called = False
        settled = self._settled
        while settled:
            settled.popleft().finish()
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)


class LoopListener(BatchListener):
    """Waits for the messages of one call, in a loop."""

    __slots__ = ("_inbox", "done")

    def __init__(self, remaining: int, inbox: LoopInbox) -> None:
        super().__init__(remaining)
        self._inbox = inbox
        self.done: asyncio.Future[None] = inbox.loop.create_future()

    def notify(self) -> None:
        """Hand it to the loop."""
        self._inbox.put(self)

    def finish(self) -> None:
        """End the wait; in the loop."""
        if not self.done.done():
            self.done.set_result(None)
