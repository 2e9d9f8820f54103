"""Runs one row: its programs first in PATH, its Python in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Final

from mqlayer.stack.server_programs import REDIS_NAMES
from tests.matrix.engine import engine_with_images
from tests.matrix.plan import MatrixRow, Series
from tests.matrix.programs import ProgramMissing, UnpackedSeries
from tests.matrix.report import RowResult

ROOT: Final = Path(__file__).parents[2]
EMBEDDED_REDIS: Final = Series("redis", "6.2", "", "")
CHOSEN: Final = """
import platform
from mqlayer.stack.server_programs import best_postgres, best_redis
print(best_redis(), best_postgres(), f"python-{platform.python_version()}")
"""


def run_row(row: MatrixRow, cache: Path, *, parts: tuple[str, ...], processes: str) -> RowResult:
    """Run a row's tests, and return what came of them."""
    try:
        for series in row.series:
            UnpackedSeries(series, cache).ensure()
        python = _environment_of(row.python, cache) if row.python else Path(sys.executable).parent
    except (ProgramMissing, OSError, subprocess.SubprocessError) as error:
        return RowResult(row.name, trouble=str(error))
    with ExitStack() as cleanup:
        scratch = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="mqlayer-matrix-"))
        environment = row_environment(row, cache, python, Path(scratch))
        versions, trouble = chosen_versions(row, python, environment)
        if trouble:
            return RowResult(row.name, versions, trouble=trouble)
        if row.images:
            try:
                host, programs = cleanup.enter_context(engine_with_images(cache, Path(scratch), row.images))
            except (ProgramMissing, OSError, subprocess.SubprocessError) as error:
                return RowResult(row.name, versions, trouble=str(error))
            environment |= {"DOCKER_HOST": host, "PATH": os.pathsep.join([programs, environment["PATH"]])}
        report = Path(scratch) / "junit.xml"
        command = [str(python / "python"), "-m", "pytest", *row.arguments(parts), "-q", "--tb=short"]
        # Of the families of JUnit's files, this one has the properties that tests record.
        command += ["-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        command += ["-n", processes, "--dist", "loadgroup", f"--junitxml={report}"]
        begun = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        seconds = time.monotonic() - begun
        return RowResult.of_junit(row.name, versions, report, seconds=seconds, code=code)


def row_environment(row: MatrixRow, cache: Path, python: Path, scratch: Path) -> dict[str, str]:
    """Return the variables of a row's run: PATH chooses its servers."""
    # Where CI is set, a test that lacks something fails: here the table counts it.
    kept = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("MQLAYER_")}
    wanted = [str(UnpackedSeries(series, cache).path) for series in (row.redis, row.postgres, *row.others) if series]
    own = [str(python)]
    others = [place for place in os.get_exec_path() if place not in {*own, str(Path(sys.executable).parent)}]
    rest = others if row.redis else [_without_redis(Path(place), scratch) for place in others]
    return {**kept, "PATH": os.pathsep.join([*wanted, *own, *rest]), "VIRTUAL_ENV": str(python.parent)}


def _without_redis(place: Path, scratch: Path) -> str:
    """Return a folder with the same programs but Redis: the newest one in PATH would be chosen."""
    if not any((place / name).exists() for name in REDIS_NAMES):
        return str(place)
    links = scratch / sha256(str(place).encode()).hexdigest()[:16]
    if not links.exists():
        links.mkdir()
        for program in place.iterdir():
            if program.name not in REDIS_NAMES:
                (links / program.name).symlink_to(program)
    return str(links)


def chosen_versions(row: MatrixRow, python: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the versions that tests would start, and what is wrong with them."""
    command = [str(python / "python"), "-c", CHOSEN]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    versions = answer.stdout.split()
    if len(versions) != 3:
        return "", f"the versions can't be read: {answer.stderr.strip()[-300:]}"
    shown = ", ".join(version.replace("-", " ").capitalize() for version in versions)
    if row.too_old:
        return ", ".join(f"{series.product.capitalize()} {series.number}" for series in row.series), ""
    missing = [str(series) for series in _expected(row) if series not in row.others and not _among(series, versions)]
    return shown, f"has {', '.join(versions)}, and not {', '.join(missing)}" if missing else ""


def _expected(row: MatrixRow) -> tuple[Series, ...]:
    return row.series if row.redis else (EMBEDDED_REDIS, *row.series)


def _among(series: Series, versions: list[str]) -> bool:
    found = (version.partition("-") for version in versions)
    return any(product == series.product and series.has(number) for product, _, number in found)


def _environment_of(series: Series, cache: Path) -> Path:
    """Make an environment of the locked packages for another Python; return its folder of programs."""
    place = ROOT / f".venv-{series.number}"
    # Python finds its library beside the file itself, not beside a link to it.
    interpreter = (UnpackedSeries(series, cache).path / f"python{series.number}").resolve()
    locks = [ROOT / "requirements" / f"{name}.lock" for name in ("build", "dev", "embedded")]
    version = subprocess.run([interpreter, "--version"], capture_output=True, text=True, check=True).stdout
    facts = [*(lock.read_text() for lock in locks), (ROOT / "pyproject.toml").read_text(), version, str(place)]
    stamp = sha256("".join(facts).encode()).hexdigest()
    if not (place / "stamp").exists() or (place / "stamp").read_text() != stamp:
        _uv("venv", "--quiet", "--clear", "--no-project", "--python", interpreter, place)
        into = ("pip", "install", "--quiet", "--python", place / "bin/python")
        requirements = [part for lock in locks for part in ("--requirement", lock)]
        _uv(*into, "--require-hashes", *requirements)
        _uv(*into, "--no-deps", "--no-build-isolation", "--editable", ".")
        (place / "stamp").write_text(stamp)
    return place / "bin"


def _uv(*words: str | Path) -> None:
    answer = subprocess.run(["uv", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ProgramMissing(f"uv {words[0]}: {' '.join(answer.stderr.split())[-600:]}")
