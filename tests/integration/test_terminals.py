"""What came from outside reaches a terminal as text: never as a command to it, a line of ours, or markup."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from mqlayer.cli.errors import show_failure
from mqlayer.cli.output import echo, show_rows
from mqlayer.errors import StoreUnavailable
from mqlayer.escaping import escape
from mqlayer.groups import join
from mqlayer.logs import EventFormatter, JsonFormatter
from tests.fixtures.command_tree import leaf_commands
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Stage
from tests.fixtures.failed_messages import Failing, identity_of
from tests.fixtures.kept_connections import kept_session

COMMANDS = [*map(chr, range(1, 32)), "\x7f", *map(chr, range(0x80, 0xA0))]
UNSEEN = [*"\u200b\u200c\u200d\u2060\ufeff\u00ad\u061c\u200e\u200f\u2028\u2029\u3164", "\U000e0041"]
TURNED = [*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))]
HOSTILE = "\x1b[2J" + "".join(COMMANDS + UNSEEN + TURNED) + "\n[red]x[/red]:heart: ü"
LEFT_OUT = {"console", "consume", "exporter", "relay", "run", "up", "analytics"}
"""They run until they are stopped, start servers of their own, or need Java."""
KEPT = {"url"}
"""Columns whose values are addresses: a node that can't be reached would show nothing of what is in it."""


@pytest.fixture
def hostile(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logging_as_before: None) -> dict[str, str]:
    """A system that holds hostile text wherever its stores take it; return arguments for commands by their names."""
    failing = Failing(stage)
    join(stage.database, group_id=failing.group_id, member_id="m1", lease_s=600)
    stage.send([(HOSTILE, b"{}"), (HOSTILE, HOSTILE.encode())])
    records = failing.records()
    failing.park(records[0], cause="exhausted", attempts=3)
    failing.attempt(records[0], 1, HOSTILE)
    (dead_id,) = failing.dead_letter(records[1], reason=HOSTILE, actor=HOSTILE)
    with kept_session(stage.dsn, autocommit=True) as connection:
        changed = spoil(connection)
    assert changed > 5
    for name in ("MQLAYER_DSN", "MQLAYER_APP_DSN"):
        monkeypatch.setenv(name, stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    monkeypatch.chdir(tmp_path)
    return {
        "topic": stage.topic, "name": stage.topic, "group": "g", "key": HOSTILE, "dead_id": str(dead_id),
        "message": str(identity_of(records[0])), "reason": HOSTILE, "entity": HOSTILE,
    }  # fmt: skip


def spoil(connection: psycopg.Connection[Any]) -> int:
    """Put hostile text into every column that takes it; return into how many."""
    columns = connection.execute(
        "SELECT table_schema, table_name, column_name FROM information_schema.columns "
        "JOIN information_schema.tables USING (table_schema, table_name) WHERE table_schema LIKE 'mqlayer%' "
        "AND table_type = 'BASE TABLE' AND data_type IN ('text', 'character varying')"
    ).fetchall()
    changed = 0
    for schema, table, column in columns:
        if column in KEPT:
            continue
        statement = sql.SQL("UPDATE {} SET {} = left({}, 20) || {}").format(
            sql.Identifier(schema, table), sql.Identifier(column), sql.Identifier(column), sql.Literal(HOSTILE)
        )
        try:
            changed += connection.execute(statement).rowcount > 0
        except psycopg.Error:
            # A constraint keeps such text out.
            continue
    return changed


def unseen(text: str) -> set[str]:
    return {one for one in text if one != "\n" and not one.isprintable()}


@pytest.mark.slow
def test_no_command_prints_what_a_terminal_would_obey(
    hostile: dict[str, str], typed_commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ""
    for words in leaf_commands(without=LEFT_OUT, value_of=hostile.get):
        with monkeypatch.context() as patches:
            errors = io.StringIO()
            patches.setattr(sys, "stderr", errors)
            result = typed_commands("--log-level", "DEBUG", *words)
        said = result.output + errors.getvalue()
        # Usage errors show what was typed, in typer's own frame.
        if result.exit_code != 2:
            assert (unseen(said), [line for line in said.splitlines() if line.startswith("[red]")]) == (set(), []), (
                words
            )
            told += said
    assert "\\u001b[2J" in told
    assert "[red]x[/red]:heart: ü" in told


def test_json_of_commands_is_exact(hostile: dict[str, str], typed_commands: Commands) -> None:
    lists = [["parked", "list"], ["dead", "list"], ["parked", "show", "orders", "g", HOSTILE]]
    for words in lists:
        (line,) = typed_commands.lines(*words)
        assert line["key"] == HOSTILE
        result = typed_commands(*words, "--json")
        assert unseen(result.stdout) == set()
    (shown,) = typed_commands.lines("dead", "show", hostile["dead_id"])
    assert shown["reason"].endswith(HOSTILE)
    assert HOSTILE in json.dumps(shown, ensure_ascii=False) or shown["body"]


@pytest.fixture
def typed_commands() -> Commands:
    """Commands as they are typed."""
    return Commands()


def test_every_way_to_show_a_text_escapes_it(capsys: pytest.CaptureFixture[str]) -> None:
    echo(HOSTILE)
    echo(HOSTILE, err=True)
    show_rows([{"a": HOSTILE, "b": None}], as_json=False, nothing="")
    show_rows([], as_json=False, nothing=HOSTILE)
    show_failure(StoreUnavailable("h", HOSTILE))
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert unseen(text) == set()
        assert "\n[red]" not in text
        assert "[red]x[/red]:heart:" in text


def test_log_lines_escape_messages_fields_and_traces() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        facts = {"msg": HOSTILE, "exc_info": sys.exc_info(), "reason": HOSTILE, "name": HOSTILE}
    line, as_json = (one.format(logging.makeLogRecord(facts)) for one in (EventFormatter(), JsonFormatter()))
    assert (unseen(line), unseen(as_json)) == (set(), set())
    assert json.loads(as_json)["reason"] == HOSTILE


def test_what_is_seen_stays_as_it_is() -> None:
    for text in ("", "order-7", "J\u00f6rg", "\u6ce8\u6587", "[x]", "a b", "\\n"):
        assert escape(text) == text
    assert escape("a\nb") == "a\\nb"
    assert escape("a\nb", lines=True) == "a\nb"


def test_nothing_of_the_commands_prints_past_the_place_that_escapes() -> None:
    """Only JSON, and SQL for a file, go out as they are."""
    ways = (r"typer\.echo\((?!json|migrations\.script)", r"(?<![\w.])print\(", r"(?<!\w)Console\(", r"secho\(")
    past = re.compile("|".join((*ways, r"std(out|err)\.write\(")))
    own = {"output.py"}
    for path in (Path(__file__).parents[2] / "mqlayer" / "cli").glob("*.py"):
        found = [line for line in path.read_text("utf-8").splitlines() if past.search(line)]
        assert found == [] or path.name in own, (path.name, found)
