"""The main job of the README, as its command runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.bank.show import STEPS
from mqlayer.cli.spark_requirements import check_spark
from mqlayer.errors import SparkMissing
from tests.fixtures.node_clients import COMMANDS, ClientsSeen
from tests.fixtures.process_files import file_of_each_process
from tests.fixtures.wait import wait_until

ROOT = Path(__file__).parents[2]
FIELDS = {
    "transactions", "messages", "violations", "lost", "duplicates", "rate_per_s", "p50_ms", "p99_ms", "model_equal",
    "archived", "audit", "certificate",
}  # fmt: skip

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def place(server_directory: Path) -> Iterator[Path]:
    """Where the demo makes its directory; nothing is there before and after."""
    directory = server_directory / "demo"
    directory.mkdir(mode=0o755)
    yield directory
    assert [path.name for path in directory.iterdir()] == []
    assert processes_of(directory) == []
    directory.rmdir()


def start(place: Path, *options: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MQLAYER_")}
    return subprocess.Popen(
        [sys.executable, "-m", "examples.bank.run", "--scale", "1", *options],
        cwd=ROOT,
        env=environment | {"TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def spark_is_here() -> bool:
    try:
        check_spark()
    except SparkMissing:
        return False
    return True


def processes_of(directory: Path) -> list[str]:
    """Return the commands of living processes that were started for a directory, by command or environment."""
    found = []
    environments = dict(file_of_each_process("environ"))
    for pid, arguments in file_of_each_process("cmdline"):
        facts = arguments + environments.get(pid, b"")
        if str(directory).encode() in facts and pid != os.getpid():
            found.append(facts.split(b"\0")[0].decode())
    return found


@pytest.mark.slow
@pytest.mark.full
def test_the_demo_keeps_the_promise_with_a_killed_and_a_stopped_consumer(place: Path) -> None:
    demo = start(place, "--seconds", "6", "--rate", "40", "--clients", "2", "--json")
    with ClientsSeen(place / "mqlayer-bank-*" / "stack", place / "mqlayer-bank-*") as seen:
        output, progress = demo.communicate()
    assert demo.returncode == 0, progress
    assert seen.kept_out
    # Commands are on a node for moments: none may have been seen.
    commands = seen.users.pop(COMMANDS, set())
    assert seen.users == {name: {f"mqlayer-{name.removesuffix('s')}"} for name in ("relay", "worker", "consumers")}
    assert commands <= {"mqlayer-operator", "mqlayer-admin"}
    verdict = json.loads(output)
    assert output.count("\n") == 1
    assert set(verdict) == FIELDS
    assert verdict["transactions"] > 100
    assert verdict["messages"] == 2 * verdict["transactions"]
    assert (verdict["violations"], verdict["lost"], verdict["model_equal"]) == (0, 0, True)
    assert verdict["archived"] == verdict["messages"]
    assert verdict["audit"] == ("clean" if spark_is_here() else None)
    assert verdict["certificate"] == "accepted"
    assert 0 < verdict["p50_ms"] <= verdict["p99_ms"]
    assert verdict["rate_per_s"] > 0
    for fault in ("killed (SIGKILL)", "stopped (SIGSTOP)", "woken (SIGCONT)"):
        assert fault in progress
    shown, table = progress.split("\n\n", 1)
    assert re.findall(r"\d/6 (\S+)", shown) == list(STEPS)
    # No other program's lines stand between, and all fit.
    assert [line for line in shown.splitlines() if not re.match(r" *\d+\.\d s  | {20}", line)] == []
    assert max(map(len, progress.splitlines())) <= 80
    assert "\x1b" not in progress
    assert "scripts/demo --pop" in table


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_keeps_the_promise_by_ordered_pop_with_a_killed_and_a_stopped_receiver(place: Path) -> None:
    """Cases 50 to 53, 57, 77, with effects of pgbench's own tables; both are caught inside an effect."""
    demo = start(place, "--seconds", "6", "--rate", "60", "--clients", "4", "--json", "--no-spark", "--pop")
    output, progress = demo.communicate()
    assert demo.returncode == 0, progress
    verdict = json.loads(output)
    assert set(verdict) == FIELDS
    assert verdict["messages"] == 2 * verdict["transactions"] > 100
    assert (verdict["violations"], verdict["lost"], verdict["model_equal"]) == (0, 0, True)
    assert verdict["archived"] == verdict["messages"]
    for fault in ("a batch in hand: killed (SIGKILL)", "a batch in hand: stopped (SIGSTOP)", "woken (SIGCONT)"):
        assert fault in progress
    assert "route version 7" in progress


@pytest.mark.full
@pytest.mark.slow
def test_an_interrupted_demo_leaves_nothing_behind(place: Path) -> None:
    demo = start(place, "--seconds", "60", "--rate", "50")
    progress = demo.stderr
    assert progress is not None
    wait_until(lambda: "pgbench runs" in progress.readline(), timeout_s=60, what="pgbench runs")
    assert processes_of(place) != []
    demo.send_signal(signal.SIGINT)
    demo.communicate()
    assert demo.returncode != 0
