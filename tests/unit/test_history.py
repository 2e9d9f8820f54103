"""Histories survive what happens to the processes that write them."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.proof.history import (
    Deliver,
    Drain,
    Effect,
    Event,
    Gate,
    Health,
    History,
    Lineage,
    OwnershipEvent,
    Publish,
    Seal,
    SharedSequence,
    digest,
    read_histories,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def publish(key: str = "k1") -> Publish:
    return Publish(topic="orders", key=key, value="v")


def test_an_operation_leaves_a_line_before_and_after_it(tmp_path: Path) -> None:
    """The outcome has the number of its invoke, and the facts learned meanwhile."""
    with History(tmp_path, "writer") as history:
        history.begin(publish()).ok(source=1, lp=17, seq=4)
    before, after = read_histories(tmp_path)
    assert (before.phase, before.event) == ("invoke", publish())
    assert (after.phase, after.operation) == ("ok", before.operation)
    assert after.event == Publish(topic="orders", key="k1", value="v", source=1, lp=17, seq=4)
    assert (after.process, after.pid) == ("writer", os.getpid())
    assert before.at_ns <= after.at_ns


@pytest.mark.parametrize("outcome", ["ok", "fail", "info"])
def test_every_outcome_is_written(tmp_path: Path, outcome: str) -> None:
    """Under its own name."""
    with History(tmp_path, "writer") as history:
        getattr(history.begin(publish()), outcome)()
    assert [record.phase for record in read_histories(tmp_path)] == ["invoke", outcome]


@pytest.mark.parametrize(
    "event",
    [
        Deliver(topic="orders", key=None, source=1, lp=2, seq=3, value="v", group="g", partition=4, epoch=5, attempt=6),
        Effect(topic="orders", key="ключ", seq=3, group="g", partition=4, fenced=False, place=9),
        Gate(topic="orders", group="g", partition=4, parents=(1, 2)),
        Drain(topic="orders", group="g", partition=4, epoch=5),
        Lineage(topic="orders", partition=4, parents=(1, 2)),
        Seal(topic="orders", partition=4, offset=9, run="r"),
        OwnershipEvent(topic="orders", group="g", partition=4, member="m", epoch=7, change="kept", until_ns=8),
        Health(healthy=False),
    ],
)
def test_an_event_is_read_as_it_was_noted(tmp_path: Path, event: Event) -> None:
    """Of every kind and with every fact."""
    with History(tmp_path, "process") as history:
        history.note(event)
    (record,) = read_histories(tmp_path)
    assert (record.phase, record.event) == ("ok", event)


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    """At whatever byte the line was torn."""
    with History(tmp_path, "writer") as history:
        history.note(publish("k1"))
        history.note(publish("k2"))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    first_line_bytes = whole.index(b"\n") + 1
    for length in range(first_line_bytes, len(whole)):
        path.write_bytes(whole[:length])
        assert [record.event for record in read_histories(tmp_path)] == [publish("k1")]


def test_a_torn_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    """It can't come from a kill, so the history is not to be trusted."""
    with History(tmp_path, "writer") as history:
        history.note(publish())
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:20] + b"\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"writer\.\d+\.jsonl, line 1"):
        read_histories(tmp_path)


def run_python(program: str, *arguments: Path) -> int:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=REPOSITORY, timeout=30, check=False
    ).returncode


def test_a_killed_process_loses_no_line_that_it_wrote(tmp_path: Path) -> None:
    """Every line was handed to the system before the next thing was done."""
    program = (
        "import os, signal, sys\n"
        "from tests.proof.history import History, Publish\n"
        "history = History(sys.argv[1], 'victim')\n"
        "for seq in range(1, 101):\n"
        "    history.begin(Publish(topic='orders')).ok(seq=seq)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_python(program, tmp_path) == -signal.SIGKILL
    assert len(read_histories(tmp_path)) == 200


def test_threads_share_a_history(tmp_path: Path) -> None:
    """Each line is whole, each operation has its own number."""
    with History(tmp_path, "writer") as history, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: history.begin(publish()).ok(), range(400)))
    records = read_histories(tmp_path)
    assert len(records) == 800
    assert len({record.operation for record in records}) == 400


def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path) -> None:
    """With its own pid, so that operations of parent and child are never mixed up."""
    program = (
        "import os, sys\n"
        "from tests.proof.history import History, Publish\n"
        "history = History(sys.argv[1], 'worker')\n"
        "history.note(Publish(topic='orders', key='parent'))\n"
        "child = os.fork()\n"
        "history.note(Publish(topic='orders', key='parent' if child else 'child'))\n"
        "if child:\n"
        "    os.waitpid(child, 0)\n"
    )
    assert run_python(program, tmp_path) == 0
    keys: dict[int, list[str | None]] = {}
    for record in read_histories(tmp_path):
        assert isinstance(record.event, Publish)
        keys.setdefault(record.pid, []).append(record.event.key)
    assert sorted(keys.values()) == [["child"], ["parent", "parent"]]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_shared_sequence_gives_every_number_once(tmp_path: Path) -> None:
    """To threads of one process; each sees its own numbers grow."""
    number = SharedSequence(tmp_path / "sequence")
    given: list[list[int]] = [[] for _ in range(4)]

    def take(numbers: list[int]) -> None:
        numbers.extend(number() for _ in range(100))

    threads = [threading.Thread(target=take, args=(numbers,)) for numbers in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(n for numbers in given for n in numbers) == list(range(1, 401))
    assert all(numbers == sorted(numbers) for numbers in given)


def test_lines_carry_the_shared_sequence(tmp_path: Path) -> None:
    """When the test gave one."""
    with History(tmp_path, "writer", sequence=SharedSequence(tmp_path / "sequence")) as history:
        history.begin(publish()).ok()
    assert [record.sequence for record in read_histories(tmp_path)] == [1, 2]


def test_a_digest_is_short_and_tells_bodies_apart() -> None:
    """Sixteen characters, the same for the same body."""
    assert digest(b"a") == digest(b"a") != digest(b"b")
    assert len(digest(b"a")) == 16
