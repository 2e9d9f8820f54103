"""Images that stand in for public ones: made of Debian's packages under the public names, and no registry is asked.

Those of servers hold one program with what it needs, and an entry script that does what the public one does with the
variables and arguments that mqlayer gives it. The one of Python is a whole Debian, for a Dockerfile to go on from.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from mqlayer.stack.containers import POSTGRES_IMAGE, REDIS_IMAGE
from tests.matrix.programs import KEYRING, DebianSuite, ProgramMissing, mirror

SCRIPTS: Final = Path(__file__).parent / "images"
ACCOUNT: Final = 999
TOOLS: Final = ("dash", "coreutils", "grep", "util-linux", "libc-bin")
AUTHORITIES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
BASE: Final = "mqlayer-matrix/trixie"
STALE_INDEX: Final = 'Acquire::Check-Valid-Until "false";\nAcquire::Check-Date "false";\n'
"""A mirror may be a snapshot of a day."""


@dataclass(frozen=True, slots=True)
class ServerImage:
    """An image of one server: its package, and the account that it runs as."""

    tag: str
    suite: str
    package: str
    account: str
    path: str = ""
    command: str = ""

    @property
    def recipe(self) -> str:
        """What it is made of, as a label."""
        return _recipe(f"{self.account}-entrypoint.sh", repr(self), repr(TOOLS))

    def make(self, cache: Path, environment: Mapping[str, str]) -> None:
        """Make it. Raises ProgramMissing."""
        with tempfile.TemporaryDirectory(dir=cache, prefix="image-") as draft:
            root = Path(draft) / "root"
            DebianSuite(self.suite, cache).unpack([self.package, *TOOLS], root)
            for name in ("etc", "tmp", "proc", "sys", "dev", "data", "run", "usr/local/bin"):
                (root / name).mkdir(parents=True, exist_ok=True)
            (root / "tmp").chmod(0o1777)
            users = f"root:x:0:0::/:/bin/sh\n{self.account}:x:{ACCOUNT}:{ACCOUNT}::/:/bin/sh\n"
            (root / "etc/passwd").write_text(users)
            (root / "etc/group").write_text(f"root:x:0:\n{self.account}:x:{ACCOUNT}:\n")
            shutil.copy(SCRIPTS / f"{self.account}-entrypoint.sh", root / "usr/local/bin/docker-entrypoint.sh")
            (root / "usr/local/bin/docker-entrypoint.sh").chmod(0o755)
            facts = [
                'ENTRYPOINT ["docker-entrypoint.sh"]',
                f"ENV PATH=/usr/local/bin:{self.path}/usr/bin:/usr/sbin LC_ALL=C.UTF-8",
                f'CMD ["{self.command}"]',
                f"LABEL made-by={self.recipe}",
            ]
            import_image(self.tag, root, environment, facts)


@dataclass(frozen=True, slots=True)
class PythonImage:
    """A Debian with Python and apt, by debootstrap and a Dockerfile of its own."""

    tag: str

    @property
    def recipe(self) -> str:
        """What it is made of, as a label."""
        return _recipe("python.Dockerfile", repr(self))

    def make(self, cache: Path, environment: Mapping[str, str]) -> None:
        """Make it. Raises ProgramMissing."""
        with tempfile.TemporaryDirectory(dir=cache, prefix="image-") as draft:
            tool, root, context = (Path(draft) / name for name in ("tool", "root", "context"))
            DebianSuite("bookworm", cache).unpack(["debootstrap"], tool)
            command = [str(tool / "usr/sbin/debootstrap"), "--variant=minbase", f"--keyring={KEYRING}"]
            place = {"DEBOOTSTRAP_DIR": str(tool / "usr/share/debootstrap"), "LC_ALL": "C"}
            log = Path(draft) / "log"
            with log.open("w") as output:
                made = subprocess.run(
                    [*command, "trixie", str(root), mirror()],
                    env={**os.environ, **place},
                    stdout=output,
                    stderr=output,
                    check=False,
                )
            if made.returncode:
                raise ProgramMissing(f"debootstrap: {' '.join(log.read_text().split())[-300:]}")
            (root / "etc/apt/apt.conf.d/90stale").write_text(STALE_INDEX)
            import_image(BASE, root, environment)
            context.mkdir()
            shutil.copy(AUTHORITIES, context / "authorities.crt")
            built = [
                "docker",
                "build",
                "--quiet",
                "--network",
                "host",
                "--tag",
                self.tag,
                "--label",
                f"made-by={self.recipe}",
            ]
            built += ["--file", str(SCRIPTS / "python.Dockerfile"), str(context)]
            answer = subprocess.run(built, env=dict(environment), capture_output=True, text=True, check=False)
            if answer.returncode:
                raise ProgramMissing(f"{self.tag}: {' '.join(answer.stderr.split())[-600:]}")


def import_image(tag: str, root: Path, environment: Mapping[str, str], facts: Sequence[str] = ()) -> None:
    """Make an image of the files below a folder."""
    changes = [part for fact in facts for part in ("--change", fact)]
    files = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
    made = ["docker", "import", *changes, "-", tag]
    subprocess.run(made, env=dict(environment), stdin=files.stdout, stdout=subprocess.DEVNULL, check=True)
    if files.wait():
        raise ProgramMissing(f"the files of {tag} can't be read")


def has_image(image: StandIn, environment: Mapping[str, str]) -> bool:
    """Return whether the engine has it, made in this way."""
    asked = ["docker", "image", "inspect", "--format", '{{index .Config.Labels "made-by"}}', image.tag]
    answer = subprocess.run(asked, env=dict(environment), capture_output=True, text=True, check=False)
    return answer.returncode == 0 and answer.stdout.strip() == image.recipe


def _recipe(script: str, *facts: str) -> str:
    return sha256("\n".join([(SCRIPTS / script).read_text(), *facts]).encode()).hexdigest()[:16]


StandIn = ServerImage | PythonImage
STAND_INS: Final[Mapping[str, StandIn]] = {
    "redis": ServerImage(REDIS_IMAGE, "trixie", "redis-server", "redis", command="redis-server"),
    "valkey": ServerImage("valkey/valkey:8.1", "trixie", "valkey-server", "valkey", command="valkey-server"),
    "postgres": ServerImage(
        POSTGRES_IMAGE, "sid", "postgresql-18", "postgres", "/usr/lib/postgresql/18/bin:", "postgres"
    ),
    "python": PythonImage("python:3.13-slim"),
}
