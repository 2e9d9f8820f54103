"""The tutorial runs as a reader types it: its files are saved, and its shell blocks go into one shell."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest

from mqlayer.postgres.database import Database
from mqlayer.topics import register_node
from tests.fixtures.forked_commands import forked_commands
from tests.fixtures.forked_programs import start_python
from tests.proof.newcomer import TUTORIAL, Shell, follow, steps_of, too_late
from tests.proof.runtimes import runtime_of

ROOT: Final = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.full
def test_the_tutorial_runs_as_printed(
    database_dsn: str, redis_url: str, key_prefix: str, tmp_path: Path, server_directory: Path
) -> None:
    """It prints its results too, killed consumers, failed orders and a split partition included.

    With the time to read it, the first message is there within five minutes, and a test of the service within ten.
    """
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="n1", url=redis_url)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MQLAYER_DSN": database_dsn,
        "MQLAYER_KEY_PREFIX": key_prefix,
    }
    steps = [step for step in steps_of(TUTORIAL) if not step.left_out]
    relay = start_python("mqlayer", "relay", env=environment)
    try:
        with forked_commands(server_directory) as programs:
            variables = environment | {"PATH": f"{programs}:{os.environ['PATH']}"}
            with Shell.opened(tmp_path, variables) as shell:
                reached = follow(steps, shell)
    finally:
        relay.terminate()
        relay.wait(30)
    results = re.findall(r"```text\n(.*?)\n```", TUTORIAL.read_text("utf-8"))
    assert re.findall(r"^\d+ of \d+ orders booked.*", shell.output, re.MULTILINE) == results, shell.output
    assert too_late(reached) == [], reached
