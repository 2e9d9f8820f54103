"""The packages that peers need, kept outside the tree: an environment or folder per peer, Debian's unpacked.

Nothing is installed on the machine or in the project's environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.peers.peer import PeerMissing

INSTALL_WITHIN_S: Final = 600


def cache_place() -> Path:
    """Return the folder of all packages."""
    if given := os.environ.get("MQLAYER_PEERS_CACHE"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/cache/mqlayer-peers")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqlayer-peers"


class PythonPackages:
    """An environment with these packages, made at the first use; `remove` lets the next use take newer ones."""

    def __init__(self, name: str, packages: tuple[str, ...], cache: Path) -> None:
        self._packages, self._place = packages, cache / name
        self._stamp = self._place / "packages"

    @property
    def programs(self) -> Path:
        """The folder of its programs."""
        return self._place / "venv" / "bin"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.programs / "python"

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self._place, ignore_errors=True)

    def ensure(self) -> None:
        """Install the missing packages. Raises PeerMissing."""
        wanted = "\n".join(self._packages)
        if self._stamp.exists() and self._stamp.read_text() == wanted:
            return
        self.remove()
        self._place.mkdir(parents=True)
        self._place.chmod(0o755)
        ran([sys.executable, "-m", "venv", self._place / "venv"])
        ran([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self._packages])
        self._stamp.write_text(wanted)

    def answer(self, program: str) -> str:
        """Return the output of a short program."""
        return ran([self.python, "-c", program]).strip()


class NodePackages:
    """Packages of npm, none of whose scripts runs."""

    def __init__(self, name: str, packages: tuple[str, ...], cache: Path) -> None:
        self._packages, self.place = packages, cache / name
        self._stamp = self.place / "packages"

    def ensure(self) -> None:
        """Install the missing packages. Raises PeerMissing."""
        wanted = "\n".join(self._packages)
        if self._stamp.exists() and self._stamp.read_text() == wanted:
            return
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        options: list[str | Path] = ["--prefix", self.place, "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        ran(["npm", "install", *options, *self._packages])
        self._stamp.write_text(wanted)

    def version(self, package: str) -> str:
        """Return a package's version."""
        text = (self.place / "node_modules" / package / "package.json").read_text("utf-8")
        return str(json.loads(text)["version"])


def unpacked_debian(names: tuple[str, ...], root: Path) -> None:
    """Unpack packages of this machine's own release, none of whose scripts runs. Raises PeerMissing."""
    if (root / "unpacked").exists():
        return
    if shutil.which("apt-get") is None:
        raise PeerMissing("needs apt-get, or the program in PATH")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    root.chmod(0o755)
    ran(["apt-get", "download", "-qq", *names], place=root)
    for package in sorted(root.glob("*.deb")):
        ran(["dpkg-deb", "-x", package, root])
        package.unlink()
    (root / "unpacked").touch()


def ran(command: list[str | Path], *, place: Path | None = None) -> str:
    """Run a command; return its output. Raises PeerMissing with its last words."""
    try:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"{Path(command[0]).name}: {type(error).__name__}") from error
    if done.returncode:
        last = " ".join((done.stderr or done.stdout).split())[-200:]
        raise PeerMissing(f"{Path(command[0]).name} failed: {last}")
    return done.stdout
