"""What `python -m bench` prints: one JSON object per line, with the fields that scripts read."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench import __main__ as program
from bench import consume, keys, rebalance
from bench.bloat import Size, Sizes
from bench.consumer_notes import NOTE
from bench.processes import Note, Worker
from bench.registry import BENCHES, Bench, Line, compared
from bench.stage import Stage
from bench.takeover import first_of_each, longest_gap_ms
from mqlayer.domain.routing import PartitionId


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a bench that needs no server."""

    def measure(_stage: Stage) -> Iterator[Line]:
        yield compared("tiny", 30.0, 40.0, unit="msg/s", target=0.5)
        yield Line(name="tiny[alone]", value=1.5, unit="ms", baseline=None, ratio=None, target=None)

    monkeypatch.setitem(BENCHES, "tiny", measure)
    return "tiny"


def test_each_result_is_one_json_object_with_all_fields(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    program.main([tiny], as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"name": "tiny", "value": 30.0, "unit": "msg/s", "baseline": 40.0, "ratio": 0.75, "target": 0.5},
        {"name": "tiny[alone]", "value": 1.5, "unit": "ms", "baseline": None, "ratio": None, "target": None},
    ]


def test_a_table_that_grows_with_the_messages_is_told_from_one_that_does_not() -> None:
    grows, stays = [megabytes(number) for number in range(1, 9)], [megabytes(4)] * 8
    samples = [{"grows": one, "stays": other} for one, other in zip(grows, stays, strict=True)]
    sizes = Sizes(None, "outbox", samples)  # type: ignore[arg-type]
    assert {line.name: line.ratio for line in sizes.lines()} == {
        "bloat[outbox, grows]": 2.0,
        "bloat[outbox, stays]": 1.0,
    }


def megabytes(count: int) -> Size:
    """Return a table of a size, with an index of a quarter of it."""
    return Size(count * 750_000, count * 250_000, 0, 0, 0)


def test_every_bench_that_docs_name_is_there() -> None:
    program.load_benches()
    documented = (Path(__file__).parents[2] / "docs" / "reference" / "figures.md").read_text("utf-8")
    named = set(re.findall(r"^\| `([a-z_]+)", documented, re.MULTILINE))
    assert named <= set(BENCHES)
    assert {"takeover", "join", "scale_members", "key_parallel", "rebalance_compute"} <= named


@pytest.mark.parametrize("measure", [consume.consume, keys.key_parallel])
def test_a_bench_that_fails_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch, measure: Bench) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Stage, "system", fail)
    with Stage() as stage, pytest.raises(ZeroDivisionError):
        list(measure(stage))
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("name", sorted(rebalance.CHOOSE))
def test_the_choice_for_a_thousand_partitions_and_two_hundred_members_takes_less_than_the_limit(name: str) -> None:
    partitions = [PartitionId(number) for number in range(1, rebalance.PARTITIONS + 1)]
    for members, now in rebalance.cases(partitions).values():
        choose = partial(rebalance.CHOOSE[name], partitions, members, now)
        # Of this thread's processor time: others may want the processors too.
        assert rebalance.median_ms(3, choose, clock=time.thread_time) < rebalance.LIMIT_MS


def test_gaps_are_of_one_partition_each_and_count_from_the_first_to_the_last_moment() -> None:
    notes = [Note(1, 2_000_000), Note(2, 3_000_000), Note(1, 6_000_000), Note(2, 8_000_000), Note(1, 30_000_000)]
    assert longest_gap_ms(notes, {1}, 0, 10_000_000) == 4.0
    assert longest_gap_ms(notes, {1, 2}, 0, 10_000_000) == 5.0
    assert longest_gap_ms(notes, {3}, 0, 10_000_000) == 10.0
    assert first_of_each(notes, {1, 3}) == [2_000_000]


def test_a_processs_notes_are_found_by_their_time_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    worker = Worker(["-c", ""], {}, file)
    worker.process.communicate()
    assert worker.notes() == []
    notes = [Note(number % 3, number * 10) for number in range(100)]
    file.write_bytes(b"".join(NOTE.pack(*one) for one in notes) + b"torn")
    assert worker.handled == 100
    assert worker.notes() == notes
    assert worker.notes(since_ns=951) == notes[96:]
    assert worker.partitions(since_ns=990) == {0}


def test_a_load_whose_handlers_take_long_gets_fewer_messages() -> None:
    assert keys.Load(1_000, 0, 5).count == keys.MESSAGES
    assert keys.Load(1, 0, 0).count == keys.MESSAGES
    assert keys.Load(1, 5, 5).count * 0.005 <= keys.LONGEST_S
    assert list(keys.Load(1, 0, 5).waits()) == list(keys.Load(1, 0, 5).waits())
