"""The units that the page on systemd prints, and the manifests for Kubernetes: what they name is there, and it fits
together.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
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
MANIFESTS: Final = HOW_TO.parents[1] / "examples" / "kubernetes"
API: Final = "1.37"
"""The release of Kubernetes whose schemas the manifests are held against."""
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
    files = (path for path in sorted(MANIFESTS.rglob("*.yaml")) if path.name != "kustomization.yaml")
    return [one for path in files for one in yaml.safe_load_all(path.read_text("utf-8"))]


def built(folder: Path) -> list[dict[str, Any]]:
    """Return what a kustomization makes."""
    if shutil.which("kubectl") is None:
        leave_out("no kubectl: apt-get install kubernetes-client")
    done = subprocess.run(["kubectl", "kustomize", folder], stdout=subprocess.PIPE, check=True)
    return list(yaml.safe_load_all(done.stdout))


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
    assert len(started) == 12
    assert {words[0] for words in started} == {"mqlayer", "celery", "sleep"}
    assert [unknown_of(words[1:]) for words in started if words[0] == "mqlayer"] == [[]] * 7
    assert {words[3] for words in started if words[0] == "celery"} == {"worker", "beat"}


@pytest.mark.parametrize("place", [HOW_TO / "run-under-systemd.md", MANIFESTS], ids=["systemd", "kubernetes"])
def test_every_variable_that_they_set_is_a_setting(place: Path) -> None:
    files = place.rglob("*.yaml") if place.is_dir() else [place]
    named = {name for path in files for name in VARIABLE.findall(path.read_text("utf-8"))}
    assert len(named) > 4
    assert named - set(VARIABLE.findall(SETTINGS.read_text("utf-8"))) == set()


def test_consumers_get_the_time_that_their_drain_takes() -> None:
    """`mqlayer consume` waits for its children as long as the drain limit and `SLACK_S`."""
    limit_s = MemberOptions().drain_timeout_s + SLACK_S
    assert float(service(units()["mqlayer-consume@.service"])["TimeoutStopSec"]) > limit_s
    assert dict(pods())["shop-consume"]["terminationGracePeriodSeconds"] > limit_s


def test_every_probe_and_service_names_a_port_that_the_program_answers_on() -> None:
    """The console's port is its default; others are those of the health endpoint, open to the kubelet."""
    asked = 0
    for one in containers():
        ports = {port["name"]: port["containerPort"] for port in one.get("ports", [])}
        variables = {variable["name"]: variable["value"] for variable in one.get("env", [])}
        for probe in (value for name, value in one.items() if name.endswith("Probe")):
            port = ports[probe["httpGet"]["port"]]
            if one["name"] == "console":
                assert (probe["httpGet"]["path"], port) == ("/login", default_of("console", "--port"))
            else:
                assert probe["httpGet"]["path"] in ("/live", "/ready")
                assert variables["MQLAYER_HEALTH_PORT"] == str(port)
                assert variables["MQLAYER_HEALTH_HOST"] == "0.0.0.0"
            asked += 1
    assert asked == 10


def default_of(command: str, option: str) -> Any:
    program: Any = get_command(app)
    return next(param.default for param in program.commands[command].params if option in param.opts)


def test_what_a_manifest_names_is_there() -> None:
    """Secrets by their pattern: a process's own pair, of which one is the Redis password."""
    text = (MANIFESTS / "secrets.yaml").read_text("utf-8")
    deployed = [one for one in manifests() if one["kind"] == "Deployment"]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in deployed]
    for _, pod in pods():
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
        names = [one["secretRef"]["name"] for one in container["envFrom"]]
        names += [volume["secret"]["secretName"] for volume in pod.get("volumes", []) if "secret" in volume]
        assert all(name.removesuffix("-redis") in text for name in names)
    for one in manifests():
        if one["kind"] in ("Deployment", "PodDisruptionBudget"):
            assert one["spec"]["selector"]["matchLabels"] in labels
        if one["kind"] == "Service":
            assert one["spec"]["selector"] in labels


def test_a_budget_lets_a_drain_go_on_and_leaves_the_others_running() -> None:
    replicas = {one["metadata"]["name"]: one["spec"]["replicas"] for one in manifests() if one["kind"] == "Deployment"}
    budgets = {one["metadata"]["name"]: one["spec"] for one in manifests() if one["kind"] == "PodDisruptionBudget"}
    assert set(budgets) == {name for name, count in replicas.items() if count > 1}
    for name, budget in budgets.items():
        assert budget.get("maxUnavailable", replicas[name] - budget.get("minAvailable", 0)) in range(1, replicas[name])


def test_every_pod_runs_with_no_more_than_it_needs() -> None:
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"], name
        for one in pod["containers"]:
            assert one["securityContext"]["readOnlyRootFilesystem"], name
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert "cpu" not in one["resources"]["limits"], name


@pytest.mark.parametrize("folder", [MANIFESTS, MANIFESTS / "migrate"], ids=["all", "migrate"])
def test_the_api_s_schemas_accept_what_a_kustomization_makes(folder: Path) -> None:
    """Also what names more than the schemas know, as a misspelt field does."""
    made = built(folder)
    assert len(made) == (12 if folder == MANIFESTS else 1)
    for one in [*made, *yaml.safe_load_all((MANIFESTS / "secrets.yaml").read_text("utf-8"))]:
        kubernetes_validate.validate(one, API, strict=True)
    images = {one["image"] for made_one in made for one in containers_of(made_one)}
    assert images == {"registry.example.com/shop:1.4"}
    if folder != MANIFESTS:
        assert made[0]["metadata"]["name"] == "shop-migrate-1-4"


def containers_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    pod = manifest["spec"].get("template", {}).get("spec", {})
    return list(pod.get("containers", []))


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
