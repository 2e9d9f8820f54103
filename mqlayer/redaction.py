"""Secrets that this process was given, kept out of every text that people or logs get.

An address is shown by its parsed parts (`mqlayer.postgres.dsn`, `mqlayer.redis.addresses`), so that no password
is in it to begin with. This is the second wall, for words that are not ours: of drivers, servers, applications.
"""

from __future__ import annotations

import json
import re
import threading
from typing import Final
from urllib.parse import quote, quote_plus

HIDDEN: Final = "***"
LIMIT: Final = 1_000
SHORT: Final = 4
"""Shorter ones are hidden where they stand alone only: every third word has an `a` in it."""
PLAIN_WORD: Final = re.compile(r"[a-z]{1,11}")
"""A password like `postgres` is no secret worth the name, and hiding it would blot the word out of every text."""
_IN_URL: Final = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s'\"<>]*@")
_NAMED: Final = re.compile(
    r"(?i)(?P<name>\w*(?:password|passwd|secret)\w*)\s*=\s*(?:'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?|[^\s&,;)\]}]+)"
)


class _SecretRegistry:
    """The secrets by age, and one expression that finds them in each form that text may have them in."""

    def __init__(self) -> None:
        self._values: dict[str, None] = {}
        self._lock = threading.Lock()
        self.found_by: re.Pattern[str] | None = None

    def add(self, values: tuple[str, ...]) -> None:
        wanted = [value for value in values if value and not PLAIN_WORD.fullmatch(value)]
        if all(value in self._values for value in wanted):
            return
        with self._lock:
            self._values |= dict.fromkeys(wanted)
            while len(self._values) > LIMIT:
                del self._values[next(iter(self._values))]
            forms = {form for value in self._values for form in _forms(value)}
            self.found_by = re.compile("|".join(_pattern(form) for form in sorted(forms, key=len, reverse=True)))


_known: Final = _SecretRegistry()


def register_secrets(*values: str | None) -> None:
    """Hide these from now on wherever `redact` looks."""
    _known.add(tuple(value for value in values if value))


def redact(text: str) -> str:
    """Return a text without the secrets that were given, nor what looks like one in a URL or a setting."""
    if _known.found_by is not None:
        text = _known.found_by.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", text)
    return _NAMED.sub(rf"\g<name>={HIDDEN}", text)


def _forms(value: str) -> set[str]:
    """Return how a secret may be written: as it is, in a URL, in a conninfo, in JSON, in Python."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    written = {value, escaped, repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    return written | {quote(value, safe=""), quote(value), quote_plus(value)}


def _pattern(form: str) -> str:
    return re.escape(form) if len(form) >= SHORT else rf"(?<!\w){re.escape(form)}(?!\w)"
