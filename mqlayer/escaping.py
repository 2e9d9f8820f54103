"""Text from outside as people may see it: a terminal takes control characters for commands.

Keys, headers, reasons, names and error texts come from applications. An escape sequence in one would clear a screen,
retitle a window or hide what follows; a newline would fake a line; a mark of direction would turn the text around.
"""

from __future__ import annotations

import json
from typing import Final

_BLANK: Final = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters by their class that show nothing."""


def is_printable(text: str) -> bool:
    """Return whether a terminal shows each character of a text, and does nothing by it."""
    return text.isprintable() and _BLANK.isdisjoint(text)


def escape(text: str, *, lines: bool = False) -> str:
    """Return a text with what is not to be seen in it escaped as in JSON; with `lines` its newlines stay.

    Escaped are all but what Unicode calls printable: C0 and C1, DEL, marks of direction, what has no width, line
    separators, what has no character assigned.
    """
    if is_printable(text):
        return text
    return "".join(one if is_printable(one) or (lines and one == "\n") else _escaped(one) for one in text)


def json_line(value: object) -> str:
    """Return a value as one line of JSON of printable ASCII only."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


def _escaped(one: str) -> str:
    return json_line(one)[1:-1]
