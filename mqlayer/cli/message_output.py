"""One message on the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

from mqlayer.cli.output import echo, format_key, format_size, format_time, show_facts, show_rows
from mqlayer.cli.runtime import runtime_here
from mqlayer.domain.body_streams import BodyStream
from mqlayer.domain.body_text import decoded
from mqlayer.domain.large_bodies import BodyReference
from mqlayer.domain.names import parse_identity
from mqlayer.redelivery import MessageDetails
from mqlayer.runtime.runtime import Runtime

SHOWN_LIMIT: Final = 4_000
HIDDEN: Final = "hidden"

ReasonOption = Annotated[str, typer.Option(help="Why: it is kept with the message and in the audit row.")]
MessageOption = Annotated[
    str | None, typer.Option("--message", metavar="SOURCE:LP:SEQ", help="The identity of a message.")
]
RawOption = Annotated[bool, typer.Option("--raw", help="Write the body as it is to standard output, and nothing else.")]
LimitOption = Annotated[int, typer.Option(min=1, max=1_000, help="How many, at most.")]


def show_message(found: MessageDetails, *, as_json: bool, raw: bool) -> None:
    """Print a message."""
    if raw:
        write_raw(found.body, found.large_body)
        return
    if as_json:
        show_rows([_describe(found, *decoded(found.body))], as_json=True, nothing="")
        return
    show_facts(dict(_facts(found)))
    echo()
    attempts = (
        {
            "attempt": one.attempt,
            "failed_at": one.failed_at,
            "member": one.member,
            "error": one.error,
        }
        for one in found.attempts
    )
    show_rows(attempts, as_json=False, nothing="no failed attempt of it is known")
    echo()
    show_body(found.body, found.large_body)


def write_raw(body: bytes | None, large: BodyReference | None) -> None:
    """Write a body to standard output, a large one as it is fetched."""
    if large is None:
        sys.stdout.buffer.write(body or b"")
    else:
        with runtime_here() as runtime, body_stream(runtime, b"", large) as stream:
            shutil.copyfileobj(stream, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def body_stream(runtime: Runtime, body: bytes, large: BodyReference | None) -> BodyStream:
    """Return a body to read."""
    from mqlayer.large_bodies import BodyReader

    return BodyStream.of(body) if large is None else BodyReader(runtime).opened(large)


def marked_size(size: int | None, *, large: bool) -> int | str | None:
    """Return a body's bytes for a table, marked where it is stored outside of its message."""
    return f"{size} large" if large else size


def show_body(body: bytes | None, large: BodyReference | None = None) -> None:
    """Print a body's size, guessed format and beginning."""
    if large is not None:
        echo(f"body: large, {format_size(large.size)}; --raw writes it")
        return
    kind, text = decoded(body)
    echo("body: none is kept" if body is None else f"body: {format_size(len(body))}, shown as {kind}")
    if text is not None:
        echo(text[:SHOWN_LIMIT], lines=True)
        if len(text) > SHOWN_LIMIT:
            echo(f"… {len(text) - SHOWN_LIMIT} more characters; --raw writes all of it")


def is_hidden(runtime: Runtime) -> bool:
    """Whether this role may see no bodies and headers; say so on standard error."""
    # Lists of dead messages need no view of the nodes.
    from mqlayer.inspect.message_status import hidden_from

    role = hidden_from(runtime.control)
    if role is not None:
        echo(f"bodies and headers are hidden: mqlayer grant operate {role}, or analyze", err=True)
    return role is not None


def _facts(found: MessageDetails) -> Iterable[tuple[str, Any]]:
    yield "message", found.identity
    if found.dead_id is not None:
        yield "dead id", found.dead_id
    yield "of", f"group {found.group} of topic {found.topic}"
    yield "key", format_key(found.key)
    yield "read at", f"partition {found.partition}, offset {found.offset}"
    yield "published_at", found.published_at
    if found.tags:
        yield "tags", ", ".join(found.tags)
    for name, value in found.headers.items():
        yield f"header {name}", value
    since = format_time(found.since, exact=True)
    if found.dead_id is None:
        due = "when an operator releases it" if found.due_at is None else format_time(found.due_at)
        yield "parked", f"since {since}, cause {found.cause}; next attempt {due}"
        return
    yield "dead", f"since {since}, cause {found.cause}, by {found.actor}"
    yield "reason", found.reason or ""
    if found.redriven:
        yield "redriven", "it was redriven, and is in its group again"


def _describe(found: MessageDetails, kind: str | None, text: str | None) -> dict[str, Any]:
    large = found.large_body
    return {
        "dead_id": found.dead_id,
        "topic": found.topic,
        "group": found.group,
        "message": str(found.identity),
        "partition": found.partition,
        "offset": found.offset,
        "key": found.key,
        "headers": dict(found.headers),
        "tags": list(found.tags),
        "published_at": found.published_at,
        "cause": found.cause,
        "since": found.since,
        "due_at": found.due_at,
        "reason": found.reason,
        "actor": found.actor,
        "redriven": found.redriven,
        "attempts": [
            {"attempt": a.attempt, "failed_at": a.failed_at, "member": a.member, "error": a.error}
            for a in found.attempts
        ],
        "bytes": None if found.body is None else len(found.body) if large is None else large.size,
        "large_body": None if large is None else large.body_id,
        "body_is": kind,
        "body": text and text[:SHOWN_LIMIT],
        "body_cut": text is not None and len(text) > SHOWN_LIMIT,
    }


def parse_identity_option(text: str | None) -> Any:
    """Return an option's identity, or None."""
    return None if text is None else parse_identity(text)
