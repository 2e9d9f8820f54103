"""Remove this process's secrets from texts of drivers, servers and applications.

Addresses are shown by parsed parts, without passwords, in the first place.
"""

from __future__ import annotations

import json
import re
import threading
from itertools import chain
from typing import Final
from urllib.parse import quote, quote_plus

HIDDEN: Final = "***"
LIMIT: Final = 1_000
# Shorter secrets are hidden only as whole words: many words contain an `a`.
SHORT: Final = 4
# Such secrets stay visible: hiding `postgres` would garble texts.
PLAIN_WORD: Final = re.compile(r"[a-z]{1,11}")
_IN_URL: Final = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s'\"<>]*@")
# From a word's beginning: a search from each of its letters takes twice as long.
_NAMED: Final = re.compile(
    r"(?i)(?P<name>(?<!\w)\w*(?:password|passwd|secret)\w*)\s*=\s*(?:'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?|[^\s&,;)\]}]+)"
)


class _SecretRegistry:
    def __init__(self) -> None:
        self._forms_of: dict[str, frozenset[str]] = {}
        self._lock = threading.Lock()
        self._forms: tuple[str, ...] = ()

    def add(self, values: tuple[str, ...]) -> None:
        wanted = [value for value in values if value and not PLAIN_WORD.fullmatch(value)]
        if all(value in self._forms_of for value in wanted):
            return
        with self._lock:
            self._forms_of |= {value: _forms(value) for value in wanted}
            while len(self._forms_of) > LIMIT:
                del self._forms_of[next(iter(self._forms_of))]
            self._forms = tuple(chain.from_iterable(self._forms_of.values()))

    def hide(self, text: str) -> str:
        # A pattern of all forms would be compiled anew with each secret; a text contains hardly any.
        there = {form for form in self._forms if form in text}
        if not there:
            return text
        return re.sub("|".join(map(_pattern, sorted(there, key=len, reverse=True))), HIDDEN, text)


_known: Final = _SecretRegistry()


def register_secrets(*values: str | None) -> None:
    """Hide these in `redact`; the newest 1,000 count."""
    _known.add(tuple(value for value in values if value))


def redact(text: str) -> str:
    """Return text without registered secrets, URLs' credentials and passwords of settings."""
    text = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", _known.hide(text))
    return _NAMED.sub(rf"\g<name>={HIDDEN}", text)


def _forms(value: str) -> frozenset[str]:
    # Plain, and as in a URL, a conninfo, JSON and Python.
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    written = {value, escaped, repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return frozenset(written | {quote(value, safe=""), quote(value), quote_plus(value)})


def _pattern(form: str) -> str:
    return re.escape(form) if len(form) >= SHORT else rf"(?<!\w){re.escape(form)}(?!\w)"
