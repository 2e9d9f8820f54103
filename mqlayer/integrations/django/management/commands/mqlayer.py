"""`manage.py mqlayer …`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand

from mqlayer.integrations.django.command_line import run_command


class PassThrough(BaseCommand):
    """Any command of `mqlayer`, such as `manage.py mqlayer topic list`."""

    help = "Run a command of mqlayer with the settings of this project."
    requires_system_checks: Sequence[str] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take all words."""
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def run_from_argv(self, argv: list[str]) -> None:
        """Give options, `--help` among them, to mqlayer."""
        run_command(argv[2:])

    def handle(self, *_: Any, words: Sequence[str], **__: Any) -> None:
        """Run it, as `call_command("mqlayer", "topic", "list")` does."""
        run_command(words)


# The name by which Django finds it.
Command = PassThrough
