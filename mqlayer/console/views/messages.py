"""Messages: pages of partitions, bounded searches, and the life of one message."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from mqlayer.console.body_files import BINARY, body_file
from mqlayer.console.lookups import check_bodies, topic_names, why_hidden
from mqlayer.console.node_reads import impatient
from mqlayer.console.page import ROWS, Action, Page, PagePart, Visit, part
from mqlayer.console.render import link, segment
from mqlayer.domain.body_fields import body_fields
from mqlayer.domain.body_text import decoded
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.escaping import json_line
from mqlayer.inspect import (
    FoundMessage,
    MessageContent,
    MessageFilter,
    MessagePage,
    MissingStep,
    StoredMessage,
    find_by_dedup_id,
    find_message,
    message_life,
    newest_messages,
    partition_page,
    search_messages,
    stored_messages,
)
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.schemas import load_schemas

FIELDS: Final = (
    "topic", "partition", "offset", "key", "since", "until", "header", "value", "trace_id", "dedup_id", "message",
    "records", "after",
)  # fmt: skip
DEPTHS: Final = (20_000, 200_000)
"""Records that a search looks at, at most: a person chooses."""
QUICK_S: Final = 1.0
THOROUGH_S: Final = 15.0
SHOWN: Final = 200
"""Characters of a body in a list."""
BODY: Final = 100_000
"""Characters of a body on its own page."""
HIDDEN: Final = "hidden"
SEARCHES: Final = 4
"""At once, so that other pages have threads and connections left."""
_searches: Final = threading.BoundedSemaphore(SEARCHES)


@dataclass(frozen=True, slots=True)
class Found:
    """A page of messages with a note, and the places of the pages beside it."""

    messages: Sequence[FoundMessage]
    note: str
    older: Mapping[str, Any] | None = None
    newer: Mapping[str, Any] | None = None
    missing: Sequence[MissingStep] = ()


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message of a page. `bytes`: of its body, None if it was not read; `stored`: None also where it is hidden.

    `large`: its body is stored outside of it.
    """

    found: FoundMessage
    bytes: int | None
    stored: StoredMessage | None
    hidden: bool
    large: bool = False

    @classmethod
    def of(cls, found: FoundMessage, stored: StoredMessage | None, *, hidden: bool) -> MessageRow:
        """Return a row without hidden parts."""
        reference = None if stored is None else stored.large_body
        size = None if stored is None else len(stored.body) if reference is None else reference.size
        return cls(found, size, None if hidden else stored, hidden, reference is not None)

    @property
    def preview(self) -> str:
        """The beginning of the body."""
        text = self._text
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"

    @property
    def _text(self) -> str:
        if self.stored is None:
            return ""
        kind, text = decoded(self.stored.body)
        return text or "" if kind == "hex" else self.stored.body.decode()

    def as_json(self) -> dict[str, Any]:
        """Return the row of an export."""
        one, stored = self.found, self.stored
        kind = HIDDEN if self.hidden else decoded(None if stored is None else stored.body)[0]
        return {
            "message": one.message,
            "partition": one.partition,
            "offset": one.offset,
            "key": one.key,
            "tags": list(one.tags),
            "published_at": one.published_at,
            "source": one.source,
            "headers": None if stored is None else dict(stored.headers),
            "bytes": self.bytes,
            "large": self.large,
            "body_is": kind,
            "body": None if stored is None else self._text,
        }


@dataclass(frozen=True, slots=True)
class _Question:
    """The form."""

    text: Mapping[str, str]
    since: datetime | None = None
    until: datetime | None = None
    numbers: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def of(cls, visit: Visit) -> _Question:
        """Return the form's fields. Raises InvalidInput."""
        text = {name: visit.text(name) for name in FIELDS} | {"key": visit.query.get("key", "")}
        numbers = {name: visit.number(name) if text[name] else None for name in ("partition", "offset")}
        return cls(text, _time(text["since"]), _time(text["until"]), numbers)

    @property
    def records(self) -> int:
        """How many records a search may look at."""
        return DEPTHS[-1] if self.text["records"] == str(DEPTHS[-1]) else DEPTHS[0]

    @property
    def within_s(self) -> float:
        """How long a search may take."""
        return THOROUGH_S if self.records == DEPTHS[-1] else QUICK_S

    @property
    def searches(self) -> bool:
        """Whether headers, a key, or a time over all partitions are looked for."""
        text = self.text
        by_time = self.since is not None and self.numbers["partition"] is None
        return bool(text["key"] or text["header"] or text["trace_id"] or by_time)

    def filter(self) -> MessageFilter:
        """Return the filter of a search."""
        text = self.text
        header = (text["header"], text["value"]) if text["header"] else None
        since = self.since
        if since is None and (header is not None or text["trace_id"]):
            since = datetime.now(UTC) - timedelta(hours=1)
        return MessageFilter(key=text["key"] or None, header=header, trace_id=text["trace_id"] or None, since=since,
                             until=self.until)  # fmt: skip


