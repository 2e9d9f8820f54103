"""The commands of the manifests for Kubernetes, each with its pod's settings, asked by its own probes."""

from __future__ import annotations

import http.client
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.fixtures.console_logins import write_passwords
from tests.fixtures.forked_programs import start_python
from tests.fixtures.health_probes import free_ports
from tests.fixtures.wait import wait_until
from tests.proof.world import World

MANIFESTS: Final = Path(__file__).parents[2] / "examples" / "kubernetes"
PROBED: Final = {"relay": "relay.yaml", "exporter": "exporter.yaml", "console": "console.yaml"}


def container_of(file: str) -> dict[str, Any]:
    first = next(yaml.safe_load_all((MANIFESTS / file).read_text("utf-8")))
    (container,) = first["spec"]["template"]["spec"]["containers"]
    return dict(container)


def is_answered(port: int, path: str, host: str) -> bool:
    """Whether a probe succeeds: the kubelet names the pod's address as the host."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    try:
        connection.request("GET", path, headers={"Host": host})
        return 200 <= connection.getresponse().status < 400
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.full
@pytest.mark.world(partitions=1)
@pytest.mark.parametrize("name", PROBED)
def test_a_pod_s_probes_are_answered(world: World, tmp_path: Path, name: str) -> None:
    container = container_of(PROBED[name])
    passwords = write_passwords(tmp_path / "passwords")
    passwords.chmod(0o440)
    port, declared = free_ports(), container["ports"][0]["containerPort"]
    env = {one["name"]: one["value"] for one in container["env"] if one["name"] != "MQLAYER_REDIS_PASSWORD_FILE"}
    words = [str(passwords) if word == "/run/users/passwords" else word for word in container["args"]]
    if name == "console":
        words += ["--port", str(port)]
    else:
        assert env["MQLAYER_HEALTH_PORT"] == str(declared)
        env["MQLAYER_HEALTH_PORT"] = str(port)
    process = start_python("mqlayer", *words, env=world.environment(**env))
    try:
        for probe in (value for key, value in container.items() if key.endswith("Probe")):
            asked = partial(is_answered, port, probe["httpGet"]["path"], f"10.1.2.3:{declared}")
            wait_until(asked, timeout_s=30, what=f"{name} answers {probe}")
    finally:
        process.kill()
        process.wait()
