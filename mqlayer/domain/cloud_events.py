"""CloudEvents attributes as headers: binary content mode, named as in the Kafka protocol binding of CloudEvents 1.0."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Protocol

from mqlayer.arguments import check_fields, explain
from mqlayer.errors import InvalidInput

VERSION: Final = "1.0"
PREFIX: Final = "ce_"
CONTENT_TYPE: Final = "content-type"
_NAME: Final = re.compile(r"[a-z0-9]{1,20}")
_OWN: Final = frozenset(
    ("id", "source", "type", "specversion", "subject", "time", "dataschema", "datacontenttype", "data")
)


@dataclass(frozen=True, slots=True)
class CloudEvents:
    """What the messages of a topic say of themselves as CloudEvents.

    `source`: a URI reference, such as "/shop"; `type`: a name such as "com.example.order.placed", or a function of the
    body. `content_type`: default by the body's type. `extensions`: further attributes, names of a-z and 0-9.
    """

    source: str
    type: str | Callable[[Any], str]
    content_type: str | None = None
    dataschema: str | None = None
    extensions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidInput."""
        check_fields(self)
        if not self.source or not self.type:
            raise InvalidInput("a CloudEvent has a source and a type: say both, such as source='/shop'")
        for name in self.extensions:
            if not _NAME.fullmatch(name) or name in _OWN:
                raise InvalidInput(f"{name!r} is no name of an extension: up to 20 of a-z and 0-9, and no attribute's")

    def headers(self, body: Any, *, event_id: str, time: datetime, subject: str | None, content: str) -> dict[str, str]:
        """Return the headers of a body; `content`: its content type, where none was said."""
        attributes = {
            "specversion": VERSION,
            "id": event_id,
            "source": self.source,
            "type": self.type if isinstance(self.type, str) else self.type(body),
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        }
        if subject:
            attributes["subject"] = subject
        if self.dataschema:
            attributes["dataschema"] = self.dataschema
        named = {PREFIX + name: value for name, value in {**attributes, **self.extensions}.items()}
        return {**named, CONTENT_TYPE: self.content_type or content}


@dataclass(frozen=True, slots=True)
class CloudEvent:
    """The attributes of a received CloudEvent; None for the absent. Its data is the message's body."""

    id: str
    source: str
    type: str
    specversion: str
    subject: str | None = None
    time: datetime | None = None
    datacontenttype: str | None = None
    dataschema: str | None = None
    extensions: Mapping[str, str] = field(default_factory=dict)


class WithHeaders(Protocol):
    """A Context, a BatchMessage, a PopMessage."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers."""


@explain
def cloud_event(message: WithHeaders) -> CloudEvent | None:
    """Return the CloudEvents attributes of a message; None if it is no CloudEvent."""
    found = {name.removeprefix(PREFIX): value for name, value in message.headers.items() if name.startswith(PREFIX)}
    if not found.keys() >= {"id", "source", "type", "specversion"}:
        return None
    return CloudEvent(
        found["id"],
        found["source"],
        found["type"],
        found["specversion"],
        found.get("subject"),
        _time(found.get("time")),
        message.headers.get(CONTENT_TYPE),
        found.get("dataschema"),
        {name: value for name, value in found.items() if name not in _OWN},
    )


def _time(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None
