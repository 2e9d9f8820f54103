"""What every command that shows something prints at 80 and at 140 columns: lines that fit, and whole words.

`WRITE_SCREENS=DIRECTORY` keeps the screens there, to look at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqlayer.cli import output
from tests.fixtures.command_scenes import SHOWS, SHOWS_BODIES, System
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Stage
from tests.fixtures.screens import faults_of
from tests.fixtures.servers import StartRedis

SCREENS = SHOWS | SHOWS_BODIES | {
    "peek": "orders", "doctor": "", "doctor --all": "", "route split": "orders {first} --at 100",
    "parked show": "orders g a",
}  # fmt: skip
WIDTHS = (80, 140)
COPIED = {"node acl", "exporter"}
"""A rule is copied as a whole, a sample is read by a program."""


@pytest.fixture
def system(stage: Stage, start_redis: StartRedis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> System:
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    monkeypatch.chdir(tmp_path)
    found = System(stage, start_redis)
    found.all_that_is_shown()
    found.facts["first"] = stage.partitions[0]
    return found


@pytest.mark.slow
def test_every_screen_fits_its_terminal_and_breaks_no_word(
    system: System, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    folded: list[tuple[str, list[str]]] = []

    def watched(text: str, width: int | None, hang: str = "  ") -> Iterator[str]:
        lines = list(fold(text, width, hang))
        folded.append((text, lines))
        return iter(lines)

    fold = output.fold
    monkeypatch.setattr(output, "fold", watched)
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        screens = {words: screen(words, system) for words in SCREENS}
        for words, shown in screens.items():
            assert (words in COPIED) or faults_of(shown, width) == [], words
        if directory := os.environ.get("WRITE_SCREENS"):
            text = "\n".join(f"$ mqlayer {words}\n{shown}" for words, shown in screens.items())
            Path(directory, f"screens-{width}.txt").write_text(text, "utf-8")
    assert [text for text, lines in folded if " ".join(lines).split() != text.split()] == []
    assert any(len(lines) > 1 for _, lines in folded)


def screen(words: str, system: System) -> str:
    result = Commands()(*words.split(), *SCREENS[words].format(**system.facts).split())
    assert isinstance(result.exception, SystemExit | None), (words, result.output)
    return str(result.output)
