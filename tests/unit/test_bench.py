"""What `python -m bench` prints: one JSON object per line, with the fields that scripts read."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import pytest

from bench import __main__ as program
from bench import consume
from bench.registry import BENCHES, Line, compared
from bench.stage import Stage


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


def test_a_bench_that_fails_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Stage, "system", fail)
    with Stage() as stage, pytest.raises(ZeroDivisionError):
        list(consume.consume(stage))
    assert gc.get_freeze_count() == 0
