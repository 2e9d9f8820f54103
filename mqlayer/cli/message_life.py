"""`message`: find messages, and show the life of one."""

from __future__ import annotations

import shutil
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any, Final

import msgspec
import typer

from mqlayer.cli.completion import topic_names
from mqlayer.cli.message_output import HIDDEN, RawOption, body_stream, is_hidden, show_body, write_raw
from mqlayer.cli.option_rules import RuledCommand, excludes, needs
from mqlayer.cli.options import parse_time_option
from mqlayer.cli.output import JsonOption, echo, format_key, pluralize, show_beside, show_facts, show_rows
from mqlayer.cli.panels import LOOK
from mqlayer.cli.runtime import runtime_here
from mqlayer.domain.body_streams import BodyStream
from mqlayer.domain.body_text import decoded
from mqlayer.errors import InvalidInput, NotFound, PermissionDenied
from mqlayer.inspect import (
    FoundMessage,
    LifeStep,
    MessageFilter,
    MessageLife,
    MessagePage,
    MessageStatus,
    MissingStep,
    find_by_dedup_id,
    find_message,
    hidden_from,
    message_life,
    search_messages,
)
from mqlayer.runtime.runtime import Runtime

WITHIN_S: Final = 3_600.0
PEEK_BYTES: Final = 4_096
"""Of a body, to tell whether it is text."""
SELECTORS: Final = ("--key", "--at", "--within", "--header", "--trace-id", "--dedup-id", "--limit")

message_group = typer.Typer(no_args_is_help=True, help="One message: where it is, and what became of it.")

IdArgument = Annotated[
    str | None,
    typer.Argument(metavar="[ID]", help="SOURCE:LP:SEQ, PARTITION/OFFSET, TOPIC/PARTITION/OFFSET or outbox/ID."),
]
WithinOption = Annotated[
    float | None,
    typer.Option(min=0.001, help="Seconds on both sides of --at, without it the last ones. Default: an hour."),
]


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(message_group, name="message")


@message_group.callback()
def _group() -> None:
    """One message: where it is, and what became of it."""


