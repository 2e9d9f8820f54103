"""Programs of other Debian releases, unpacked beside this machine's own and not installed.

Each series has a folder with the packages that its program needs, the C library among them. A program's ELF header
names the loader and the libraries of that folder, so the program runs by its path like any other, and so do its
children: a variable such as LD_LIBRARY_PATH would reach programs of this machine too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.matrix.plan import Series

PROGRAMS: Final = {
    "redis": ("usr/bin/redis-*",),
    "valkey": ("usr/bin/valkey-*",),
    "postgres": ("usr/lib/postgresql/*/bin/*",),
    "python": ("usr/bin/python3.*",),
    "nginx": ("usr/sbin/nginx",),
    "docker": (
        "usr/libexec/docker/cli-plugins/*",
        "usr/sbin/docker*",
        "usr/bin/docker*",
        "usr/bin/containerd*",
        "usr/bin/runc",
        "usr/sbin/runc",
    ),
}
"""Where the programs of each product are, by patterns; the first of a name counts."""
KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MERGED: Final = ("bin", "sbin", "lib", "lib64")
DOWNLOAD_WITHIN_S: Final = 900
# Python is linked to fixed addresses: with the smaller pages of this machine, patchelf makes a file that crashes.
PAGE_SIZE: Final = "65536"


class ProgramMissing(Exception):
    """A series can't be had on this machine; the text says why."""


def cache_place() -> Path:
    """Return the folder of all series: outside the tree, and open to the account of Postgres."""
    if given := os.environ.get("MQLAYER_MATRIX_CACHE"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/cache/mqlayer-matrix")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mqlayer-matrix"


class UnpackedSeries:
    """A series' folder."""

    def __init__(self, series: Series, cache: Path) -> None:
        self.series, self._cache = series, cache
        self._place = cache / str(series)
        self._root = self._place / "root"
        self._ready = self._place / "ready"

    @property
    def path(self) -> Path:
        """A folder with the series' programs only, for PATH."""
        if self.series.product == "postgres":
            return self._root / "usr/lib/postgresql" / self.series.number / "bin"
        return self._place / "bin"

    def remove(self) -> None:
        """Remove it: the next call of `ensure` takes the packages of that day."""
        shutil.rmtree(self._place, ignore_errors=True)

    def ensure(self) -> None:
        """Download and unpack what is missing. Raises ProgramMissing."""
        self._cache.mkdir(parents=True, exist_ok=True)
        with _locked(self._cache / f"{self.series}.lock"):
            if self._ready.exists():
                return
            self.remove()
            DebianSuite(self.series.suite, self._cache).unpack([self.series.package, "patchelf"], self._root)
            for folder in (self._cache, self._place):
                folder.chmod(0o755)
            self._bind_programs()
            self._ready.touch()

    def _bind_programs(self) -> None:
        """Let programs run with the loader and libraries beside them."""
        loader = next(self._root.glob("usr/lib/*/ld-linux-*"), None)
        if loader is None:
            raise ProgramMissing(f"no loader is among the packages of {self.series}")
        patchelf = [str(loader), "--library-path", str(loader.parent), str(self._root / "usr/bin/patchelf")]
        patchelf += ["--page-size", PAGE_SIZE]
        for program in self._programs():
            if not program.is_symlink() and program.read_bytes()[:4] == b"\x7fELF":
                bound = ["--set-interpreter", loader, "--force-rpath", "--set-rpath", loader.parent, program]
                subprocess.run([*patchelf, *map(str, bound)], check=True)
        if self.series.product != "postgres":
            self.path.mkdir()
            for program in self._programs():
                if not (self.path / program.name).exists():
                    (self.path / program.name).symlink_to(program)

    def _programs(self) -> list[Path]:
        return [found for pattern in PROGRAMS[self.series.product] for found in sorted(self._root.glob(pattern))]


class DebianSuite:
    """A release of Debian, asked by this machine's apt with lists of its own."""

    def __init__(self, name: str, cache: Path) -> None:
        self._name, self._place = name, cache / "suites" / name

    def unpack(self, names: list[str], root: Path) -> None:
        """Unpack packages and all that they depend on; none of their scripts runs. Raises ProgramMissing."""
        for name in MERGED:
            (root / "usr" / name).mkdir(parents=True)
            (root / name).symlink_to(f"usr/{name}")
        packages = self._download(names)
        for package in sorted(packages.glob("*.deb")):
            files = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
            tar = ["tar", "-x", "-C", str(root), "--keep-directory-symlink", "--no-same-owner"]
            subprocess.run(tar, stdin=files.stdout, check=True)
            if files.wait():
                raise ProgramMissing(f"{package.name} can't be unpacked")
        shutil.rmtree(packages)

    def _download(self, names: list[str]) -> Path:
        if shutil.which("apt-get") is None or not KEYRING.exists():
            raise ProgramMissing("needs a Debian machine with debian-archive-keyring")
        packages = self._place / f"packages-{os.getpid()}"
        shutil.rmtree(packages, ignore_errors=True)
        for folder in (self._place / "lists/partial", packages / "partial"):
            folder.mkdir(parents=True, exist_ok=True)
        # Nothing counts as installed: apt then downloads the C library too.
        (self._place / "status").touch()
        with _locked(self._place / "lock"):
            source = f"deb [signed-by={KEYRING}] {mirror()} {self._name} main\n"
            (self._place / "sources.list").write_text(source)
            self._apt(packages, "update")
            self._apt(packages, "install", "--no-install-recommends", "--download-only", "--yes", *names)
        return packages

    def _apt(self, packages: Path, *words: str) -> None:
        settings = {
            "Dir::Etc::sourcelist": self._place / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::lists": self._place / "lists",
            "Dir::State::status": self._place / "status",
            "Dir::Cache": self._place,
            "Dir::Cache::archives": packages,
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
        }
        options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        answer = _run(["apt-get", "-qq", *options, *words])
        if answer.returncode:
            raise ProgramMissing(f"{self._name}: {' '.join(answer.stderr.split())[-300:]}")


def mirror() -> str:
    """Return where this machine takes Debian's packages from."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"]
    if not _run(asked).stdout:
        _run(["apt-get", "-qq", "update"])
    if not (found := _run(asked).stdout.split()):
        raise ProgramMissing("this machine's apt knows no mirror of Debian")
    return found[0]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DOWNLOAD_WITHIN_S, check=False
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
