"""What is installed is what was locked: by hashes, in versions and with licences that pyproject.toml allows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
ENTRY = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?: ; (?P<marker>[^\\\n]+?))? \\\n(?P<hashes>(?:    --hash=.*\n)+)",
    re.MULTILINE,
)
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?")
EXTRAS_OF = {
    "dev": (
        "dev",
        "certificates",
        "console",
        "containers",
        "django",
        "docs",
        "fastapi",
        "lake",
        "oidc",
        "otel",
        "parquet",
        "reload",
        "s3",
        "spark",
        "testing",
    ),
    "embedded": ("embedded",),
    "image": (),
    "lowest": ("dev", "embedded", "parquet"),
}
NOT_AT_LOWEST = {"pyspark"}
INSTALLERS = [ROOT / "Dockerfile", ROOT / ".ci" / "run", *sorted((ROOT / "scripts").iterdir())]


def project() -> dict[str, Any]:
    facts: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return facts


def locked(name: str) -> dict[str, set[Version]]:
    """Return the versions of each package in a lock file; a package has two where Pythons differ."""
    found: dict[str, set[Version]] = {}
    for match in ENTRY.finditer((ROOT / "requirements" / f"{name}.lock").read_text("utf-8")):
        found.setdefault(canonicalize_name(match["name"]), set()).add(Version(match["version"]))
    return found


def wanted(name: str) -> list[Requirement]:
    """Return what pyproject.toml asks for directly of a lock file's packages."""
    facts = project()
    lines = list(facts["dependencies"])
    for extra in EXTRAS_OF[name]:
        lines += facts["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_file_has_versions_and_hashes_and_names_no_place(lock: Path) -> None:
    text = lock.read_text("utf-8")
    rest = ENTRY.sub("", text)
    assert all(line.startswith("#") for line in rest.splitlines()), "each entry is one version with hashes"
    for match in ENTRY.finditer(text):
        assert all(HASH.fullmatch(line) for line in match["hashes"].splitlines())
    assert "://" not in text
    assert "--index" not in text


@pytest.mark.parametrize("name", EXTRAS_OF)
def test_a_lock_file_has_all_that_the_project_asks_for_in_a_version_that_it_allows(name: str) -> None:
    """Where this fails, run `scripts/lock`."""
    versions = locked(name)
    for requirement in wanted(name):
        if name == "lowest" and requirement.name in NOT_AT_LOWEST:
            continue
        for version in versions[canonicalize_name(requirement.name)]:
            assert version in requirement.specifier, f"{requirement} is not in {name}.lock"


def test_lock_files_agree_on_versions() -> None:
    """Tests run on what the image has."""
    for one, other in combinations(("build", "dev", "embedded", "image"), 2):
        first, second = locked(one), locked(other)
        assert {name: first[name] for name in first.keys() & second.keys()} == {
            name: second[name] for name in first.keys() & second.keys()
        }


def test_every_extra_is_locked() -> None:
    assert {extra for extras in EXTRAS_OF.values() for extra in extras} == set(project()["optional-dependencies"])


def test_direct_dependencies_have_a_lower_bound_and_no_upper_one() -> None:
    """The lowest ones are tried by `scripts/lowest`."""
    every = [requirement for name in EXTRAS_OF for requirement in wanted(name)]
    assert {str(one): [part.operator for part in one.specifier] for one in every if len(one.specifier) != 1} == {}
    assert {part.operator for one in every for part in one.specifier} == {">="}


def test_scripts_name_files_that_are_there() -> None:
    """Pytest says nothing of a missing file that `--ignore` names."""
    words = [
        word
        for script in sorted((ROOT / "scripts").iterdir())
        for word in re.findall(r"(?<![\w./])tests/[\w./{},*-]+", script.read_text("utf-8"))
    ]
    expand = ["bash", "-c", f"cd '{ROOT}' && printf '%s\\n' {' '.join(words)}"]
    paths = subprocess.run(expand, check=True, capture_output=True, text=True).stdout.split()
    assert "tests/unit/test_models.py" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", INSTALLERS, ids=lambda path: path.name)
def test_packages_are_installed_by_hash_only(path: Path) -> None:
    """A package of ours comes without a look at its dependencies; all others by the hashes of a lock file."""
    text = path.read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(r"(?:pip|uv pip) (?:install|wheel|download)\b[^&|\n]*", text)
    ours = [command for command in commands if "--no-deps" in command]
    assert [command for command in commands if "--require-hashes" not in command and command not in ours] == []
    # What builds a package would be fetched as well.
    assert [command for command in ours if "--no-build-isolation" not in command and "--no-index" not in command] == []


def test_every_package_here_has_a_licence_that_is_allowed() -> None:
    licences("pip-licenses")


def test_a_licence_that_is_not_allowed_is_told() -> None:
    with pytest.raises(AssertionError, match="not in allow-only"):
        licences("pip-licenses", "--allow-only", "MIT")


def licences(name: str, *options: str) -> None:
    program = Path(sys.executable).parent / name
    done = subprocess.run([program, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
