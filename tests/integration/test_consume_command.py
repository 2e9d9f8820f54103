"""`mqlayer consume`: real processes on real servers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqlayer.stack.processes import ProcessId, _started, children_of, is_running
from tests.fixtures.appender import Appender
from tests.fixtures.commands import Commands
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

PROGRAM = """
import os, pathlib
import mqlayer

app = mqlayer.App()
place = pathlib.Path(os.environ["HANDLED"])

@app.consumer("orders", group="ledger")
def handle(body: bytes) -> None:
    with place.open("a") as file:
        file.write(f"{os.getpid()} {body.decode()}\\n")
"""

Command = Callable[..., Process]


@pytest.fixture
def handled(tmp_path: Path) -> Path:
    """The file that the program's handler writes to: a line of process and body for each message."""
    (tmp_path / "orders_program.py").write_text(PROGRAM)
    place = tmp_path / "handled"
    place.touch()
    return place


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What the command says."""
    return tmp_path / "log"


@pytest.fixture
def consume(handled: Path, log: Path, database_dsn: str, key_prefix: str) -> Iterator[Command]:
    """Start `mqlayer consume` on the program; it is killed after the test."""
    environment = {**os.environ, "HANDLED": str(handled), "MQLAYER_LEASE_S": "10"}
    environment |= {"MQLAYER_DSN": database_dsn, "MQLAYER_KEY_PREFIX": key_prefix}
    with ExitStack() as cleanup:

        def start(*options: str, path: str = "orders_program:app", **variables: str) -> Process:
            words = ("mqlayer", "consume", path, *options)
            with log.open("ab") as said:
                process = start_python(*words, cwd=handled.parent, env=environment | variables, stderr=said)
            cleanup.callback(end, process, log)
            return process

        yield start


@pytest.fixture
def orders(database_dsn: str, redis_url: str, key_prefix: str) -> Iterator[Appender]:
    """The topic, and a way to append to it."""
    appender = Appender(database_dsn, redis_url, topic="orders", prefix=key_prefix)
    yield appender
    appender.close()


def end(process: Process, log: Path) -> None:
    """Kill the process; pytest shows its log where the test failed."""
    process.kill()
    process.wait()
    sys.stderr.write(log.read_text())


def children(process: Process) -> list[ProcessId]:
    return children_of(ProcessId(process.pid, _started(process.pid) or ""))


def lines(handled: Path) -> list[list[str]]:
    return [line.split() for line in handled.read_text().splitlines()]


def bodies(handled: Path) -> set[str]:
    return {body for _, body in lines(handled)}


def numbered(first: int, last: int) -> list[tuple[str, bytes]]:
    return [(f"key-{number}", str(number).encode()) for number in range(first, last)]


def all_handled(handled: Path, first: int, last: int) -> Callable[[], bool]:
    return lambda: bodies(handled) >= {str(number) for number in range(first, last)}


def test_one_process_handles_messages_until_it_is_asked_to_stop(
    consume: Command, orders: Appender, handled: Path, log: Path
) -> None:
    process = consume("--concurrency", "2")
    orders.send(numbered(0, 20))
    wait_until(all_handled(handled, 0, 20), timeout_s=20, what="20 messages handled")
    process.terminate()
    assert process.wait(20) == 0, log.read_text()
    assert "consumers_started members=1" in log.read_text()
    assert "consumers_stopped members=1 handlers_ended=True" in log.read_text()


def test_several_processes_share_the_messages_and_stop_together(
    consume: Command, orders: Appender, handled: Path, log: Path
) -> None:
    process = consume("--processes", "2")
    wait_until(lambda: len(children(process)) == 2, timeout_s=20, what="two children")
    began = children(process)
    sent = 0

    def shared() -> bool:
        nonlocal sent
        orders.send(numbered(sent, sent + 8))
        sent += 8
        return len({pid for pid, _ in lines(handled)}) == 2

    wait_until(shared, timeout_s=20, what="both processes handle messages")
    wait_until(all_handled(handled, 0, sent), what="all messages handled")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0, log.read_text()
    assert not any(is_running(child) for child in began)
    assert len(lines(handled)) == sent


@pytest.mark.full
@pytest.mark.slow
def test_a_process_that_dies_is_started_again(consume: Command, orders: Appender, handled: Path, log: Path) -> None:
    process = consume("--processes", "2")
    orders.send(numbered(0, 20))
    wait_until(all_handled(handled, 0, 20), timeout_s=20, what="messages handled")
    wait_until(lambda: len(children(process)) == 2, what="two children")
    at_work = lines(handled)[0][0]
    victim, survivor = sorted(children(process), key=lambda child: str(child.pid) != at_work)
    os.kill(victim.pid, signal.SIGKILL)
    orders.send(numbered(20, 40))

    wait_until(all_handled(handled, 20, 40), timeout_s=20, what="messages handled after the kill")
    wait_until(lambda: len(children(process)) == 2, timeout_s=20, what="two children again")
    assert survivor in children(process)
    assert victim not in children(process)
    process.terminate()
    assert process.wait(20) == 0, log.read_text()
    assert f"pid={victim.pid} signal=SIGKILL again_in_s=" in log.read_text()


@pytest.mark.full
def test_partitions_of_a_dead_process_go_on_long_before_its_lease_ends(
    consume: Command, orders: Appender, handled: Path, log: Path
) -> None:
    """A stopped process keeps them: nobody saw it end."""
    process = consume("--processes", "2", MQLAYER_LEASE_S="120")
    sent = 0

    def shared() -> bool:
        nonlocal sent
        orders.send(numbered(sent, sent + 8))
        sent += 8
        return len({pid for pid, _ in lines(handled)}) == 2

    wait_until(shared, timeout_s=20, longest_s=0.5, what="both processes handle messages")
    wait_until(all_handled(handled, 0, sent), what="all messages handled")
    victim, survivor = (child.pid for child in children(process))
    os.kill(victim, signal.SIGSTOP)
    orders.send(numbered(sent, sent + 40))
    later = {str(number) for number in range(sent, sent + 40)}
    wait_until(lambda: bodies(handled) & later, what="the survivor's own messages")
    assert "dead_member_ended" not in log.read_text()
    os.kill(victim, signal.SIGKILL)
    wait_until(all_handled(handled, sent, sent + 40), timeout_s=20, what="messages of the dead process")
    wait_until(lambda: "dead_member_ended" in log.read_text(), what="its session's end in the log")
    assert str(survivor) in {pid for pid, body in lines(handled) if body in later}
    process.terminate()
    assert process.wait(20) == 0, log.read_text()
    assert log.read_text().count("dead_member_ended") == 1


@pytest.mark.full
def test_a_process_that_dies_while_it_starts_is_started_again(
    consume: Command, orders: Appender, handled: Path, log: Path
) -> None:
    process = consume("--processes", "2")
    wait_until(lambda: len(children(process)) == 2, timeout_s=20, what="two children")
    victim, survivor = children(process)
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: victim not in children(process), what="the victim's end is seen")
    wait_until(lambda: len(children(process)) == 2, timeout_s=20, what="two children again")
    assert survivor in children(process)
    orders.send(numbered(0, 20))
    wait_until(all_handled(handled, 0, 20), timeout_s=20, what="messages handled")
    process.terminate()
    assert process.wait(20) == 0, log.read_text()


def test_no_process_outlives_a_killed_supervisor(consume: Command, orders: Appender, handled: Path) -> None:
    process = consume("--processes", "2")
    orders.send(numbered(0, 20))
    wait_until(all_handled(handled, 0, 20), timeout_s=20, what="messages handled")
    wait_until(lambda: len(children(process)) == 2, what="two children")
    began = children(process)
    process.kill()
    wait_until(lambda: not any(is_running(child) for child in began), timeout_s=20, what="the children ended")


@pytest.mark.full
def test_a_changed_file_replaces_the_process_once_its_handlers_are_done(
    consume: Command, orders: Appender, handled: Path, log: Path
) -> None:
    """A program that does not load is waited for; the process stops in order."""
    program = handled.parent / "orders_program.py"
    process = consume("--reload")
    orders.send(numbered(0, 5))
    wait_until(all_handled(handled, 0, 5), timeout_s=20, what="the first program")
    program.write_text("this is no Python\n")
    wait_until(lambda: "process_did_not_start" in log.read_text(), timeout_s=20, what="the broken program")
    program.write_text(PROGRAM.replace("{body.decode()}", "new-{body.decode()}"))
    orders.send(numbered(5, 10))
    wait_until(
        lambda: {f"new-{number}" for number in range(5, 10)} <= bodies(handled), timeout_s=20, what="the new one"
    )
    process.terminate()
    assert process.wait(20) == 0, log.read_text()
    assert "reloading" in log.read_text()
    assert "process_died" not in log.read_text()
    assert len(lines(handled)) == 10


def test_reloading_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> None:
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    monkeypatch.setattr("mqlayer.cli.reload.find_spec", lambda name: None)
    assert "pip install 'mqlayer[reload]'" in Commands().failure("consume", "x:app", "--reload")


@pytest.mark.full
def test_a_second_signal_kills_what_does_not_stop(consume: Command, orders: Appender, handled: Path, log: Path) -> None:
    program = (handled.parent / "orders_program.py").read_text()
    stuck = program + "    import threading; threading.Event().wait()\n"
    (handled.parent / "orders_program.py").write_text(stuck)
    process = consume("--processes", "2")
    orders.send(numbered(0, 1))
    wait_until(lambda: lines(handled), timeout_s=20, what="a message that is never done")
    began = children(process)
    process.terminate()
    wait_until(lambda: process.poll() is None and len(children(process)) < 2, timeout_s=20, what="the idle one ended")
    process.terminate()
    assert process.wait(20) == 1, log.read_text()
    assert "processes_killed" in log.read_text()
    assert not any(is_running(child) for child in began)


@pytest.mark.slow
@pytest.mark.parametrize("count", some_of(["1", "2"], 2))
def test_what_can_not_start_fails_with_the_reason_and_no_password(
    consume: Command, handled: Path, log: Path, count: str
) -> None:
    process = consume("--processes", count, MQLAYER_DSN="postgresql://me:s3cret@127.0.0.1:1/none")
    assert process.wait(30) == 1
    assert "postgres at 127.0.0.1:1/none is not available" in log.read_text()
    assert "s3cret" not in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.full
def test_an_unknown_topic_is_named(consume: Command, handled: Path, log: Path) -> None:
    process = consume("--processes", "2")
    assert process.wait(30) == 1
    assert "unknown topic 'orders'" in log.read_text()


def test_a_wrong_path_is_named_once(consume: Command, handled: Path, log: Path) -> None:
    process = consume("--processes", "3", path="no_such_shop:app")
    assert process.wait(30) == 1
    assert log.read_text().count("unknown module 'no_such_shop'") == 1


def test_a_fixed_member_id_is_refused_for_several_processes(consume: Command, handled: Path, log: Path) -> None:
    program = PROGRAM.replace('"ledger"', '"ledger", options=mqlayer.MemberOptions(member_id="m-1")')
    (handled.parent / "orders_program.py").write_text(program)
    process = consume("--processes", "2")
    assert process.wait(30) == 1
    assert "member id 'm-1' is for one process" in log.read_text()
