"""`debug`: a key's messages to a handler under a debugger."""

from __future__ import annotations

import asyncio
import pdb
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from mqlayer.cli.addresses import settings_here, use_stack_here
from mqlayer.cli.option_rules import RuledCommand, planned
from mqlayer.cli.options import PlanOption, TopicArgument, YesOption, echo_plan
from mqlayer.cli.output import echo, format_key, pluralize
from mqlayer.consuming.api.app import Consumer
from mqlayer.consuming.api.consumer_loader import UNREGISTERED, load_consumer
from mqlayer.consuming.api.debug_context import DebugContext, is_refused_commit
from mqlayer.domain.names import parse_identity
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.groups.group import find_group
from mqlayer.inspect import StoredMessage, key_history, record_of
from mqlayer.large_bodies import BodyReader
from mqlayer.postgres.database import Database
from mqlayer.redelivery import Attempt, recorded_attempts
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import ConnectionOptions, Dsn, Settings


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command(cls=RuledCommand)(debug)


@planned
def debug(
    topic: TopicArgument,
    key: Annotated[str, typer.Argument(help="The messages' key.")],
    handler: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Where the handler is.")],
    group: Annotated[str | None, typer.Option(help="Whose attempts to show and count; else the handler's.")] = None,
    last: Annotated[int, typer.Option(min=1, max=10_000, help="How many of the last messages, at most.")] = 100,
    break_before: Annotated[
        str | None, typer.Option(metavar="SOURCE:LP:SEQ", help="Stop in the debugger before this message.")
    ] = None,
    use_pdb: Annotated[
        bool | None, typer.Option("--pdb/--no-pdb", help="Debug a failure; the default on a terminal.")
    ] = None,
    _plan: PlanOption = False,
    yes: YesOption = False,
) -> None:
    """Give a key's messages in order to a handler in this process; its commits behind a fence are rolled back."""
    use_stack_here()
    place = None if break_before is None else str(parse_identity(break_before))
    consumer = load_consumer(handler, topic)
    if consumer.batch is not None:
        raise InvalidInput(f"{handler!r} takes batches: give a handler that takes one message")
    settings = settings_here()
    dsn = Dsn(settings.control_dsn(), ConnectionOptions(reads_only=True))
    with Database(dsn, application="mqlayer debug") as database:
        messages = key_history(Runtime(database, settings), topic, key, limit=last)
        if not messages:
            raise NotFound("message of key", key, f"see those that there are: mqlayer peek {topic}")
        if place is not None and place not in (str(message.identity) for message in messages):
            raise InvalidInput(f"message {place} is not among the last {len(messages)} of key {format_key(key)}")
        echo(f"{pluralize(len(messages), 'message')} of key {format_key(key)} for the handler, in this process.")
        echo("A transaction that it gives to ctx.fence or ctx.inbox is rolled back: its commit is refused.")
        echo("Nothing else is: other connections, requests, mails and files of the handler have their effects.")
        if not yes:
            echo_plan(f"{handler} would be called")
            return
        attempts = _attempts(database, topic, group or consumer.group)
        found = [(message, attempts(message)) for message in _whole(database, settings, messages)]
    debugged = _Debugged(consumer, use_pdb=sys.stdin.isatty() if use_pdb is None else use_pdb, place=place)
    if not debugged.all(found):
        raise typer.Exit(1)


def _whole(database: Database, settings: Settings, messages: list[StoredMessage]) -> list[StoredMessage]:
    """Fetch large bodies."""
    if all(message.large_body is None for message in messages):
        return messages
    with Database(settings.application_dsn(), application="mqlayer debug") as application:
        bodies = BodyReader(Runtime(database, settings, application))
        return [
            message if message.large_body is None else replace(message, body=bodies.fetch(message.large_body))
            for message in messages
        ]


def _attempts(database: Database, topic: str, group: str) -> Callable[[StoredMessage], list[Attempt]]:
    try:
        group_id = find_group(database, topic, group).group_id
    except NotFound:
        if group != UNREGISTERED:
            raise
        return lambda _: []
    return lambda message: recorded_attempts(database, group_id, message.identity)


class _Debugged:
    """A handler under a debugger. `place`: the message before which it stops."""

    def __init__(self, consumer: Consumer, *, use_pdb: bool, place: str | None) -> None:
        self._consumer, self._use_pdb, self._place = consumer, use_pdb, place

    def all(self, found: Iterable[tuple[StoredMessage, list[Attempt]]]) -> bool:
        """Give it messages until it fails; return whether it handled all."""
        count = 0
        for message, attempts in found:
            self._show(message, attempts)
            if not self._one(message, len(attempts)):
                return False
            count += 1
        echo(f"{pluralize(count, 'message')} handled")
        return True

    def _show(self, message: StoredMessage, attempts: list[Attempt]) -> None:
        at = message.published_at.isoformat(timespec="milliseconds")
        place = f"{message.partition}/{message.offset}"
        echo(f"{message.identity} {place} {at} {pluralize(len(message.body), 'byte')}")
        for one in attempts:
            failed_at = one.failed_at.isoformat(timespec="seconds")
            echo(f"  attempt {one.attempt} failed at {failed_at} in {one.member}: {one.error}")

    def _one(self, message: StoredMessage, attempts: int) -> bool:
        consumer = self._consumer
        context = DebugContext(consumer.topic, consumer.group, message.partition, record_of(message), attempts=attempts)
        try:
            self._call(consumer.decode(message.body), context, stop=self._place == str(message.identity))
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is what is looked for
            if is_refused_commit(error):
                echo("  handled up to its commit, rolled back")
                return True
            echo(f"  failed: {type(error).__name__}: {error}")
            if self._use_pdb:
                pdb.post_mortem(error.__traceback__)
            return False
        echo("  handled, rolled back" if context.rolled_back else "  handled; it gave no connection to roll back")
        return True

    def _call(self, body: Any, context: DebugContext, *, stop: bool) -> None:
        consumer = self._consumer
        if consumer.is_async:
            asyncio.run(consumer.dependencies.acall(partial(_await, consumer, stop), body, context))
        else:
            consumer.dependencies.call(partial(_call, consumer, stop), body, context)


def _call(consumer: Consumer, stop: bool, body: Any, context: DebugContext, **made: Any) -> Any:
    given = [body, context] if consumer.with_context else [body]
    if stop:
        return pdb.Pdb().runcall(consumer.handler, *given, **made)
    return consumer.handler(*given, **made)


async def _await(consumer: Consumer, stop: bool, body: Any, context: DebugContext, **made: Any) -> None:
    if stop:
        # `step` leads into the handler.
        breakpoint()
    await _call(consumer, False, body, context, **made)
