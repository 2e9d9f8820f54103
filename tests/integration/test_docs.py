"""The documents' examples run: every Python block of a page in order, every `mqlayer` line of a shell block."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import SecretStr

import mqlayer
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.stack import AnyRedis
from mqlayer.topics import create_topic, register_node
from mqlayer.workers import stores
from tests.fixtures.forking import run_python
from tests.fixtures.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted((ROOT / "docs").glob("*.md"))
BLOCK: Final = re.compile(r"(?P<mark><!-- not run: .*?-->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)


@pytest.fixture
def settings(
    database_dsn: str, redis_server: AnyRedis, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Settings]:
    """A node and the topic `orders`, with their addresses in the environment as a user would have them."""
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with Database(database_dsn) as database:
        register_node(database, name="n1", url=redis_server.url)
        create_topic(database, "orders", prefix=key_prefix, partitions=2, application=database)
    monkeypatch.setenv("MQLAYER_DSN", database_dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", key_prefix)
    monkeypatch.setenv("MQLAYER_BROKER_URL", redis_server.url)
    # Pages set variables for what they start themselves; the test's environment must not keep them.
    monkeypatch.setenv("MQLAYER_CONSUMERS", "")
    yield settings
    stores.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_of_a_page_runs(page: Path, settings: Settings) -> None:
    """What the documents say is what the code does."""

    def wait(condition: Any, timeout_s: float = 20.0) -> Any:
        return wait_until(condition, timeout_s=timeout_s, what=f"an example of {page.name}")

    names: dict[str, Any] = {"__name__": f"docs.{page.stem}", "wait_until": wait, "settings": settings}
    ran = 0
    for number, (language, text) in enumerate(examples(page)):
        if language == "python":
            # Annotations must resolve in the names of the page, as in a module.
            sys.modules.setdefault(names["__name__"], sys.modules[__name__])
            exec(compile(text, f"{page.name}[{number}]", "exec", dont_inherit=True), names)
            ran += 1
        elif language == "bash":
            ran += run_commands(text)
    assert ran, f"{page.name} has no example"
    # What goes on running would disturb other tests, and readers.
    left = [app for app in names.values() if isinstance(app, mqlayer.App) and app.members]
    for app in left:
        app.stop(1.0)
    assert not left, f"{page.name} leaves an application running"


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


def test_every_setting_is_in_the_table_of_operating_with_its_default() -> None:
    table = (ROOT / "docs" / "operating.md").read_text("utf-8")
    shown = dict(re.findall(r"^\| `MQLAYER_(\w+)` \| (.*?) ?\|", table, re.MULTILINE))
    for name, field in Settings.model_fields.items():
        assert name.upper() in shown
        if isinstance(field.default, bool):
            assert shown[name.upper()] == ("on" if field.default else "off")
        elif isinstance(field.default, int | float):
            assert float(shown[name.upper()]) == field.default, name


def examples(page: Path) -> list[tuple[str, str]]:
    """Return language and text of a page's blocks, but for those that are marked as not run, with a reason."""
    return [
        (match["language"], match["text"]) for match in BLOCK.finditer(page.read_text("utf-8")) if not match["mark"]
    ]


def run_commands(block: str) -> int:
    """Run the `mqlayer` lines of a shell block; return how many there were."""
    lines = [line.split("#")[0].strip() for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("mqlayer ")]
    for command in commands:
        with tempfile.TemporaryFile() as said:
            returncode = run_python(*command, cwd=ROOT, env=os.environ, stdout=said, stderr=said, timeout=60)
            said.seek(0)
            assert returncode == 0, f"{shlex.join(command)}: {said.read().decode()}"
    return len(commands)
