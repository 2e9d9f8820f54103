"""Processes in the background: started, found again, ended, never confused."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqlayer.stack import ServerFailed, processes
from mqlayer.stack.background_process import BackgroundProcess
from mqlayer.stack.processes import ProcessId
from tests.fixtures.wait import wait_until

SERVING = "import os, signal; print('serving', os.environ.get('COLOUR'), flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('serving', flush=True)\n"
    "while True: signal.pause()"
)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The directory of a background process, which is gone afterwards."""
    yield tmp_path / "job"
    background(tmp_path / "job").stop()


def background(place: Path, program: str = SERVING) -> BackgroundProcess:
    return BackgroundProcess(place, ("-c", program), {"COLOUR": "green"}, ready_line="serving")


def test_start_returns_when_the_process_says_that_it_serves(place: Path) -> None:
    process = background(place)
    process.start()
    assert process.log.read_text() == "serving green\n"
    assert process.running


def test_starting_again_leaves_the_process_as_it_is(place: Path) -> None:
    background(place).start()
    pid = background(place).pid
    background(place).start()
    assert background(place).pid == pid


def test_a_line_of_an_earlier_run_does_not_count(place: Path) -> None:
    background(place).start()
    background(place).stop()
    with pytest.raises(ServerFailed, match="ended at once"):
        background(place, "print('too early')").start()


def test_a_process_that_ends_at_once_fails_with_the_end_of_its_log(place: Path) -> None:
    with pytest.raises(ServerFailed, match=r"(?s)job: ended at once; see .*job\.log.*boom"):
        background(place, "raise SystemExit('boom')").start()
    assert not background(place).running


def test_erase_removes_log_and_state(place: Path) -> None:
    background(place).start()
    background(place).erase()
    assert not place.exists()


def test_stop_asks_first_and_then_kills(tmp_path: Path) -> None:
    log = tmp_path / "log"
    polite, stubborn = (processes.spawn([sys.executable, "-c", text], log=log) for text in (SERVING, STUBBORN))
    wait_until(lambda: log.read_text().count("serving") == 2, what="both to serve")
    assert processes.stop(polite, within_s=10) is True
    assert processes.stop(stubborn, within_s=0.05) is False
    assert not processes.is_running(stubborn)


def test_a_stopped_process_counts_as_running(tmp_path: Path) -> None:
    process = processes.spawn([sys.executable, "-c", SERVING], log=tmp_path / "log")
    processes.send(process, signal.SIGSTOP)
    assert processes.is_running(process)
    processes.kill(process)
    assert not processes.is_running(process)


def test_a_stopped_process_can_be_asked_to_end(tmp_path: Path) -> None:
    process = processes.spawn([sys.executable, "-c", SERVING], log=tmp_path / "log")
    processes.send(process, signal.SIGSTOP)
    assert processes.stop(process, within_s=10) is True


def test_a_process_is_not_running_under_another_start_time() -> None:
    own = processes.identify(os.getpid())
    assert processes.is_running(own)
    assert not processes.is_running(ProcessId(own.pid, "1"))
    assert not processes.is_running(ProcessId(own.pid, ""))


def test_signals_never_reach_a_later_owner_of_the_pid() -> None:
    processes.send(ProcessId(os.getpid(), "1"), signal.SIGKILL)


def test_a_server_survives_the_command_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    starter = (
        "import sys; from pathlib import Path; from mqlayer.stack import processes\n"
        f"print(processes.spawn([sys.executable, '-c', {SERVING!r}], log=Path({str(log)!r})).pid)"
    )
    starting = processes.spawn([sys.executable, "-c", starter], log=tmp_path / "starter")
    assert processes.ends(starting, within_s=30)
    wait_until(lambda: "serving" in log.read_text(), what="the orphan to serve")
    orphan = processes.identify(int((tmp_path / "starter").read_text()))
    assert processes.is_running(orphan)
    processes.kill(orphan)
    assert not processes.is_running(orphan)