@message_group.command(cls=RuledCommand, rich_help_panel=LOOK)
@excludes("--raw", "--json", why="--raw writes nothing but the body")
@excludes("MESSAGE", *SELECTORS, why="an id names one message")
@excludes("--dedup-id", "--at", "--within", "--header", "--trace-id", "--limit", why="a dedup id names one message")
@excludes("--header", "--trace-id", why="the trace id stands in the header traceparent")
@needs("--key", "--topic", why="a key is a topic's")
@needs("--at", "--topic", why="one topic is searched")
@needs("--within", "--topic", why="one topic is searched")
@needs("--header", "--topic", why="one topic is searched")
@needs("--trace-id", "--topic", why="one topic is searched")
@needs("--dedup-id", "--topic", why="a dedup id is a topic's")
@needs("--limit", "--topic", why="one topic is searched")
def show(
    message: IdArgument = None,
    topic: Annotated[str | None, typer.Option(help="Of which topic.", autocompletion=topic_names)] = None,
    key: Annotated[str | None, typer.Option(help="The messages of this key, the latest first.")] = None,
    at: Annotated[str | None, typer.Option(help="Published then: a time with its zone.")] = None,
    within: WithinOption = None,
    header: Annotated[str | None, typer.Option(metavar="NAME=VALUE", help="Only with this header.")] = None,
    trace_id: Annotated[str | None, typer.Option(metavar="HEX", help="Only of this trace.")] = None,
    dedup_id: Annotated[
        str | None, typer.Option(help="The message of this dedup id, with --key if it has one.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, max=1_000, help="How many, at most. Default: 20.")] = None,
    raw: RawOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the life of a message, and its body to those who may see bodies; of several that are found, a list."""
    with runtime_here() as runtime:
        if message is None and topic is None:
            raise InvalidInput("name a message by its id, or a topic with --key, --at, --header or --trace-id")
        named = message
        if named is None and dedup_id is not None:
            named = str(find_by_dedup_id(runtime, str(topic), dedup_id, key=key))
        elif named is None:
            wanted = _filter(key, at, within, header, trace_id)
            page = search_messages(runtime, str(topic), wanted, limit=limit or 20)
            if raw and len(page.messages) > 1:
                raise InvalidInput(
                    f"{len(page.messages)} messages match, and --raw writes the body of one: name its id"
                )
            if len(page.messages) != 1:
                _show_page(page, str(topic), as_json=as_json)
                return
            _show_missing(page.missing)
            named = page.messages[0].message
        _show(runtime, named, topic, raw=raw, as_json=as_json)


@message_group.command("body", rich_help_panel=LOOK)
def write_body(
    message: Annotated[
        str, typer.Argument(help="SOURCE:LP:SEQ, PARTITION/OFFSET, TOPIC/PARTITION/OFFSET or outbox/ID.")
    ],
    topic: Annotated[str | None, typer.Option(help="Of which topic.", autocompletion=topic_names)] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Where to; - is standard output. The default too, but no terminal gets binary bodies."
        ),
    ] = None,
) -> None:
    """Write the body of a message, also a large one, piece by piece."""
    with runtime_here() as runtime:
        found = find_message(runtime, message, topic=topic)
        if (role := hidden_from(runtime.control)) is not None:
            fix = f"mqlayer grant operate {role}, or analyze"
            raise PermissionDenied(runtime.control.address, f"role {role} may see no bodies", fix)
        if found.content is None:
            raise NotFound(
                "body of message", message, "mqlayer dead show and mqlayer parked show have what groups keep"
            )
        with body_stream(runtime, found.content.body, found.content.large_body) as stream:
            if to is None and sys.stdout.isatty() and not _is_text(stream.peek(PEEK_BYTES)[:PEEK_BYTES]):
                raise InvalidInput("this body is binary: --to FILE keeps it, --to - writes it to the terminal")
            if to is None or to == "-":
                shutil.copyfileobj(stream, sys.stdout.buffer)
                sys.stdout.buffer.flush()
                return
            write_file(stream, Path(to))
            echo(f"{pluralize(stream.size, 'byte')} written to {to}", err=True)


def write_file(stream: BodyStream, path: Path) -> None:
    """Write a body to a file that is there once it is whole. Raises InvalidInput."""
    try:
        if path.exists() and not path.is_file():
            # Another name can't stand in for a device or a pipe.
            with path.open("wb") as file:
                shutil.copyfileobj(stream, file)
            return
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                shutil.copyfileobj(stream, file)
                file.close()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise InvalidInput(f"{path} can't be written: {error.strerror}") from None


def _is_text(beginning: bytes) -> bool:
    try:
        # The last character may be cut.
        text = getincrementaldecoder("utf-8")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return all(one.isprintable() or one in "\n\r\t" for one in text)


def show_steps(steps: Iterable[LifeStep], missing: Iterable[MissingStep]) -> None:
    """Print a timeline, a step in a line or more, and its gaps."""
    for one in steps:
        at = "no time" if one.at is None else one.at.strftime("%Y-%m-%d %H:%M:%S.%f")[:23]
        show_beside(f"{at:<23}  {one.step.replace('_', ' '):<13}  ", _told(one))
    _show_missing(missing)


def found_row(one: FoundMessage) -> dict[str, Any]:
    """Row of a found message."""
    return {
        "message": one.message,
        "published_at": one.published_at,
        "source": one.source,
        "partition": one.partition,
        "offset": one.offset,
        "key": format_key(one.key),
    }


def found_json(one: FoundMessage) -> dict[str, Any]:
    """A found message for --json."""
    return found_row(one) | {"key": one.key, "tags": list(one.tags)}


def _show(runtime: Runtime, named: str, topic: str | None, *, raw: bool, as_json: bool) -> None:
    hidden = is_hidden(runtime)
    found = find_message(runtime, named, topic=topic)
    body = None if found.content is None else found.content.body
    large = None if found.content is None else found.content.large_body
    if raw:
        write_raw(body, large)
        return
    life = message_life(runtime, found)
    if as_json:
        show_rows([_status_json(found, life, hidden=hidden)], as_json=True, nothing="")
    else:
        _show_status(found, life, hidden=hidden)


def _filter(
    key: str | None, at: str | None, within: float | None, header: str | None, trace_id: str | None
) -> MessageFilter:
    since = until = None
    middle = parse_time_option(at)
    span = timedelta(seconds=WITHIN_S if within is None else within)
    by_header = header is not None or trace_id is not None
    if isinstance(middle, datetime):
        # By time alone: the first messages from then on.
        since = middle if key is None and not by_header else middle - span
        until = middle + span
    elif within is not None or by_header:
        since = datetime.now().astimezone() - span
    return MessageFilter(key=key, header=_header(header), trace_id=trace_id, since=since, until=until)


def _header(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, sign, value = text.partition("=")
    if not sign:
        raise InvalidInput(f"{text!r} is no header: say NAME=VALUE")
    return name, value


def _show_page(page: MessagePage, topic: str, *, as_json: bool) -> None:
    if not page.messages and not as_json:
        tried = "; ".join(one.reason for one in page.missing)
        raise NotFound("message", f"of topic {topic}", tried or f"looked at {page.looked:,} records and the archive")
    rows = map(found_json if as_json else found_row, page.messages)
    show_rows(rows, as_json=as_json, nothing="")
    _show_missing(page.missing)
    if not as_json:
        echo(f"{len(page.messages)} messages; the life of one: mqlayer message show ID --topic {topic}")


def _show_missing(missing: Iterable[MissingStep]) -> None:
    words = {"no_longer_known": "no longer known", "never_recorded": "never recorded", "not_searched": "not looked at"}
    for one in missing:
        of_group = "" if one.group is None else f" of group {one.group}"
        echo(f"{words[one.absence]}: {one.steps}{of_group}: {one.reason}", err=True)


def _told(one: LifeStep) -> str:
    facts = {
        "group": one.group,
        "by": one.by,
        "attempt": one.attempt,
        "partition": one.partition,
        "offset": one.offset,
        "route version": one.version,
    }
    words = [f"{name} {value}" for name, value in facts.items() if value is not None]
    return ", ".join(words + ([] if one.detail is None else [one.detail]))


def _show_status(found: MessageStatus, life: MessageLife, *, hidden: bool) -> None:
    headers = {} if found.content is None else {f"header {n}": value for n, value in found.content.headers.items()}
    place = None if found.partition is None else f"partition {found.partition}, offset {found.offset}"
    gone = "" if found.stored else " (not there any more)"
    show_facts(
        {
            "message": found.identity or "has no id before a relay sends it",
            "topic": found.topic,
            "key": format_key(found.key),
            "published_at": found.published_at,
            "outbox": found.outbox,
            "stored": place and f"{place}{'' if found.node is None else f', on {found.node}'}{gone}",
            "archived": found.archived,
            "tags": found.tags,
            **headers,
        }
    )
    echo()
    show_rows(map(asdict, found.groups), as_json=False, nothing=f"topic {found.topic} has no group")
    echo()
    show_steps(life.steps, life.missing)
    echo()
    if hidden:
        echo("body: hidden")
    else:
        content = found.content
        show_body(None if content is None else content.body, None if content is None else content.large_body)


def _status_json(found: MessageStatus, life: MessageLife, *, hidden: bool) -> dict[str, Any]:
    content = found.content
    kind, text = (HIDDEN, None) if hidden else decoded(None if content is None else content.body)
    large = None if content is None else content.large_body
    return {
        "topic": found.topic,
        "message": None if found.identity is None else str(found.identity),
        "key": found.key,
        "published_at": found.published_at,
        "tags": list(found.tags),
        "partition": found.partition,
        "offset": found.offset,
        "node": found.node,
        "stored": found.stored,
        "outbox": found.outbox,
        "archived": found.archived,
        "groups": [asdict(one) for one in found.groups],
        "attempts": [asdict(one) for one in found.attempts],
        "steps": list(_builtins(life.steps)),
        "missing": list(_builtins(life.missing)),
        "not_searched": list(found.unsearched),
        "headers": None if content is None else dict(content.headers),
        "bytes": None if content is None else len(content.body) if large is None else large.size,
        "large_body": None if large is None else large.body_id,
        "body_is": kind,
        "body": text,
    }


def _builtins(ones: Iterable[msgspec.Struct]) -> Iterator[Any]:
    return (msgspec.to_builtins(one) for one in ones)
