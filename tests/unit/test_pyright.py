"""Pyright finds the mistakes in the use of typed topics that mypy finds: see test_typed_topics.py.

Its wheel brings its own Node.js, so that it fetches nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.missing_tools import import_or_leave_out

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "unit" / "test_typed_topics.py"
IGNORED = re.compile(r"  # type: ignore\[[^\]]*\]")


def found_by_pyright(program: Path) -> list[dict[str, Any]]:
    """Check a program against this tree; return what is reported."""
    config = program.with_name("pyrightconfig.json")
    facts = {"pythonVersion": "3.11", "typeCheckingMode": "basic", "extraPaths": [str(ROOT)]}
    config.write_text(json.dumps(facts | {"include": [program.name], "reportMissingParameterType": "error"}))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(config)]
    # Its exit code says only whether anything was found.
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    found: list[dict[str, Any]] = json.loads(said.stdout)["generalDiagnostics"]
    return found


@pytest.mark.full
def test_pyright_reports_each_line_with_a_mistake_and_no_other(tmp_path: Path) -> None:
    import_or_leave_out("basedpyright")
    lines = PROGRAM.read_text("utf-8").splitlines()
    program = tmp_path / "program.py"
    program.write_text("\n".join(IGNORED.sub("", line) for line in lines))
    wrong = {number for number, line in enumerate(lines) if IGNORED.search(line)}
    assert len(wrong) > 15
    reported = found_by_pyright(program)
    assert {one["range"]["start"]["line"] for one in reported if one["severity"] == "error"} == wrong, reported
