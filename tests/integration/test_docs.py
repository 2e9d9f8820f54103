"""The documents' examples run: every Python block of a page in order, every `mqlayer` line of a shell block."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import SecretStr

import mqlayer
import mqlayer.logs
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.stack import AnyRedis
from mqlayer.topics import create_topic, register_node
from mqlayer.traces import tracing
from mqlayer.workers import connections
from tests.fixtures.commands import Commands
from tests.fixtures.pages import examples, lines_of, runnable
from tests.fixtures.variants import some_of
from tests.proof.runtimes import runtime_of

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
TUTORIAL: Final = DOCS / "tutorial" / "ordered-consumer.md"
"""See test_tutorial.py."""
WITHOUT_EXAMPLE: Final = {
    "grant-rights",
    "respond-to-alerts",
    "run-on-kubernetes",
    "run-under-systemd",
    "troubleshoot",
    "use-a-pooler",
    "use-tls",
}
"""How-to pages whose commands need roles, faults or servers of their reader."""
LEAST_EXAMPLES: Final = 175
"""How many blocks and commands of the pages run: a change that marks many as not run would go unseen."""


@pytest.fixture
def settings(
    database_dsn: str, redis_server: AnyRedis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Settings]:
    """A node and the topic `orders`, with their addresses in the environment as a user would have them."""
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with Database(database_dsn) as database:
        register_node(runtime_of(database), name="node-1", url=redis_server.url)
        create_topic(runtime_of(database, key_prefix, application=database), "orders", partitions=2)
    monkeypatch.setenv("MQLAYER_DSN", database_dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", key_prefix)
    monkeypatch.setenv("MQLAYER_BROKER_URL", redis_server.url)
    # Pages set variables for what they start themselves; the test's environment must not keep them.
    monkeypatch.setenv("MQLAYER_CONSUMERS", "")
    # As before such a page, calls of later tests make no spans.
    monkeypatch.setattr(tracing, "_made", [])
    monkeypatch.setattr(mqlayer.logs, "_trace_ids", [])
    yield settings
    connections.close()


KEY_MAKERS: Final = ("openssl genpkey ", "openssl pkey ")
PAGES: Final = [page for page in sorted(DOCS.rglob("*.md")) if page != TUTORIAL and runnable(page)]


def page_id(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize("page", some_of(PAGES, 3), ids=page_id)
def test_every_example_of_a_page_runs(
    page: Path, settings: Settings, logging_as_before: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A page gives all that its examples need: they run in an empty module, on a stack with the topic `orders`, in a
    directory that has what the project has."""
    for entry in ROOT.glob("[!.]*"):
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": f"docs.{page.stem}"}
    for number, (language, text) in enumerate(examples(page)):
        if language == "python":
            # Annotations must resolve in the names of the page, as in a module.
            sys.modules.setdefault(names["__name__"], sys.modules[__name__])
            exec(compile(text, f"{page.name}[{number}]", "exec", dont_inherit=True), names)
        else:
            run_commands(text)
    # What goes on running would disturb other tests, and readers.
    left = [app for app in names.values() if isinstance(app, mqlayer.App) and app.members]
    for app in left:
        app.stop(1.0)
    assert not left, f"{page.name} leaves an application running"


def test_every_how_to_page_has_an_example_that_runs() -> None:
    without = {page.stem for page in (DOCS / "how-to").glob("*.md") if not runnable(page)}
    assert without == WITHOUT_EXAMPLE
    assert sum(map(runnable, [*PAGES, TUTORIAL])) >= LEAST_EXAMPLES


def test_the_first_program_of_the_readme_is_the_one_that_the_tests_run() -> None:
    """See test_first_program.py."""
    first = next(text for language, text in examples(ROOT / "README.md") if language == "python")
    assert first in (ROOT / "examples" / "first" / "orders.py").read_text("utf-8")


def test_the_direct_publishing_of_the_readme_runs(settings: Settings) -> None:
    direct = [text for language, text in examples(ROOT / "README.md") if language == "python"][1]
    names: dict[str, Any] = {"mqlayer": mqlayer}
    exec(compile(direct, "README.md", "exec", dont_inherit=True), names)
    assert names["receipt"].topic == "orders"
    assert names["future"].result(0).offset == 2


def test_every_setting_is_in_the_table_of_settings_with_its_default() -> None:
    table = (DOCS / "reference" / "settings.md").read_text("utf-8")
    shown = dict(re.findall(r"^\| `MQLAYER_(\w+)` \| (.*?) ?\|", table, re.MULTILINE))
    for name, field in Settings.model_fields.items():
        assert name.upper() in shown
        if isinstance(field.default, bool):
            assert shown[name.upper()] == ("on" if field.default else "off")
        elif isinstance(field.default, int | float):
            assert float(shown[name.upper()]) == field.default, name


def run_commands(block: str) -> None:
    """Run the `mqlayer` lines of a shell block, in this process: a new one costs more than most commands.

    Keys are made too.
    """
    for command in map(shlex.split, lines_of(block, "mqlayer ", *KEY_MAKERS)):
        if command[0] != "mqlayer":
            subprocess.run(command, check=True, capture_output=True)
            continue
        ended = Commands()(*command[1:])
        assert ended.exit_code == 0, f"{shlex.join(command)}: {ended.output}"
