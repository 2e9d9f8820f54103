"""`manage.py mqlayer_relay`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand

from mqlayer.integrations.django.command_line import run_command


class RelayOutbox(BaseCommand):
    """`mqlayer relay`."""

    help = "Move what transactions published to its partitions, until SIGTERM or SIGINT. Several may run."
    requires_system_checks: Sequence[str] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take `--once`."""
        parser.add_argument("--once", action="store_true", help="Relay what waits, then end.")

    def handle(self, *_: Any, once: bool, **__: Any) -> None:
        """Run it."""
        run_command(["relay", *(["--once"] if once else [])])


# The name by which Django finds it.
Command = RelayOutbox
