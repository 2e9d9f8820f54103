"""The models of the protocols: clean as they are, broken without any of their guards."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "docs" / "model"
MISSING = [
    program
    for program in (os.environ.get("SPIN", "spin"), os.environ.get("CC", "cc"), "bash")
    if shutil.which(program) is None
]


@pytest.mark.full
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize(
    ("model", "clean", "broken", "how"),
    [
        ("route_change", "merge", "gate-of-one", "order"),
        ("handover", "leases-fall", "ack-no-epoch", "lost"),
        ("parking", "park-discard", "park-dead", "dead"),
        ("mixed_versions", "versions-drain", "check-apart", "stale"),
    ],
)
def test_a_protocol_is_clean_and_breaks_without_each_of_its_guards(
    model: str, clean: str, broken: str, how: str
) -> None:
    """One variant of each kind; `docs/model/check.sh` runs all of them. Cases 33 to 35, 38, 41, 53, 65."""
    done = check("--quick", model, clean, broken)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^ok +{clean} +expected clean +found clean", done.stdout, re.MULTILINE)
    assert re.search(rf"^ok +{broken} +expected breaks +found {how}", done.stdout, re.MULTILINE)


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_variant_that_is_not_there_is_an_error() -> None:
    done = check("--quick", "parking", "no-such-variant")
    assert done.returncode == 2
    assert "no-such-variant" in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="not installed: bash")
def test_a_machine_without_spin_is_told_so_and_is_not_failed() -> None:
    done = check(SPIN="no-such-spin")
    assert done.returncode == 0
    assert done.stdout.startswith("note: no-such-spin is not installed")


def test_the_page_lists_the_variants_that_are_checked() -> None:
    checked = re.findall(r"^try \w+ +\w+ +(\S+)", (MODEL / "check.sh").read_text("utf-8"), re.MULTILINE)
    listed = re.findall(r"^\| `([a-z-]+)` \|", (MODEL / "README.md").read_text("utf-8"), re.MULTILINE)
    assert checked
    assert listed == checked


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script as from anywhere."""
    return subprocess.run(
        ["bash", MODEL / "check.sh", *arguments],
        cwd="/",
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
