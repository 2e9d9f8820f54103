"""What callers give and get, and the checks at the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import overload

import msgspec

from mqlayer.domain.dedup import encode_dedup_id, lp_of_unkeyed, token_of
from mqlayer.domain.message import encode_facts
from mqlayer.domain.names import check_body, check_headers, encode_key
from mqlayer.domain.routing import Lp, lp_of
from mqlayer.domain.tags import tags_text
from mqlayer.errors import InvalidInput, InvalidName
from mqlayer.producing.pending_send import NO_KEY_BULK, PendingSend, Receipt
from mqlayer.redis.wire import LINE_END, bulk, bulk_head

__all__ = [
    "NO_KEY_BULK",
    "Body",
    "Message",
    "Receipts",
    "chunks_of",
    "facts_bulk",
    "indices_within",
    "lp_and_key",
    "lp_and_token",
    "whole_body",
]

Body = bytes | bytearray | memoryview


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a batch: key (None for no order), body, headers, tags, and an id by which repetitions are known.

    The garbage collector does not look at it: lists of many cost it nothing.
    """

    key: str | None
    body: Body
    headers: Mapping[str, str] | None = None
    tags: Sequence[str] = ()
    dedup_id: str | None = None


class Receipts(Sequence[Receipt]):
    """The receipts of a batch in the order of its messages; each is made when it is asked for."""

    __slots__ = ("_indices", "_owners")

    def __init__(self, owners: Sequence[PendingSend]) -> None:
        self._owners = owners
        self._indices: list[int] = []

    def __len__(self) -> int:
        return len(self._owners)

    @overload
    def __getitem__(self, position: int) -> Receipt: ...

    @overload
    def __getitem__(self, position: slice) -> list[Receipt]: ...

    def __getitem__(self, position: int | slice) -> Receipt | list[Receipt]:
        if not self._indices:
            self._indices = indices_within(self._owners)
        if isinstance(position, slice):
            return [
                pending.receipt(index)
                for pending, index in zip(self._owners[position], self._indices[position], strict=True)
            ]
        return self._owners[position].receipt(self._indices[position])

    def __repr__(self) -> str:
        return f"<{len(self)} receipts>"


def indices_within(owners: Sequence[PendingSend]) -> list[int]:
    """Return for each message of a batch which one of its pending send's messages it is."""
    seen: dict[PendingSend, int] = {}
    indices = []
    for pending in owners:
        index = seen.get(pending, 0)
        indices.append(index)
        seen[pending] = index + 1
    return indices


@lru_cache(maxsize=65_536)
def lp_and_key(key: str) -> tuple[Lp, bytes]:
    """Return a key's LP and its bytes for the wire. Raises KeyTooLarge or InvalidName."""
    # Keys come from applications, whatever the annotation says.
    if not isinstance(key, str):
        raise InvalidName("message key", key)
    data = encode_key(key)
    return lp_of(data), bulk(data)


def lp_and_token(key: str | None, dedup_id: str | None, lp: Lp) -> tuple[Lp, bytes]:
    """Return the LP and the token of a message with a dedup id; of one without, the LP as given and no token.

    Raises InvalidInput for what is no id.
    """
    if dedup_id is None:
        return lp, b""
    data = encode_dedup_id(dedup_id)
    return (lp_of_unkeyed(data) if key is None else lp), token_of(None if key is None else encode_key(key), data)


def whole_body(topic: str, body: Body, limit: int) -> bytes:
    """Return the body as bytes if the topic takes it. Raises BodyTooLarge or InvalidInput."""
    return check_body(topic, body if type(body) is bytes else _as_bytes(body), limit)


def _as_bytes(body: object) -> bytes:
    if not isinstance(body, Body):
        raise InvalidInput(f"a body is bytes, not {type(body).__name__}: encode it")
    return bytes(body)


def facts_bulk(at_ms: int, headers: Mapping[str, str] | None, tags: Sequence[str] = ()) -> bytes:
    """Return a message's facts for the wire. Raises ReservedHeader, and InvalidInput for bad tags."""
    checked = check_headers(headers) if headers else None
    return bulk(encode_facts(at_ms, checked, tags_text(tags) if tags else ""))


def chunks_of(facts: bytes, key: bytes, body: bytes) -> tuple[bytes, ...]:
    """Return a message for the wire, of facts and key that are encoded and a body that is not."""
    return (facts, key, bulk_head(len(body)), body, LINE_END)
