"""The runtime of a command."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mqlayer.cli.actor import actor
from mqlayer.cli.addresses import settings_here
from mqlayer.runtime.runtime import Runtime, open_runtime


def runtime_here() -> AbstractContextManager[Runtime]:
    """Lend the databases and settings of this process, and its user as the actor."""
    return open_runtime(settings_here(), actor=actor())
