"""The files that the pages on systemd and Kubernetes print: what they name is there, and it fits together."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from typer.main import get_command

from mqlayer.cli.consume import SLACK_S
from mqlayer.cli.main import app
from mqlayer.consuming import MemberOptions
from tests.fixtures.missing_tools import leave_out

HOW_TO: Final = Path(__file__).parents[2] / "docs" / "how-to"
SETTINGS: Final = HOW_TO.parent / "reference" / "settings.md"
UNIT: Final = re.compile(r'^```ini title="/etc/systemd/system/([\w@.-]+)"\n(.*?)^```', re.DOTALL | re.MULTILINE)
MANIFEST: Final = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
VARIABLE: Final = re.compile(r"\b(MQLAYER_\w+)")
PROGRAMS: Final = "/opt/shop/.venv/bin/"


def units() -> dict[str, str]:
    return dict(UNIT.findall((HOW_TO / "run-under-systemd.md").read_text("utf-8")))


def service(text: str) -> configparser.SectionProxy:
    """Return the section of a unit; names are found in any letters."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",))
    parser.read_string(text)
    return parser["Service"]


def manifests() -> list[dict[str, Any]]:
    text = (HOW_TO / "run-on-kubernetes.md").read_text("utf-8")
    return [one for block in MANIFEST.findall(text) for one in yaml.safe_load_all(block)]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for one in manifests():
        if one["kind"] in ("Deployment", "Job"):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def containers() -> Iterator[dict[str, Any]]:
    for _, pod in pods():
        yield from pod["containers"]


def commands() -> list[list[str]]:
    started = [service(text)["ExecStart"].removeprefix(PROGRAMS).split() for text in units().values()]
    return started + [one.get("command", ["mqlayer", *one.get("args", [])]) for one in containers()]


def unknown_of(words: list[str]) -> list[str]:
    """Return the words of an `mqlayer` command that the program does not know."""
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return words
        command, words = command.commands[words[0]], words[1:]
    options = {option for param in command.params for option in param.opts}
    return [word for word in words if word.startswith("--") and word not in options]


def test_every_command_that_the_files_start_is_there() -> None:
    started = commands()
    assert len(started) == 9
    assert {words[0] for words in started} == {"mqlayer", "celery"}
    assert [unknown_of(words[1:]) for words in started if words[0] == "mqlayer"] == [[]] * 5
    assert {words[3] for words in started if words[0] == "celery"} == {"worker", "beat"}


@pytest.mark.parametrize("page", ["run-under-systemd", "run-on-kubernetes"])
def test_every_variable_that_the_pages_set_is_a_setting(page: str) -> None:
    named = set(VARIABLE.findall((HOW_TO / f"{page}.md").read_text("utf-8")))
    assert len(named) > 4
    assert named - set(VARIABLE.findall(SETTINGS.read_text("utf-8"))) == set()


def test_consumers_get_the_time_that_their_drain_takes() -> None:
    """`mqlayer consume` waits for its children as long as the drain limit and `SLACK_S`."""
    limit_s = MemberOptions().drain_timeout_s + SLACK_S
    assert float(service(units()["mqlayer-consume@.service"])["TimeoutStopSec"]) > limit_s
    assert dict(pods())["shop-consume"]["terminationGracePeriodSeconds"] > limit_s


def test_probes_ask_the_port_and_the_paths_of_the_health_endpoint() -> None:
    asked = 0
    for one in containers():
        ports = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
        variables = {variable["name"]: variable["value"] for variable in one.get("env", [])}
        for probe in (value for name, value in one.items() if name.endswith("Probe")):
            assert probe["httpGet"]["path"] in ("/live", "/ready")
            assert variables["MQLAYER_HEALTH_PORT"] == str(ports[probe["httpGet"]["port"]])
            assert variables["MQLAYER_HEALTH_HOST"] == "0.0.0.0"
            asked += 1
    assert asked == 5


def test_every_mounted_secret_and_selected_label_is_declared() -> None:
    declared = {one["metadata"]["name"] for one in manifests() if one["kind"] == "Secret"}
    volumes = [volume for _, pod in pods() for volume in pod.get("volumes", [])]
    assert {volume["secret"]["secretName"] for volume in volumes} <= declared
    for one in manifests():
        if one["kind"] == "Deployment":
            assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        leave_out("no systemd-analyze: the units of the page on systemd are not verified")
    for name, text in units().items():
        (tmp_path / name).write_text(text.replace(PROGRAMS, f"{Path(sys.executable).parent}/"))
    # A template is verified as one of its instances.
    (tmp_path / "mqlayer-consume@.service").rename(tmp_path / "mqlayer-consume@shop.service")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *sorted(map(str, tmp_path.iterdir()))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
