"""A Docker engine that runs for one row, with images made of Debian's packages (`stand_ins.py`).

It has a socket, a place and a bridge of its own, so another one goes on as it is.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from mqlayer.stack.containers import engine_answers
from mqlayer.testing import wait_until
from tests.matrix.plan import COMPOSE, DOCKER
from tests.matrix.programs import ProgramMissing, UnpackedSeries
from tests.matrix.stand_ins import STAND_INS, has_image

IMAGES_PLACE: Final = "docker-data"
BRIDGE: Final = "mqlayer-matrix"
BRIDGE_ADDRESS: Final = "10.213.77.1/24"
NETWORKS: Final = "base=10.213.80.0/20,size=24"
"""Of what Compose makes."""
KEPT: Final[Mapping[str, tuple[str, ...]]] = {"container": ("--all",), "network": ("--filter", "type=custom")}
READY_WITHIN_S: Final = 60.0


@contextmanager
def engine_with_images(cache: Path, scratch: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Lend an engine with these stand-ins: its address for DOCKER_HOST, and its programs for PATH.

    Raises ProgramMissing.
    """
    if os.geteuid() != 0:
        raise ProgramMissing("a Docker engine needs root")
    places = []
    for series in (DOCKER, COMPOSE):
        programs = UnpackedSeries(series, cache)
        programs.ensure()
        places.append(str(programs.path))
    socket = scratch / "docker.sock"
    host = f"unix://{socket}"
    environment = {**os.environ, "PATH": os.pathsep.join([*places, os.environ["PATH"]]), "DOCKER_HOST": host}
    own = [
        "--data-root",
        cache / IMAGES_PLACE,
        "--exec-root",
        scratch / "exec",
        "--pidfile",
        scratch / "docker.pid",
    ]
    # Ports are published by docker-proxy: this machine's firewall keeps its rules.
    command = [
        "dockerd",
        "--host",
        host,
        *map(str, own),
        "--bridge",
        BRIDGE,
        "--default-address-pool",
        NETWORKS,
        "--iptables=false",
        "--ip6tables=false",
    ]
    _make_bridge()
    with (scratch / "docker.log").open("w") as log:
        engine = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _await_engine(engine, socket, scratch / "docker.log")
        for image in (STAND_INS[name] for name in names):
            if not has_image(image, environment):
                image.make(cache, environment)
        yield host, os.pathsep.join(places)
    finally:
        _remove_containers(environment)
        engine.terminate()
        engine.wait()
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)


def _remove_containers(environment: Mapping[str, str]) -> None:
    """A test that was broken off leaves some: the next engine would start them."""
    for kind in ("container", "network", "volume"):
        asked = ["docker", kind, "ls", "--quiet", *KEPT.get(kind, ())]
        found = subprocess.run(asked, env=dict(environment), capture_output=True, text=True, check=False).stdout.split()
        if found:
            removed = ["docker", kind, "rm", "--force", *found]
            subprocess.run(removed, env=dict(environment), capture_output=True, check=False)


def _make_bridge() -> None:
    subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)
    for words in (["link", "add", BRIDGE, "type", "bridge"], ["address", "add", BRIDGE_ADDRESS, "dev", BRIDGE]):
        subprocess.run(["ip", *words], capture_output=True, check=True)
    subprocess.run(["ip", "link", "set", BRIDGE, "up"], capture_output=True, check=True)


def _await_engine(engine: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    wait_until(lambda: engine_answers(str(socket)) or engine.poll() is not None, timeout_s=READY_WITHIN_S)
    if engine.poll() is not None:
        raise ProgramMissing(f"the engine ended: {' '.join(log.read_text().split())[-300:]}")
