"""`publish`, `peek` and `tail`: messages from and to a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer

from mqlayer import outbox
from mqlayer.cli.message_output import HIDDEN, is_hidden
from mqlayer.cli.option_rules import RuledCommand, excludes, needs
from mqlayer.cli.options import TopicArgument, parse_time_option
from mqlayer.cli.output import JsonOption, echo, format_key, pluralize, show_rows
from mqlayer.cli.runtime import application_here, runtime_here
from mqlayer.domain.body_text import decoded
from mqlayer.domain.message import TTL_HEADER
from mqlayer.domain.time_to_live import expires_after
from mqlayer.errors import InvalidInput
from mqlayer.groups.start_positions import Start
from mqlayer.inspect import StoredMessage, TopicReader
from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime

SCAN_LIMIT: Final = 100_000
"""Records that `peek` looks at for those of a key."""
POLL_S: Final = 0.2
REFRESH_S: Final = 2.0
BATCH: Final = 500
"""Lines of one transaction."""
SHOWN_LIMIT: Final = 300

KeyOption = Annotated[str | None, typer.Option(help="Only messages of this key.")]
PartitionOption = Annotated[int | None, typer.Option(help="Only this partition.")]
OffsetOption = Annotated[int | None, typer.Option(min=1, help="From this offset of the partition on.")]
SinceOption = Annotated[str | None, typer.Option(help="Published then or later: a time with its zone.")]


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command(cls=RuledCommand)(publish)
    app.command(cls=RuledCommand)(peek)
    app.command(cls=RuledCommand)(tail)


@excludes("--body", "--file", why="a message has one body")
@excludes("--body", "--lines", why="each line is a body")
@excludes("--key", "--lines", why="a line may begin with its key: KEY, a tab, and the body")
@excludes("--dedup-id", "--lines", why="it names one message")
def publish(
    topic: TopicArgument,
    key: Annotated[str | None, typer.Option(help="The message key; messages of a key keep their order.")] = None,
    body: Annotated[str | None, typer.Option(help="The body; without it or --file, standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the body from a file.")] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="A message per line: KEY, a tab, and the body; without a tab, no key.")
    ] = False,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; several may be.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag; several may be.")] = None,
    dedup_id: Annotated[str | None, typer.Option(help="Publish it once while this id is remembered.")] = None,
    ttl_s: Annotated[
        float | None,
        typer.Option("--expires-after", metavar="SECONDS", help="Its time to live; the topic's counts too."),
    ] = None,
) -> None:
    """Publish through the outbox of MQLAYER_APP_DSN; a relay moves it to its partition."""
    headers = _headers(header or ())
    if ttl_s is not None:
        if TTL_HEADER in headers:
            raise InvalidInput(f"--header {TTL_HEADER} says its time to live already: leave out --expires-after")
        headers |= expires_after(ttl_s)
    with application_here() as database:
        publisher = _Publisher(database, topic, headers, tuple(tag or ()))
        if lines:
            echo(f"{pluralize(publisher.publish_lines(_input(file)), 'message')} published to topic {topic}")
            return
        with _input_file(file) as opened:
            data = _CountedFile(BytesIO(body.encode()) if body is not None else opened)
            if not publisher.publish(key, data, dedup_id):
                echo(f"key {format_key(key)} had a message with dedup id {dedup_id} already: nothing was published")
                return
    echo(f"a message of {pluralize(data.size, 'byte')} published to topic {topic}, key {format_key(key)}")


@excludes("--offset", "--since", why="both say where to begin")
@needs("--offset", "--partition", why="an offset is a partition's")
def peek(
    topic: TopicArgument,
    key: KeyOption = None,
    partition: PartitionOption = None,
    offset: OffsetOption = None,
    since: SinceOption = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="How many, at most.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show the newest messages, or the first from an offset, a time or of a key; nothing is settled."""
    begins_somewhere = not (offset is None and since is None and key is None)
    with runtime_here() as runtime, _reader(runtime, topic, key, partition, offset, since, latest=False) as reader:
        if begins_somewhere:
            found = list(islice(_until_end(reader), limit))
        else:
            reader.move_to_last(limit)
            found = sorted(_until_end(reader), key=lambda message: message.published_at)[-limit:]
        hidden = is_hidden(runtime)
        show_rows(_rows(found, as_json=as_json, hidden=hidden), as_json=as_json, nothing="no message is there", by=3)
        if reader.scanned >= SCAN_LIMIT and len(found) < limit and not as_json:
            echo(f"looked at {reader.scanned} messages: more may follow; begin later with --since")


