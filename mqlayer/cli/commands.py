"""The commands by name. A command's module is imported when the command runs: imports are most of its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperCommand
from typer.main import get_group

from mqlayer.cli.errors import ErrorPrintingGroup, failures_shown
from mqlayer.cli.panels import CHANGE, LOOK, PANELS, REPAIR, START
from mqlayer.env_file import export_env_file


class CommandSource(NamedTuple):
    """A module of this package that adds a command, its panel, and the first paragraph of the command's help."""

    module: str
    panel: str
    summary: str


COMMANDS: Final[Mapping[str, CommandSource]] = {
    "init": CommandSource("project", START, "Write a small project: tables, a consumer, tests, a compose file."),
    "up": CommandSource("stack", START, "Start the stack, or its stopped parts, and print its addresses."),
    "down": CommandSource("stack", START, "Stop the stack; data stay for the next `up`."),
    "status": CommandSource("stack", LOOK, "Show every part; exit code 1 if one is not running."),
    "consume": CommandSource("consume", START, "Run the consumers of MODULE:APP until SIGTERM or SIGINT."),
    "asyncapi": CommandSource("asyncapi", LOOK, "Write the AsyncAPI document of MODULE:APP: topics, groups, bodies."),
    "publish": CommandSource(
        "messages", START, "Publish through the outbox of MQLAYER_APP_DSN; a relay moves it to its partition."
    ),
    "peek": CommandSource(
        "messages",
        LOOK,
        "Show the newest messages, or the first from an offset, a time or of a key; nothing is settled.",
    ),
    "tail": CommandSource(
        "messages",
        LOOK,
        "Show messages as they come, from now or from an offset or a time on, until Ctrl+C; nothing is settled.",
    ),
    "message": CommandSource("message_life", LOOK, "One message: where it is, and what became of it."),
    "debug": CommandSource(
        "debug",
        REPAIR,
        "Give a key's messages in order to a handler in this process; its commits behind a fence are rolled back.",
    ),
    "migrate": CommandSource(
        "migrate",
        START,
        "Migrate the schemas in MQLAYER_DSN (control) and MQLAYER_APP_DSN (application; default: the same).",
    ),
    "upgrade": CommandSource("upgrades", CHANGE, "Upgrades: which code lives, and the step to its written form."),
    "grant": CommandSource("rights", CHANGE, "Grant a role a right, in both schemas."),
    "revoke": CommandSource("rights", CHANGE, "Revoke a right, or only some topics or groups of it."),
    "grants": CommandSource("rights", LOOK, "List granted rights: role, right, scope."),
    "exporter": CommandSource(
        "exporter",
        LOOK,
        "Answer /metrics with the metrics of the system, until SIGTERM or SIGINT: lag, outbox, parked, nodes, jobs.",
    ),
    "console": CommandSource(
        "console",
        LOOK,
        "Show the system in the browser, until SIGTERM or SIGINT: lag, routes, keys, messages, parked and dead.",
    ),
    "console-password": CommandSource(
        "console", LOOK, "Print a user's line for the password file of `mqlayer console`; asks for the password."
    ),
    "relay": CommandSource("relay", START, "Relay the outbox until SIGTERM or SIGINT. Several may run."),
    "trim": CommandSource("trim", CHANGE, "Drop settled records in one pass; the worker does so regularly."),
    "analytics": CommandSource("analytics", LOOK, "Spark jobs on a snapshot of the archive."),
    "doctor": CommandSource(
        "doctor", LOOK, "Check servers, settings, schemas and waiting work; exit code 1 if something is broken."
    ),
    "problems": CommandSource(
        "problems", LOOK, "Show present problems with their beginning, effect and help; or those that ended."
    ),
    "size": CommandSource(
        "size",
        LOOK,
        "Compute nodes, processes, memory, disk and connections for a load, by measured figures.",
    ),
    "verify": CommandSource(
        "doctor",
        LOOK,
        "Compare Postgres, nodes and archive; exit code 1 for differences, 3 if some could not be compared.",
    ),
    "node": CommandSource("nodes", CHANGE, "Redis nodes: register, list, arm again, give another address."),
    "topic": CommandSource("topics", CHANGE, "Topics: create, list, set, schema."),
    "route": CommandSource("routes", CHANGE, "Routes: split, merge and move partitions while messages flow."),
    "group": CommandSource("groups", CHANGE, "Groups: settings, pauses, and where they stand."),
    "key": CommandSource("keys", REPAIR, "Keys: their partitions, waiting messages, pauses."),
    "parked": CommandSource("parked", REPAIR, "Parked keys: what waits outside of the stream, and why."),
    "dead": CommandSource("dead", REPAIR, "Dead messages: why they died, and redrive."),
    "bulk": CommandSource("bulk", REPAIR, "Bulk actions: one act on many parked keys or dead messages."),
    "replay": CommandSource("replay", CHANGE, "Replays: archived messages, delivered to a group again."),
    "outbox": CommandSource(
        "outbox", REPAIR, "The outbox of MQLAYER_APP_DSN: rows quarantined, delayed messages, rotation."
    ),
    "inbox": CommandSource("idempotency", LOOK, "The inbox of MQLAYER_APP_DSN: messages that have their effects."),
    "versions": CommandSource("idempotency", REPAIR, "Versions of entities: held events and gaps."),
    "archive": CommandSource("archive", CHANGE, "The archive: records kept in Postgres."),
    "snapshot": CommandSource("snapshot", CHANGE, "Snapshots of the archive: create, list, show, export, drop."),
}
"""In the order of the help, within a panel."""


class LoadedCommands(Mapping[str, TyperCommand]):
    """All commands by name; reading one imports its module."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a command. Raises KeyError."""
        if name not in self._loaded:
            self._loaded |= commands_of(COMMANDS[name].module)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(COMMANDS)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(COMMANDS)


class LazyGroup(ErrorPrintingGroup):
    """Knows all commands; imports the one that runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = LoadedCommands()  # type: ignore[assignment]  # commands are added to the table alone

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Read `.env` before the options, of which some have variables."""
        with failures_shown():
            export_env_file()
        return super().make_context(info_name, args, parent, **extra)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # as the base class has it
        """Return the names."""
        return sorted(COMMANDS, key=lambda name: PANELS.index(COMMANDS[name].panel))

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:  # noqa: ARG002  # as the base class has it
        """Return a command as help and completion list it: with its name and summary, not to be run."""
        source = COMMANDS.get(cmd_name)
        return None if source is None else TyperCommand(cmd_name, help=source.summary, rich_help_panel=source.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command to run."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, None if listed is None else self.commands[listed.name or ""], rest


def commands_of(module: str) -> dict[str, Any]:
    """Import a module of this package and return the commands that it adds."""
    added = typer.Typer()
    import_module(f"mqlayer.cli.{module}").add_to(added)
    return {name: _arranged(command) for name, command in get_group(added).commands.items()}


def _arranged(command: Any) -> Any:
    """Put a group's commands in the order of the panels; let choices wrap."""
    if hasattr(command, "commands"):
        inner = sorted(command.commands.items(), key=lambda item: PANELS.index(item[1].rich_help_panel))
        command.commands = {name: _arranged(one) for name, one in inner}
    for parameter in command.params:
        # The help would cut a|b|c anywhere.
        vars(parameter)["display_type_rich"] = partial(_spaced_type, parameter.display_type_rich)
    return command


def _spaced_type(shown: Callable[[Any], str | None], ctx: Any) -> str | None:
    return (shown(ctx) or "").replace("|", " | ") or None
