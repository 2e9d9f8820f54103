"""Escape foreign text: a terminal obeys control characters.

They could clear the screen, hide text or fake a line.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Final

# Letters that show nothing.
_BLANK: Final = frozenset("\u115f\u1160\u2800\u3164\uffa0")


def is_printable(text: str) -> bool:
    """Whether a terminal shows each character."""
    return text.isprintable() and _BLANK.isdisjoint(text)


def escape(text: str, *, lines: bool = False) -> str:
    """Return text with unprintable characters as in JSON; `lines` keeps newlines.

    Unprintable: controls, direction marks, invisible and unassigned ones, line separators.
    """
    if lines:
        return "\n".join(escape(line) for line in text.split("\n"))
    if is_printable(text):
        return text
    return "".join(one if is_printable(one) else _escaped(one) for one in text)


def json_line(value: object) -> str:
    """Return a line of ASCII JSON; times in ISO form."""
    return json.dumps(value, default=_plain).replace("\x7f", "\\u007f")


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _escaped(one: str) -> str:
    return json_line(one)[1:-1]