@excludes("--offset", "--since", why="both say where to begin")
@needs("--offset", "--partition", why="an offset is a partition's")
def tail(
    topic: TopicArgument,
    key: KeyOption = None,
    partition: PartitionOption = None,
    offset: OffsetOption = None,
    since: SinceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show messages as they come, from now or from an offset or a time on, until Ctrl+C; nothing is settled."""
    with runtime_here() as runtime, _reader(runtime, topic, key, partition, offset, since, latest=True) as reader:
        hidden = is_hidden(runtime)
        refresh_at = time.monotonic() + REFRESH_S
        while True:
            for message in reader.read():
                _show_line(message, as_json=as_json, hidden=hidden)
            sys.stdout.flush()
            if not reader.at_end:
                continue
            time.sleep(POLL_S)
            if time.monotonic() >= refresh_at:
                reader.refresh()
                refresh_at = time.monotonic() + REFRESH_S


class _Publisher:
    """Publishes to a topic with the same headers and tags."""

    def __init__(self, database: Database, topic: str, headers: Mapping[str, str], tags: tuple[str, ...]) -> None:
        self._database, self._topic = database, topic
        self._extra: dict[str, Any] = {"headers": headers, "tags": tags}

    def publish(self, key: str | None, body: _CountedFile, dedup_id: str | None) -> bool:
        """Publish one; return False for a duplicate."""
        with self._database.connection() as connection, connection.transaction():
            if dedup_id is None:
                outbox.publish(connection, self._topic, key=key, body=body, **self._extra)
                return True
            found = outbox.publish_once(connection, self._topic, dedup_id=dedup_id, key=key, body=body, **self._extra)
            return not found.duplicate

    def publish_lines(self, lines: Iterable[bytes]) -> int:
        """Publish a message per line, in transactions of some; return how many."""
        count = 0
        messages = map(_message_of_line, lines)
        with self._database.connection() as connection:
            while some := list(islice(messages, BATCH)):
                with outbox.transaction(connection):
                    for key, body in some:
                        outbox.publish(connection, self._topic, key=key, body=body, **self._extra)
                count += len(some)
        return count


def _message_of_line(line: bytes) -> tuple[str | None, bytes]:
    key, tab, body = line.removesuffix(b"\n").partition(b"\t")
    if not tab:
        return None, key
    try:
        return key.decode() or None, body
    except UnicodeDecodeError:
        raise InvalidInput("the key of a line is no UTF-8: a line is KEY, a tab, and the body") from None


def _headers(given: Iterable[str]) -> dict[str, str]:
    headers = {}
    for one in given:
        name, sign, value = one.partition("=")
        if not sign:
            raise InvalidInput(f"{one!r} is no header: say NAME=VALUE")
        headers[name] = value
    return headers


def _input(file: Path | None) -> Iterator[bytes]:
    with _input_file(file) as opened:
        yield from opened


@contextmanager
def _input_file(file: Path | None) -> Iterator[BinaryIO]:
    if file is None:
        yield sys.stdin.buffer
        return
    try:
        opened = file.open("rb")
    except OSError as error:
        raise InvalidInput(f"{file} can't be read: {error.strerror}") from None
    with opened:
        yield opened


class _CountedFile:
    """A file that counts the bytes read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size = file, 0

    def read(self, size: int) -> bytes:
        """Read on."""
        found = self._file.read(size)
        self.size += len(found)
        return found


def _reader(
    runtime: Runtime,
    topic: str,
    key: str | None,
    partition: int | None,
    offset: int | None,
    since: str | None,
    *,
    latest: bool,
) -> TopicReader:
    start: Start = parse_time_option(since) or ("latest" if latest and offset is None else "earliest")
    if isinstance(start, datetime) and start.tzinfo is None:
        raise InvalidInput(f"{since!r} has no zone: say it with one, such as 2026-11-21T09:30:00+00:00")
    reader = TopicReader(runtime, topic, start=start, key=key, partition=partition)
    if offset is not None:
        reader.move_to(offset)
    return reader


def _until_end(reader: TopicReader) -> Iterator[StoredMessage]:
    while not reader.at_end and reader.scanned < SCAN_LIMIT:
        yield from reader.read()


def _rows(messages: Iterable[StoredMessage], *, as_json: bool, hidden: bool) -> Iterator[dict[str, Any]]:
    for message in messages:
        yield (
            _facts(message, hidden=hidden)
            if as_json
            else {
                "published_at": message.published_at,
                "partition": message.partition,
                "offset": message.offset,
                "key": format_key(message.key),
                "body": _shown(message, hidden=hidden),
            }
        )


def _show_line(message: StoredMessage, *, as_json: bool, hidden: bool) -> None:
    if as_json:
        show_rows([_facts(message, hidden=hidden)], as_json=True, nothing="")
        return
    at = message.published_at.isoformat(timespec="milliseconds")
    echo(f"{at} {message.partition}/{message.offset} {format_key(message.key)} {_shown(message, hidden=hidden)}")


def _facts(message: StoredMessage, *, hidden: bool) -> dict[str, Any]:
    kind, text = (HIDDEN, None) if hidden else decoded(message.body)
    return {
        "partition": message.partition,
        "offset": message.offset,
        "message": str(message.identity),
        "key": message.key,
        "tags": list(message.tags),
        "headers": None if hidden else dict(message.headers),
        "published_at": message.published_at,
        "reordered": message.reordered,
        "bytes": len(message.body) if message.large_body is None else message.large_body.size,
        "large_body": None if message.large_body is None else message.large_body.body_id,
        "body_is": kind,
        "body": text,
    }


def _shown(message: StoredMessage, *, hidden: bool) -> str:
    large = message.large_body
    return _short(message.body, hidden=hidden) if large is None else f"large body {large.body_id} ({large.size} bytes)"


def _short(body: bytes, *, hidden: bool) -> str:
    if hidden:
        return HIDDEN
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = body.hex(" ")
    return text if len(text) <= SHOWN_LIMIT else f"{text[:SHOWN_LIMIT]}… ({len(body)} bytes)"
