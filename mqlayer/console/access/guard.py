"""Bounds of requests, and cookies of answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mqlayer.console.access.cookies import SENT

BODY_BYTES: Final = 65_536
"""Forms have a reason and some names."""
TOO_LARGE: Final = f"A form of this console has at most {BODY_BYTES:,} bytes."


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse large bodies, add cookies."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        left = BODY_BYTES

        async def receiving() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, TOO_LARGE)
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                for line in scope.get(SENT, ()):
                    MutableHeaders(scope=message).append("set-cookie", line)
            await send(message)

        told = Headers(scope=scope).get("content-length", "0")
        if not told.isdigit() or int(told[:20]) > BODY_BYTES:
            await PlainTextResponse(TOO_LARGE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)(scope, receive, sending)
            return
        await self.app(scope, receiving, sending)
