"""Assertions on published messages: by a TestApp, or on a connection of the test's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mqlayer.arguments import explain_methods
from mqlayer.testing.messages import PublishedMessage, TopicOrName, Wanted, matching, near_misses


@explain_methods
class Assertions(ABC):
    """`assert_published` and its opposite, on messages that a subclass knows."""

    @abstractmethod
    def published(self, topic: TopicOrName | None = None) -> list[PublishedMessage]:
        """Return the published messages, in order."""

    def assert_published(
        self,
        topic: TopicOrName,
        *,
        key: str | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] | None = None,
        count: int | None = None,
    ) -> PublishedMessage:
        """Assert that a message matches, or `count` do; return the first one.

        `body`: an equal value, a dict that is part of it, or a predicate. `headers` and `tags` may be a part. Raises
        AssertionError with the nearest misses.
        """
        return check_published(self.published(), Wanted(topic, key, body, headers, tags), count)

    def assert_not_published(
        self,
        topic: TopicOrName,
        *,
        key: str | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        """Assert that no message matches; arguments as of `assert_published`."""
        check_not_published(self.published(), Wanted(topic, key, body, headers, tags))


def check_published(messages: Sequence[PublishedMessage], wanted: Wanted, count: int | None) -> PublishedMessage:
    """Return the first match. Raises AssertionError."""
    found = matching(messages, wanted)
    if count is not None and len(found) != count and found:
        shown = "\n".join(f"  {message}" for message in found)
        raise AssertionError(f"{len(found)} messages match, not {count}: {wanted}\n{shown}")
    if not found:
        raise AssertionError(f"no message matches: {wanted}\n{near_misses(messages, wanted)}")
    return found[0]


def check_not_published(messages: Sequence[PublishedMessage], wanted: Wanted) -> None:
    """Raise AssertionError for a match."""
    found = matching(messages, wanted)
    if found:
        shown = "\n".join(f"  {message}" for message in found)
        raise AssertionError(f"{len(found)} messages match, none should: {wanted}\n{shown}")
