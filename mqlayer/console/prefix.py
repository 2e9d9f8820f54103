"""A path that a proxy puts before the console's own."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Prefixed:
    """ASGI application below a prefix, whether the proxy leaves it in the path or takes it away."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the prefix where it lacks."""
        if scope["type"] == "http" and self.prefix:
            path = scope["path"]
            inner = path.removeprefix(self.prefix) if f"{path}/".startswith(f"{self.prefix}/") else path
            scope = {**scope, "root_path": self.prefix, "path": self.prefix + (inner or "/")}
        await self.app(scope, receive, send)
