"""The help of each command at 80 columns: lines that fit, and whole words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from mqlayer.cli.commands import COMMANDS
from tests.fixtures.command_tree import commands
from tests.fixtures.commands import Commands
from tests.fixtures.screens import faults_of

WIDTH = 80
LINES = re.compile(r"[│╭╮╰╯─]")


def words_of(command: Any) -> Iterator[str]:
    """Yield each word that a command's help is to have."""
    yield from (command.help or "").replace("`", "").split()
    for one in command.params:
        yield from (getattr(one, "help", None) or "").replace("`", "").split()
        yield from (one.display_type_rich(None) or "").split()
        yield from (*one.opts, *one.secondary_opts) if one.param_type_name == "option" else ()


def help_of(words: list[str]) -> str:
    return str(Commands()(*words, "--help").output)


def test_each_commands_help_fits_and_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    found = {}
    for words, command in commands():
        page = help_of(words)
        shown = set(LINES.sub(" ", page).replace("`", "").split())
        found[" ".join(words)] = [word for word in words_of(command) if word not in shown] + faults_of(page, WIDTH)
    assert len(found) > len(COMMANDS)
    assert {words: faults for words, faults in found.items() if faults} == {}


def test_the_lists_of_commands_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    groups = {tuple(words[:-1]) for words, _ in commands()}
    for words in groups:
        page = help_of([*words])
        assert faults_of(page, WIDTH) == [], words
        assert "…" not in page, words
