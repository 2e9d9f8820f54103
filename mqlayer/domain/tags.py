"""Tags of messages and groups' filters. Header form: `docs/design/chain-and-marks.md`.

Nodes compare hashes (log_select), members names. SQL twin: `tags_v1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, Final, Literal

from mqlayer.arguments import explain
from mqlayer.errors import InvalidInput

TAG_FORM: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
TAG_LIMIT: Final = 8
FILTER_LIMIT: Final = 32
TAGS_HEADER: Final = "mq-tags"
NO_FILTER: Final = "none"

Match = Literal["any", "all"]


def check_tags(tags: Iterable[str], limit: int = TAG_LIMIT) -> tuple[str, ...]:
    """Return distinct tags, sorted. Raises InvalidInput."""
    if isinstance(tags, str):
        raise InvalidInput(f"tags are a list of names, not the text {tags!r}")
    # Applications may pass any type.
    names: tuple[Any, ...] = tuple(tags)
    for name in names:
        if not isinstance(name, str) or TAG_FORM.fullmatch(name) is None:
            raise InvalidInput(f"bad tag {name!r}: use a-z or 0-9 first, then a-z 0-9 _ . - up to 63 characters")
    distinct = tuple(sorted(set(names)))
    if len(distinct) > limit:
        raise InvalidInput(f"{len(distinct)} tags, at most {limit}")
    return distinct


def tag_hash(tag: str) -> str:
    """Return the hash that nodes compare."""
    return sha256(tag.encode()).hexdigest()[:8]


def tags_text(tags: Iterable[str]) -> str:
    """Return the header's value for one or more tags. Raises InvalidInput."""
    try:
        return _text_of(check_tags(tags) if isinstance(tags, str) else tuple(tags))
    except TypeError:
        raise InvalidInput(f"tags are a list of names, not {type(tags).__name__}") from None


@lru_cache(maxsize=4_096)
def _text_of(tags: tuple[str, ...]) -> str:
    names = check_tags(tags)
    return f"{''.join(map(tag_hash, names))}:{','.join(names)}"


def tags_of(text: str) -> tuple[str, ...]:
    """Return a header value's tags."""
    return tuple(text.partition(":")[2].split(","))


@dataclass(frozen=True)
class TagFilter:
    """A group's filter, as text ``any:eu,vip``."""

    match: Match
    tags: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> TagFilter | None:
        """Parse a setting; None for "none". Raises InvalidInput."""
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
        """The hashes for nodes."""
        return tuple(map(tag_hash, self.tags))

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return frozenset(self.tags)

    def takes(self, tags: Iterable[str]) -> bool:
        """Whether a message with these tags passes."""
        return not self._wanted.isdisjoint(tags) if self.match == "any" else self._wanted.issubset(tags)


@explain
def any_of(*tags: str) -> str:
    """Return a filter for any of these tags. Raises InvalidInput."""
    return str(TagFilter("any", check_tags(tags, FILTER_LIMIT))) if tags else _nothing("any_of")


@explain
def all_of(*tags: str) -> str:
    """Return a filter for all these tags. Raises InvalidInput."""
    return str(TagFilter("all", check_tags(tags))) if tags else _nothing("all_of")


def _nothing(name: str) -> str:
    raise InvalidInput(f"{name} needs a tag: a group without a filter has {NO_FILTER!r}")
