"""What a user installs or starts: names, files, containers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import yaml

import mqlayer

ROOT = Path(__file__).parents[2]
REDIS_SERVICES = ("node-1", "node-2", "broker")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The parsed docker-compose.yml, its anchors resolved."""
    parsed: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return parsed


@pytest.mark.parametrize("name", ["lua", "spark", "sql", "workers"])
def test_folders_at_the_top_are_reached_through_the_package(name: str) -> None:
    link = ROOT / "mqlayer" / name
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", ["spark", "workers"])
def test_bare_names_are_refused(name: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 1
    assert f"import this package as mqlayer.{name}" in answer.stderr


def test_the_version_is_told_once() -> None:
    assert version("mqlayer") == mqlayer.__version__


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="mqlayer")
    assert command.value == "mqlayer.cli.main:app"


def test_scripts_are_the_commands_and_their_setup() -> None:
    executable = {path.name: os.access(path, os.X_OK) for path in (ROOT / "scripts").iterdir()}
    commands = dict.fromkeys(
        ["bench", "check", "demo", "docs", "lock", "lowest", "matrix", "newcomer", "sbom", "schema", "test"], True
    )
    assert executable == {**commands, "setup.sh": False}


def test_compose_names_the_whole_stack(compose: dict[str, Any]) -> None:
    services = {"users", "postgres", *REDIS_SERVICES, "setup", "relay", "worker", "beat", "consume"}
    services |= {"spark-master", "spark-worker-1", "spark-worker-2", "analytics"}
    assert set(compose["services"]) == services


@pytest.mark.parametrize("name", REDIS_SERVICES)
def test_compose_runs_redis_with_the_settings_that_the_promise_needs(compose: dict[str, Any], name: str) -> None:
    words = compose["services"][name]["command"][1:]
    settings = dict(zip(words[::2], words[1::2], strict=True))
    assert settings == {
        "--appendonly": "yes",
        "--appendfsync": "always",
        "--no-appendfsync-on-rewrite": "no",
        "--maxmemory-policy": "noeviction",
        "--save": "",
        "--aclfile": "/data/users.acl",
    }


def test_every_service_that_stays_has_a_healthcheck(compose: dict[str, Any]) -> None:
    without = {name for name, service in compose["services"].items() if "healthcheck" not in service}
    assert without == {"setup", "users", "analytics"}


def test_compose_opens_ports_on_this_machine_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_mounts_only_volumes_that_it_declares_and_the_consumers_folder(compose: dict[str, Any]) -> None:
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", [])]
    folder = "${CONSUMERS_FOLDER:-./examples/first}:/app:ro"
    assert {mount.split(":")[0] for mount in mounts if mount != folder} == set(compose["volumes"])
    assert compose["services"]["consume"]["volumes"] == [folder]


def test_compose_starts_consumers_that_are_there(compose: dict[str, Any]) -> None:
    """The README's first program, whose topic the service setup makes."""
    service = compose["services"]["consume"]
    assert service["command"] == ["consume", "${CONSUMERS:-orders:app}"]
    assert (ROOT / "examples" / "first" / "orders.py").exists()
    assert compose["services"]["setup"]["environment"]["TOPICS"] == "${TOPICS:-orders}"