def _time(text: str) -> datetime | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no time: say it as in 2026-11-21T09:30, which is UTC") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


# -- the list ----------------------------------------------------------------------------------------------------------


def _load(visit: Visit) -> Mapping[str, Any]:
    hidden = why_hidden(visit)
    found: PagePart[Found] = part(lambda: _found(visit, hidden)) if visit.text("topic") else PagePart()
    rows: PagePart[list[MessageRow]] = (
        part(lambda: _rows(visit, found.value, hidden)) if found.value is not None else PagePart()
    )
    asked = {name: visit.text(name) for name in FIELDS} | {"key": visit.query.get("key", "")}
    older, newer = (
        link("/messages", **{**asked, "after": "", **place}) if place is not None else ""
        for place in ((found.value.older, found.value.newer) if found.value is not None else (None, None))
    )
    return {
        "topics": part(lambda: topic_names(visit)),
        "asked": asked,
        "depths": DEPTHS,
        "hidden": hidden,
        "found": found,
        "rows": rows,
        "older": older,
        "newer": newer,
        "export": link("/messages/export", **asked),
    }


def _rows(visit: Visit, found: Found | None, hidden: str) -> list[MessageRow]:
    messages = found.messages if found is not None else []
    stored = stored_messages(impatient(visit.runtime), visit.text("topic"), messages)
    return [
        MessageRow.of(one, stored.get(one.identity) if one.identity is not None else None, hidden=bool(hidden))
        for one in messages
    ]


def _found(visit: Visit, hidden: str) -> Found:
    runtime, asked = impatient(visit.runtime), _Question.of(visit)
    text, topic = asked.text, asked.text["topic"]
    if text["message"]:
        return _one(runtime, text["message"], topic)
    if text["dedup_id"]:
        named = find_by_dedup_id(runtime, topic, text["dedup_id"], key=text["key"] or None)
        return _one(runtime, str(named), topic)
    if (text["header"] or text["trace_id"]) and hidden:
        # A match would tell hidden text.
        raise InvalidInput(f"headers can't be searched: {hidden}")
    if text["value"] and not text["header"]:
        raise InvalidInput("name the header, too, whose value you look for")
    if asked.until is not None and not asked.searches and asked.numbers["partition"] is None:
        raise InvalidInput("an end of the time needs its beginning, a partition or a key: name one, too")
    if asked.searches:
        if asked.numbers["partition"] is not None or asked.numbers["offset"] is not None:
            raise InvalidInput(
                "a key, header or trace id is searched in all partitions: leave partition and offset out"
            )
        return _search(runtime, topic, asked)
    if asked.numbers["partition"] is None:
        if asked.numbers["offset"] is not None:
            raise InvalidInput("an offset is a partition's: name the partition, too")
        return _newest(runtime, topic)
    return _of_partition(runtime, topic, asked)


def _one(runtime: Runtime, named: str, topic: str) -> Found:
    found = find_message(runtime, named, topic=topic)
    source = "stream" if found.stored else "archive" if found.archived else "outbox"
    at = found.published_at or datetime.fromtimestamp(0, UTC)
    one = FoundMessage(named if found.identity is None else str(found.identity), source, found.key, at,
                       found.partition, found.offset, found.tags, found.identity)  # fmt: skip
    return Found([one], "The message of this id.")


def _search(runtime: Runtime, topic: str, asked: _Question) -> Found:
    wanted = asked.filter()
    if not _searches.acquire(timeout=QUICK_S):
        raise Conflict(f"{SEARCHES} searches run for others", "search again in a few seconds")
    try:
        page = search_messages(runtime, topic, wanted, limit=ROWS, after=asked.text["after"] or None,
                               records=asked.records, within_s=asked.within_s)  # fmt: skip
    finally:
        _searches.release()
    return Found(page.messages, _searched(page, wanted), _behind(page, wanted), {} if asked.text["after"] else None,
                 page.missing)  # fmt: skip


