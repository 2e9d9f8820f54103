"""Options shared by commands."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Annotated, Final

import typer

from mqlayer.cli.completion import group_names, topic_names
from mqlayer.cli.output import echo
from mqlayer.errors import InvalidInput

_LENGTH: Final = re.compile(r"([0-9]{1,6})([mhdw])")
_UNITS: Final = {
    "m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)
}  # fmt: skip

TopicArgument = Annotated[str, typer.Argument(help="The topic's name.", autocompletion=topic_names)]
GroupArgument = Annotated[str, typer.Argument(help="The group's name.", autocompletion=group_names)]
PlanOption = Annotated[bool, typer.Option("--plan", help="Say what --yes would do; change nothing. The default.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do it.")]


def echo_plan(plan: str) -> None:
    """Print what would be done, and how to do it."""
    echo(f"{plan}; nothing was changed: --yes does this")


def parse_time_option(text: str | None) -> datetime | None:
    """Return an option's time, or None. Raises InvalidInput."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no time: say it with its zone, such as 2026-11-21T09:30:00+00:00") from None


def parse_length_option(text: str) -> timedelta:
    """Return a length of time, such as 30m, 48h, 30d or 12w. Raises InvalidInput."""
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text!r} is no length of time: say for example 30m, 48h, 30d or 12w")
    return int(match[1]) * _UNITS[match[2]]
