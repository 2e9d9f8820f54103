"""No failpoint without a test that stops there."""

from __future__ import annotations

from pathlib import Path

from tests.proof.failpoint_names import failpoint_names

TESTS = Path(__file__).parents[1]


def test_each_failpoint_is_named_by_a_test_or_belongs_to_a_room_that_one_enumerates() -> None:
    """`"relay."` in a test stands for all failpoints of the relay: it takes them from the source."""
    text = "".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    unnamed = [name for name in failpoint_names() if name not in text and f'("{name.split(".")[0]}.")' not in text]
    assert unnamed == []
