"""Filters for parked keys, dead messages and archived records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Final

from mqlayer.domain.names import encode_key
from mqlayer.domain.routing import lp_of
from mqlayer.domain.tags import check_tags
from mqlayer.errors import InvalidInput

MAX_DEAD_IDS: Final = 1_000
PARKED_CAUSES: Final = ("retry", "exhausted", "rejected", "paused", "redriven", "replayed")
DEAD_CAUSES: Final = ("exhausted", "rejected", "skipped", "discarded", "expired")


@dataclass(frozen=True, slots=True)
class ParkedFilter:
    """Filter of parked keys; None and False match all. `waiting`: keys that wait for an operator.

    `error`: part of an attempt's text, of the first ten messages, in any case. `since`, `until`: parking
    time, with a zone. `min_attempts`: of the head.
    """

    topic: str | None = None
    group: str | None = None
    key: str | None = None
    cause: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    waiting: bool = False
    min_attempts: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return query parameters. Raises InvalidInput."""
        check_cause(self.cause, PARKED_CAUSES)
        _check_times(self.since, self.until)
        name, lp = _encoded(self.key)
        return {
            "topic": self.topic,
            "group": self.group,
            "name": name,
            "lp": lp,
            "cause": self.cause,
            "error": self.error,
            "since": self.since,
            "until": self.until,
            "waiting": self.waiting,
            "min_attempts": self.min_attempts,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the set fields for JSON, without topic and group."""
        return _set_fields(replace(self, topic=None, group=None))

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> ParkedFilter:
        """Return the filter of an `as_json` value."""
        return cls(**{**value, **_times_of(value)})


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """Filter of dead messages; None matches all.

    `error`: part of the reason or a failed attempt's text, case-insensitive. `since`, `until`: time of death, with a
    zone.
    """

    key: str | None = None
    cause: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    dead_ids: tuple[int, ...] | None = None
    min_attempts: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return query parameters. Raises InvalidInput."""
        check_cause(self.cause, DEAD_CAUSES)
        _check_times(self.since, self.until)
        key, lp = _encoded(self.key)
        return {
            "key": key,
            "lp": lp,
            "cause": self.cause,
            "error": self.error,
            "since": self.since,
            "until": self.until,
            "dead_ids": None if self.dead_ids is None else list(self.dead_ids),
            "min_attempts": self.min_attempts,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the set fields for JSON."""
        return _set_fields(self)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> DeadFilter:
        """Return the filter of an `as_json` value."""
        named = {"dead_ids": tuple(value["dead_ids"])} if "dead_ids" in value else {}
        return cls(**{**value, **_times_of(value), **named})


@dataclass(frozen=True, slots=True)
class ReplayFilter:
    """Filter of archived records; None matches all.

    `since`, `until`: publish time by publishers' clocks, with a zone. `snapshot`: its name. `export`: where
    dropped batches are.
    """

    key: str | None = None
    tag: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    snapshot: str | None = None
    export: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return query parameters. Raises InvalidInput."""
        _check_times(self.since, self.until)
        if self.tag is not None:
            check_tags([self.tag])
        key, lp = _encoded(self.key)
        return {
            "key": key,
            "lp": lp,
            "tag": self.tag,
            "since": self.since,
            "until": self.until,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the set fields for JSON."""
        return _set_fields(self)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> ReplayFilter:
        """Return the filter of an `as_json` value."""
        return cls(**{**value, **_times_of(value)})


def check_cause(cause: str | None, known: tuple[str, ...]) -> None:
    """Raise InvalidInput for an unknown cause."""
    if cause is not None and cause not in known:
        raise InvalidInput(f"{cause!r} is no cause: choose of {', '.join(known)}")


def _check_times(*times: datetime | None) -> None:
    for time in times:
        if time is not None and time.tzinfo is None:
            raise InvalidInput(f"the time {time.isoformat()} has no time zone: add one")


def _encoded(key: str | None) -> tuple[bytes | None, int | None]:
    """Return a key's bytes and LP."""
    if key is None:
        return None, None
    name = encode_key(key)
    return name, int(lp_of(name))


def _set_fields(wanted: ParkedFilter | DeadFilter | ReplayFilter) -> dict[str, Any]:
    facts = {one.name: getattr(wanted, one.name) for one in fields(wanted)}
    return {name: _plain(value) for name, value in facts.items() if value is not None and value is not False}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return list(value) if isinstance(value, tuple) else value


def _times_of(value: Mapping[str, Any]) -> dict[str, datetime]:
    return {name: datetime.fromisoformat(value[name]) for name in ("since", "until") if name in value}