def _searched(page: MessagePage, wanted: MessageFilter) -> str:
    order = "the latest first" if wanted.key is not None or wanted.by_header else "the earliest first"
    since = f", from {wanted.since:%Y-%m-%d %H:%M:%S} UTC on" if wanted.since is not None else ""
    until = f" to {wanted.until:%Y-%m-%d %H:%M:%S} UTC" if wanted.until is not None else ""
    return f"{len(page.messages)} messages, {order}{since}{until}; looked at {page.looked:,} records of streams."


def _behind(page: MessagePage, wanted: MessageFilter) -> Mapping[str, Any] | None:
    if page.after is not None:
        return {"after": page.after}
    if len(page.messages) < ROWS:
        return None
    first, last = page.messages[0].published_at, page.messages[-1].published_at
    if first == last:
        # Nothing tells these apart.
        return None
    # Without a place to go on from: by the time of the last one, which comes again.
    return {"until": last.isoformat()} if wanted.by_header else {"since": last.isoformat()}


def _newest(runtime: Runtime, topic: str) -> Found:
    page = newest_messages(runtime, topic, limit=ROWS)
    rest = "" if page.read == page.there else f" of {page.there:,}: name a partition for the others"
    note = f"The newest {len(page.messages)} messages, the latest first, of {page.read} partitions{rest}."
    return Found(page.messages, note, missing=page.missing)


def _of_partition(runtime: Runtime, topic: str, asked: _Question) -> Found:
    partition = asked.numbers["partition"] or 0
    page = partition_page(runtime, topic, partition, offset=asked.numbers["offset"], at=asked.since, limit=ROWS)
    kept = f"offsets {page.first:,} to {page.past - 1:,} are kept" if page.past > page.first else "nothing is kept"
    earlier = page.earlier(ROWS)
    messages = [one for one in page.messages if asked.until is None or one.published_at <= asked.until]
    return Found(
        messages,
        f"Partition {partition}, in the order of its offsets; {kept}.",
        None if page.later is None else {"partition": partition, "offset": page.later, "since": ""},
        None if earlier is None else {"partition": partition, "offset": earlier, "since": ""},
    )


def _export(visit: Visit) -> Mapping[str, Any]:
    hidden = why_hidden(visit)
    if not visit.text("topic"):
        raise InvalidInput("name a topic")
    rows = _rows(visit, _found(visit, hidden), hidden)
    text = "".join(f"{json_line(one.as_json())}\n" for one in rows)
    # The same JSON: the file has no markup, also when opened as a page.
    return {"text": text.replace("<", "\\u003c").replace(">", "\\u003e")}


# -- one message -------------------------------------------------------------------------------------------------------


def _show(visit: Visit) -> Mapping[str, Any]:
    runtime, topic = impatient(visit.runtime), visit.text("topic")
    hidden = why_hidden(visit)
    found = find_message(runtime, visit.text("message"), topic=topic)
    content = None if hidden else found.content
    return {
        "found": found,
        "life": part(lambda: message_life(runtime, found)),
        "hidden": hidden,
        "headers": () if content is None else content.headers.items(),
        "body": None if content is None else _body(runtime, topic, content),
        "download": link(f"/bodies/{segment(topic)}/{segment(visit.text('message'))}"),
        "nothing_kept": not hidden and content is None,
    }


def _body(runtime: Runtime, topic: str, content: MessageContent) -> Mapping[str, Any]:
    if content.large_body is not None:
        return {"large": True, "bytes": content.large_body.size}
    body = content.body
    kind, text = decoded(body)
    schemas = load_schemas(runtime.control, topic).versions
    fields = body_fields(body, schemas[-1].schema) if schemas else None
    return {
        "large": False,
        "bytes": len(body),
        "kind": kind,
        "text": (text or "")[:BODY],
        "cut": max(0, len(text or "") - BODY),
        "version": schemas[-1].version if schemas else None,
        "fields": fields,
        "remarks": sum(bool(one.remark) for one in fields or ()),
    }


def _download(visit: Visit) -> Mapping[str, Any]:
    check_bodies(visit)
    named = visit.text("message")
    found = find_message(impatient(visit.runtime), named, topic=visit.text("topic"))
    if found.content is None:
        raise NotFound("body of message", named, "its page says what is kept")
    return body_file(visit, named, found.content.body, found.content.large_body)


PAGES: Final = (
    Page("/messages", "Messages", "messages.html", _load, menu="Messages", live=False),
    Page("/messages/export", "Messages", "", _export, live=False, media_type="application/x-ndjson"),
    Page("/messages/{topic}/{message:path}", "Message {message}", "message_life.html", _show, live=False),
    Page("/bodies/{topic}/{message:path}", "Body of message {message}", "", _download, live=False, media_type=BINARY),
)
ACTIONS: Final[tuple[Action, ...]] = ()
