"""`mqlayer init`: each project that it writes runs, and its own tests pass, on real servers too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mqlayer.cli.project import ProjectKind
from tests.fixtures.commands import Commands
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.variants import some_of
from tests.proof.world import World

ROOT = Path(__file__).parents[2]


@pytest.fixture
def init(logging_as_before: None) -> Commands:
    return Commands()


def outcome_of(project: Path, environment: Mapping[str, str]) -> str:
    """Run a project's tests, without what pytest here has besides; return what it says at the end."""
    environment = {**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = ("pytest", "-q", "--assert=plain", "-p", "no:cacheprovider")
    done = ask_python(*words, cwd=project, env=environment, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", some_of(list(ProjectKind), 2))
def test_a_projects_own_tests_pass(kind: ProjectKind, world: World, init: Commands, tmp_path: Path) -> None:
    init.text("init", kind, str(tmp_path / "shop"))
    assert outcome_of(tmp_path / "shop", world.environment()).startswith("2 passed")


def test_a_projects_first_test_needs_no_server(init: Commands, tmp_path: Path) -> None:
    init.text("init", "django", str(tmp_path))
    without = {name: value for name, value in os.environ.items() if not name.startswith("MQLAYER_")}
    assert outcome_of(tmp_path, without).startswith("1 passed, 1 skipped")


@pytest.mark.parametrize("kind", list(ProjectKind))
def test_a_project_is_whole_and_written_as_our_own_code_is(kind: ProjectKind, init: Commands, tmp_path: Path) -> None:
    answer = init.text("init", kind, str(tmp_path))
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"README.md", "compose.yaml", ".env.example", ".gitignore", "requirements.txt"} < files
    assert {line.removeprefix(f"{tmp_path}/") for line in answer.split()} > files
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["check", "--select", "E,F,I,UP,B"], ["format", "--check"]):
        command = [*ruff, *words, "--isolated", "--no-cache", "--line-length", "120", "."]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout
    readme = (tmp_path / "README.md").read_text("utf-8")
    named = re.findall(r"^\| (.*?) \|", readme, re.MULTILINE)[2:]
    for name in re.findall(r"`([^`]+)`", " ".join(named)):
        assert (tmp_path / name).exists(), name


def test_nothing_is_overwritten(init: Commands, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("mine")
    answer = init.failure("init", "plain", str(tmp_path))
    assert "has shop.py already: nothing is written; name another directory" in answer
    assert [path.name for path in tmp_path.iterdir()] == ["shop.py"]
    assert (tmp_path / "shop.py").read_text() == "mine"


def test_the_compose_file_has_the_settings_that_the_promise_needs(init: Commands, tmp_path: Path) -> None:
    init.text("init", "plain", str(tmp_path))
    compose: Any = yaml.safe_load((tmp_path / "compose.yaml").read_text())
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for name in ("node-1", "node-2", "broker"):
        words = compose["services"][name]["command"][1:]
        assert dict(zip(words[::2], words[1::2], strict=True)) == {
            "--appendonly": "yes",
            "--appendfsync": "always",
            "--no-appendfsync-on-rewrite": "no",
            "--maxmemory-policy": "noeviction",
            "--save": "",
        }
    addresses = (tmp_path / ".env.example").read_text()
    assert all(port.rpartition(":")[0] in addresses for port in ports)
