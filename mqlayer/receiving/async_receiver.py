"""Receivers of ordered pop for asyncio.

```python
async with mqlayer.AsyncReceiver("orders", group="mailer") as receiver:
    while running:
        for message in await receiver.receive(max_messages=32, visibility_timeout_s=30):
            await send_mail(message.body)
            await receiver.ack([message])
```

Both kinds of receivers share PopSession, which blocks. Two threads per AsyncReceiver run it: one asks for all calls,
one opens, settles and closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, Self, TypeVar

from mqlayer.arguments import explain_methods
from mqlayer.domain.body_streams import AsyncBodyStream
from mqlayer.errors import Conflict
from mqlayer.idempotency import arecord_effect
from mqlayer.postgres.caller_connections import run_async
from mqlayer.receiving.pop_message import PopMessage
from mqlayer.receiving.pop_session import PopSession, receive_call
from mqlayer.receiving.receive_thread import ReceiveThread
from mqlayer.receiving.receiver import ReceiverBase, not_open

CLOSE_S: Final = 5.0
"""Longest wait for a call to a node at closing."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Threads:
    receiving: ReceiveThread
    settling: ThreadPoolExecutor


@explain_methods
class AsyncReceiver(ReceiverBase):
    """`Receiver` for asyncio: the same arguments, promises and errors; it never blocks the event loop.

    Any number of tasks may receive and settle, in any event loop. A cancelled `receive` loses nothing: its messages
    go to the next `receive`, as the same attempt, or come again after their visibility timeout.
    A cancelled settlement may be done.
    """

    _threads: _Threads | None = None

    async def open(self) -> Self:
        """As `Receiver.open`."""
        if self._threads is not None:
            raise Conflict("the receiver is open", "close it first")
        settling = ThreadPoolExecutor(1, thread_name_prefix="mqlayer-settles")
        opening = settling.submit(self._connect)
        try:
            session = await asyncio.wrap_future(opening)
        except BaseException:
            opening.add_done_callback(_close_unused)
            settling.shutdown(wait=False)
            raise
        self._session, self._threads = session, _Threads(ReceiveThread(session), settling)
        self._threads.receiving.start()
        return self

    async def close(self) -> None:
        """As `Receiver.close`; calls that wait raise Conflict."""
        session, threads = self._session, self._threads
        self._session = self._threads = None
        if session is not None and threads is not None:
            closing = threads.settling.submit(_close, session, threads.receiving)
            threads.settling.shutdown(wait=False)
            await asyncio.shield(asyncio.wrap_future(closing))

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def receive(
        self,
        max_messages: int = 32,
        *,
        visibility_timeout_s: float = 30.0,
        wait_s: float = 20.0,
        attempt_id: str | None = None,
        ack: Iterable[PopMessage] = (),
        renew_for_s: float = 0.0,
    ) -> list[PopMessage]:
        """As `Receiver.receive`; among several, a call lasts up to 0.1 s longer."""
        call = receive_call(max_messages, visibility_timeout_s, wait_s, attempt_id, ack, renew_for_s)
        thread = self._running().receiving
        pending = thread.receive(call)
        try:
            return (await asyncio.wrap_future(pending.answer)).messages
        except asyncio.CancelledError:
            thread.cancel(pending)
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PopMessage:
        """Receive one message; the iteration ends when the receiver is closed.

        Settle each before the next: messages of its scope are withheld till then.
        """
        threads = self._running()
        try:
            while not (messages := await self.receive(1)):
                pass
        except Conflict:
            if self._threads is threads:
                raise
            raise StopAsyncIteration from None
        return messages[0]

    async def fetch_body(self, message: PopMessage) -> bytes:
        """As `Receiver.fetch_body`."""
        return await asyncio.to_thread(self._opened().body_of, message)

    def open_body(self, message: PopMessage) -> AsyncBodyStream:
        """As `Receiver.open_body`; nothing to await but its reads."""
        return self._opened().stream_of(message, AsyncBodyStream)

    async def ack(self, messages: Iterable[PopMessage]) -> None:
        """As `Receiver.ack`."""
        await self._settle(self._opened().ack, list(messages))

    async def nack(self, message: PopMessage, *, delay_s: float = 0.0, error: BaseException | None = None) -> None:
        """As `Receiver.nack`."""
        await self._settle(self._opened().nack, message, delay_s, error)

    async def extend(self, message: PopMessage, seconds: float) -> None:
        """As `Receiver.extend`."""
        await self._settle(self._opened().extend, message, seconds)

    async def fence(self, connection: Any, message: PopMessage) -> None:
        """As `Receiver.fence`, on an async connection (psycopg, SQLAlchemy)."""
        await run_async(connection, self._opened().fence(message))

    async def inbox(self, connection: Any, message: PopMessage, *, name: str | None = None) -> None:
        """As `Receiver.inbox`, on an async connection."""
        await arecord_effect(connection, self._opened().inbox_entry(message, name))

    async def _settle(self, settle: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        await asyncio.wrap_future(self._running().settling.submit(copy_context().run, partial(settle, *args, **kwargs)))

    def _running(self) -> _Threads:
        if self._threads is None:
            raise not_open()
        return self._threads


def _close(session: PopSession, receiving: ReceiveThread) -> None:
    receiving.stop(CLOSE_S)
    session.close()


def _close_unused(opening: Future[PopSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
