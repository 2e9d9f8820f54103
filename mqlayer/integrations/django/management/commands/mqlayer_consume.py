"""`manage.py mqlayer_consume`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from mqlayer.integrations.django.command_line import run_command


class RunConsumers(BaseCommand):
    """`mqlayer consume`."""

    help = "Run this project's consumers until SIGTERM or SIGINT."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take where the App is, and the options of `mqlayer consume`."""
        parser.add_argument("application", nargs="?", metavar="MODULE:APP", help="Default: MQLAYER['CONSUMERS'].")
        parser.add_argument("--processes", "-p", type=int, default=1, help="How many processes.")
        parser.add_argument("--concurrency", type=int, help="Handlers at once per consumer and process.")

    def handle(self, *_: Any, application: str | None, processes: int, concurrency: int | None, **__: Any) -> None:
        """Run it."""
        path = application or os.environ.get("MQLAYER_CONSUMERS")
        if not path:
            raise CommandError("say where the App is: mqlayer_consume shop.consumers:app, or MQLAYER['CONSUMERS']")
        more = [] if concurrency is None else ["--concurrency", str(concurrency)]
        run_command(["consume", path, "--processes", str(processes), *more])


# The name by which Django finds it.
Command = RunConsumers
