"""The history of a key: its messages with their states, a page at a time, and the acts on the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from mqlayer.domain.names import encode_key
from mqlayer.domain.routing import lp_of
from mqlayer.errors import InvalidInput
from mqlayer.inspect.key_steps import steps_of_key
from mqlayer.inspect.message_life import LifeStep, MissingStep
from mqlayer.inspect.message_search import FoundMessage, MessageFilter, search_messages
from mqlayer.inspect.message_states import states_of
from mqlayer.inspect.stream_search import RECORDS_LIMIT
from mqlayer.runtime.runtime import Runtime

PAGE_LIMIT: Final = 100


class KeyMessage(msgspec.Struct, frozen=True):
    """A message of a key. `groups`: its state in each group."""

    found: FoundMessage
    groups: Mapping[str, str]


class KeyHistory(msgspec.Struct, frozen=True):
    """A page of a key's messages, the latest first, and the steps of the key itself. `after`: the next page."""

    topic: str
    key: str
    lp: int
    messages: Sequence[KeyMessage]
    steps: Sequence[LifeStep]
    missing: Sequence[MissingStep]
    after: str | None
    looked: int


def history_of_key(
    runtime: Runtime, topic: str, key: str, *, limit: int = 20, after: str | None = None, records: int = RECORDS_LIMIT
) -> KeyHistory:
    """Return a page of a key's history; `records`: of streams, at most. Raises NotFound, InvalidInput, KeyTooLarge."""
    if not 1 <= limit <= PAGE_LIMIT:
        raise InvalidInput(f"{limit} messages are no page: 1 to {PAGE_LIMIT}")
    page = search_messages(runtime, topic, MessageFilter(key=key), limit=limit, after=after, records=records)
    missing = list(page.missing)
    steps = steps_of_key(runtime, topic, key, page.messages, missing) if after is None else []
    states = states_of(runtime, topic, page.messages, missing)
    messages = [KeyMessage(one, groups) for one, groups in zip(page.messages, states, strict=True)]
    return KeyHistory(topic, key, int(lp_of(encode_key(key))), messages, steps, missing, page.after, page.looked)
