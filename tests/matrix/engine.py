"""A Docker engine that runs for one row, with images made of Debian's packages: no registry is asked.

The images have the names of the public ones, and entry scripts that do what those do with the variables and arguments
that the library gives them. The engine has a socket, a place and a bridge of its own, so another one goes on as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqlayer.stack.containers import POSTGRES_IMAGE, REDIS_IMAGE, engine_answers
from mqlayer.testing import wait_until
from tests.matrix.plan import DOCKER
from tests.matrix.programs import DebianSuite, ProgramMissing, UnpackedSeries

SCRIPTS: Final = Path(__file__).parent / "images"
IMAGES_PLACE: Final = "docker-data"
BRIDGE: Final = "mqlayer-matrix"
BRIDGE_ADDRESS: Final = "10.213.77.1/24"
ACCOUNT: Final = 999
READY_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ServerImage:
    """An image of one server: its package, and the account that it runs as."""

    tag: str
    suite: str
    package: str
    account: str
    path: str = ""


IMAGES: Final = (
    ServerImage(REDIS_IMAGE, "trixie", "redis-server", "redis"),
    ServerImage(POSTGRES_IMAGE, "sid", "postgresql-18", "postgres", "/usr/lib/postgresql/18/bin:"),
)


@contextmanager
def engine_with_images(cache: Path, scratch: Path) -> Iterator[str]:
    """Lend an engine's address, as DOCKER_HOST has it. Raises ProgramMissing."""
    if os.geteuid() != 0:
        raise ProgramMissing("a Docker engine needs root")
    programs = UnpackedSeries(DOCKER, cache)
    programs.ensure()
    socket = scratch / "docker.sock"
    host = f"unix://{socket}"
    environment = {**os.environ, "PATH": f"{programs.path}{os.pathsep}{os.environ['PATH']}", "DOCKER_HOST": host}
    places = [
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
        *map(str, places),
        "--bridge",
        BRIDGE,
        "--iptables=false",
        "--ip6tables=false",
    ]
    _make_bridge()
    with (scratch / "docker.log").open("w") as log:
        engine = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _await_engine(engine, socket, scratch / "docker.log")
        for image in IMAGES:
            if not _has_image(image, environment):
                _make(image, cache, environment)
        yield host
    finally:
        engine.terminate()
        engine.wait()
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)


def _make_bridge() -> None:
    subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)
    for words in (["link", "add", BRIDGE, "type", "bridge"], ["address", "add", BRIDGE_ADDRESS, "dev", BRIDGE]):
        subprocess.run(["ip", *words], capture_output=True, check=True)
    subprocess.run(["ip", "link", "set", BRIDGE, "up"], capture_output=True, check=True)


def _await_engine(engine: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    wait_until(lambda: engine_answers(str(socket)) or engine.poll() is not None, timeout_s=READY_WITHIN_S)
    if engine.poll() is not None:
        raise ProgramMissing(f"the engine ended: {' '.join(log.read_text().split())[-300:]}")


def _has_image(image: ServerImage, environment: Mapping[str, str]) -> bool:
    asked = ["docker", "image", "inspect", image.tag]
    return subprocess.run(asked, env=dict(environment), capture_output=True, check=False).returncode == 0


def _make(image: ServerImage, cache: Path, environment: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory(dir=cache, prefix="image-") as draft:
        root = Path(draft) / "root"
        DebianSuite(image.suite, cache).unpack([image.package, "dash", "coreutils", "util-linux", "libc-bin"], root)
        for name in ("etc", "tmp", "proc", "sys", "dev", "data", "run", "usr/local/bin"):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "tmp").chmod(0o1777)
        (root / "etc/passwd").write_text(f"root:x:0:0::/:/bin/sh\n{image.account}:x:{ACCOUNT}:{ACCOUNT}::/:/bin/sh\n")
        (root / "etc/group").write_text(f"root:x:0:\n{image.account}:x:{ACCOUNT}:\n")
        shutil.copy(SCRIPTS / f"{image.account}-entrypoint.sh", root / "usr/local/bin/docker-entrypoint.sh")
        (root / "usr/local/bin/docker-entrypoint.sh").chmod(0o755)
        facts = [
            'ENTRYPOINT ["docker-entrypoint.sh"]',
            f"ENV PATH=/usr/local/bin:{image.path}/usr/bin:/usr/sbin LC_ALL=C.UTF-8",
        ]
        changes = [part for fact in facts for part in ("--change", fact)]
        files = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
        made = ["docker", "import", *changes, "-", image.tag]
        subprocess.run(made, env=dict(environment), stdin=files.stdout, stdout=subprocess.DEVNULL, check=True)
        if files.wait():
            raise ProgramMissing(f"the files of {image.tag} can't be read")
