"""Bodies as text for people."""

from __future__ import annotations

import json


def decoded(body: bytes | None) -> tuple[str | None, str | None]:
    """Return a body's guessed format (json, text, hex) and text."""
    if body is None:
        return None, None
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return "hex", body.hex(" ")
    try:
        return "json", json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "text", text
