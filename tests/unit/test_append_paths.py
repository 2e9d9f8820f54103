"""Every way into a stream is listed with what its topic's durability class means there."""

from __future__ import annotations

import ast
from pathlib import Path

import mqlayer

ROOT = Path(mqlayer.__file__).parent
BUILDERS = {"append_packet", "append_once_packet", "append_command"}
HOW = {
    "producing/node_sender.py": "waits behind each append",
    "relay/sender.py": "waits before progress is recorded",
    "relay/restore.py": "resends after a loss: rows stay for another slot",
    "topics/partition_refill.py": "resends after a loss: rows stay for another slot",
}
"""As docs/design/durability.md says."""


def callers(path: Path) -> set[str]:
    """Return the builders that a module calls."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    return {call.id for call in calls if isinstance(call, ast.Name)} & BUILDERS


def test_every_module_that_appends_has_a_durability_rule() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if callers(path)}
    assert found == set(HOW)


def test_appends_are_made_by_these_builders_only() -> None:
    named = {
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if '"log_append' in path.read_text("utf-8")
    }
    assert named == {
        "redis/roles.py", "redis/partition_scripts.py", "redis/wire.py", "producing/node_sender.py", "relay/sender.py",
    }  # fmt: skip
