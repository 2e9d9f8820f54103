"""Classes of keys, for example a tenant's: by a prefix of the key, or by a header."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from mqlayer.domain.message import NO_KEY, Record
from mqlayer.domain.names import RESERVED_PREFIX
from mqlayer.errors import InvalidInput

NO_CLASSES: Final = "none"
OTHERS: Final = b""
"""The class of messages without the separator or header."""
LONGEST: Final = 64
CLASS_BYTES: Final = 255
"""Of a longer name, the first ones count; nodes do the same."""
PREFIX: Final = "prefix:"
HEADER: Final = "header:"


@dataclass(frozen=True, slots=True)
class KeyClassRule:
    """`prefix:` and a separator, or `header:` and a name."""

    text: str
    separator: bytes
    header: str
    needle: bytes

    def of(self, record: Record) -> bytes:
        """Return a message's class."""
        if self.separator:
            name, found, _ = record.key.partition(self.separator)
            return name[:CLASS_BYTES] if found and record.key != NO_KEY else OTHERS
        return record.headers.get(self.header, "").encode()[:CLASS_BYTES] if self.needle in record.m else OTHERS


@cache
def key_class_rule(text: str) -> KeyClassRule | None:
    """Return a checked `key_class`, None for none."""
    if text.startswith(PREFIX):
        return KeyClassRule(text, text.removeprefix(PREFIX).encode(), "", b"")
    if text.startswith(HEADER):
        name = text.removeprefix(HEADER)
        return KeyClassRule(text, b"", name, name.encode())
    return None


def check_key_class(text: str | None) -> None:
    """Raise InvalidInput for an impossible `key_class`."""
    if text in (None, NO_CLASSES):
        return
    kind = next((kind for kind in (PREFIX, HEADER) if text.startswith(kind)), "")
    name = text.removeprefix(kind)
    if not kind or not name or len(text) > LONGEST or not name.isascii() or not name.isprintable():
        raise InvalidInput(
            f"key_class is prefix: and a separator, header: and a name, or none, in up to {LONGEST} ASCII characters, "
            f"not {text!r}: say prefix:/ for keys as tenant/order"
        )
    if kind == HEADER and name.startswith(RESERVED_PREFIX):
        raise InvalidInput(f"headers {RESERVED_PREFIX}… are mqlayer's own, and handlers see none of them: take another")
