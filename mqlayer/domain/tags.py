"""Tags of messages, and filters of groups by them.

In a record tags are the header ``mq-tags``: ``<hashes>:<names>``, both in the order of the names; eight hex digits of
hash for each, names divided by commas. Nodes compare hashes (log_select), members the names. `tags_v1` makes the same
in SQL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, Final, Literal

from mqlayer.errors import InvalidInput

TAG_FORM: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
TAG_LIMIT: Final = 8
"""How many tags a message may have."""
FILTER_LIMIT: Final = 32
"""How many tags a filter may name."""
TAGS_HEADER: Final = "mq-tags"
NO_FILTER: Final = "none"

Match = Literal["any", "all"]


def check_tags(tags: Iterable[str], limit: int = TAG_LIMIT) -> tuple[str, ...]:
    """Return tags once each, sorted. Raises InvalidInput for too many, and for what is no tag."""
    if isinstance(tags, str):
        raise InvalidInput(f"tags are a list of names, not the text {tags!r}")
    # They come from applications, whatever the annotation says.
    names: tuple[Any, ...] = tuple(tags)
    for name in names:
        if not isinstance(name, str) or TAG_FORM.fullmatch(name) is None:
            raise InvalidInput(f"bad tag {name!r}: use a-z or 0-9 first, then a-z 0-9 _ . - up to 63 characters")
    distinct = tuple(sorted(set(names)))
    if len(distinct) > limit:
        raise InvalidInput(f"{len(distinct)} tags, at most {limit}")
    return distinct


def tag_hash(tag: str) -> str:
    """Return what nodes compare of a tag."""
    return sha256(tag.encode()).hexdigest()[:8]


def tags_text(tags: Iterable[str]) -> str:
    """Return the value of the header for a message's tags, one at the least. Raises what check_tags does."""
    try:
        return _text_of(check_tags(tags) if isinstance(tags, str) else tuple(tags))
    except TypeError:
        raise InvalidInput(f"tags are a list of names, not {type(tags).__name__}") from None


@lru_cache(maxsize=4_096)
def _text_of(tags: tuple[str, ...]) -> str:
    names = check_tags(tags)
    return f"{''.join(map(tag_hash, names))}:{','.join(names)}"


def tags_of(text: str) -> tuple[str, ...]:
    """Return the tags that a header's value names."""
    return tuple(text.partition(":")[2].split(","))


@dataclass(frozen=True)
class TagFilter:
    """Which messages a group wants: with any of these tags, or with all of them. Its text is ``any:eu,vip``."""

    match: Match
    tags: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> TagFilter | None:
        """Return the filter that a setting says, None for "none". Raises InvalidInput."""
        if text == NO_FILTER:
            return None
        match, _, names = str(text).partition(":")
        if match == "any":
            return cls("any", check_tags(names.split(","), FILTER_LIMIT))
        if match == "all":
            return cls("all", check_tags(names.split(",")))
        raise InvalidInput(f"{text!r} is no filter: say for example any:eu,vip, or all:eu,vip, or {NO_FILTER}")

    def __str__(self) -> str:
        return f"{self.match}:{','.join(self.tags)}"

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """What nodes look for."""
        return tuple(map(tag_hash, self.tags))

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return frozenset(self.tags)

    def takes(self, tags: Iterable[str]) -> bool:
        """Say whether the group wants a message with these tags."""
        return not self._wanted.isdisjoint(tags) if self.match == "any" else self._wanted.issubset(tags)


def any_of(*tags: str) -> str:
    """Return the filter for messages with any of some tags, as groups take it. Raises InvalidInput."""
    return str(TagFilter("any", check_tags(tags, FILTER_LIMIT))) if tags else _nothing("any_of")


def all_of(*tags: str) -> str:
    """Return the filter for messages with all of some tags, as groups take it. Raises InvalidInput."""
    return str(TagFilter("all", check_tags(tags))) if tags else _nothing("all_of")


def _nothing(name: str) -> str:
    raise InvalidInput(f"{name} needs a tag: a group without a filter has {NO_FILTER!r}")
