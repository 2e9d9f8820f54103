"""The tutorial runs as a reader types it: its files are saved, and its shell blocks are one script."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from mqlayer.postgres.database import Database
from mqlayer.topics import register_node
from tests.fixtures.forked_commands import forked_commands
from tests.fixtures.forked_programs import start_python
from tests.fixtures.pages import examples
from tests.proof.runtimes import runtime_of

ROOT: Final = Path(__file__).parents[2]
TUTORIAL: Final = ROOT / "docs" / "tutorial" / "ordered-consumer.md"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_tutorial_runs_as_printed(
    database_dsn: str, redis_url: str, key_prefix: str, tmp_path: Path, server_directory: Path
) -> None:
    """It prints its results too, killed consumers, failed orders and a split partition included."""
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="n1", url=redis_url)
    page = TUTORIAL.read_text("utf-8")
    for name, text in re.findall(r"Save this as `(\S+)`[^\n]*:\n\n```python\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    script = "".join(text for language, text in examples(TUTORIAL) if language == "bash")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MQLAYER_DSN": database_dsn,
        "MQLAYER_KEY_PREFIX": key_prefix,
    }
    relay = start_python("mqlayer", "relay", env=environment)
    try:
        with forked_commands(server_directory) as programs:
            done = subprocess.run(
                ["/bin/bash", "-c", f"trap 'kill $(jobs -p)' ERR; set -e\n{script}"],
                cwd=tmp_path, env=environment | {"PATH": f"{programs}:{os.environ['PATH']}"},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
            )  # fmt: skip
    finally:
        relay.terminate()
        relay.wait(30)
    assert done.returncode == 0, done.stdout
    results = re.findall(r"```text\n(.*?)\n```", page)
    assert re.findall(r"^\d+ of \d+ orders booked.*", done.stdout, re.MULTILINE) == results, done.stdout
