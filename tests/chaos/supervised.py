"""A program for `mqlayer consume`: what comes goes into the sink, fenced. The first child may die at a place.

The environment tells: `MQLAYER_TEST_DIRECTORY` for histories, `MQLAYER_TEST_KILL`, the place and its occurrence.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import mqlayer
from mqlayer import failpoints
from mqlayer.cli.supervisor_pipe import PIPE_VARIABLE
from tests.chaos.actors import _book_into_sink
from tests.proof.history import History

DIRECTORY: Final = Path(os.environ["MQLAYER_TEST_DIRECTORY"])


def _is_first() -> bool:
    try:
        os.close(os.open(DIRECTORY / "armed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


app = mqlayer.App()
if PIPE_VARIABLE in os.environ:
    _book_into_sink(app, History(DIRECTORY, f"supervised-{os.getpid()}"))
    name, _, occurrence = os.environ.get("MQLAYER_TEST_KILL", "").partition("@")
    if name and _is_first():
        failpoints.arm(name, "kill", occurrence=int(occurrence or 1))
