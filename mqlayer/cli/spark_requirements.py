"""Requirements of Spark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from mqlayer.errors import SparkMissing

JAVA_FROM: Final = 17
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


def check_spark() -> None:
    """Raise SparkMissing unless Spark and Java are installed."""
    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        raise SparkMissing("its package for Python is not installed", "pip install 'mqlayer[spark]'")
    java = _java()
    if java is None:
        where = "JAVA_HOME has no bin/java" if os.environ.get("JAVA_HOME") else "there is no Java"
        raise SparkMissing(where, _INSTALL)
    if (version := _version_of(java)) is not None and version < JAVA_FROM:
        raise SparkMissing(f"{java} is Java {version}", _INSTALL)


_INSTALL: Final = f"install Java {JAVA_FROM} or newer (Debian: default-jre-headless), or set JAVA_HOME to one"


def _java() -> str | None:
    if home := os.environ.get("JAVA_HOME"):
        return shutil.which("java", path=str(Path(home) / "bin"))
    return shutil.which("java")


def _version_of(java: str) -> int | None:
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said.stderr + said.stdout)
    return int(found[1]) if found else None
