"""A test module holds tests: what several of them need is in `tests/fixtures` or `tests/proof`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
PLANTED = """
from tests.unit.test_modules import imported
def inside():
    import tests.unit.test_modules as one
    from . import test_modules as two
"""


def imported(program: str) -> Iterator[str]:
    """Yield the dotted names that a program imports, also inside its functions."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{one.name}" for one in node.names)


def test_no_test_module_is_imported() -> None:
    """Where this fails, move what is shared to `tests/fixtures` or `tests/proof`."""
    modules = {path.stem for path in TESTS.rglob("test_*.py")}

    def tests_in(program: str) -> list[str]:
        # To parse all programs takes ten times as long.
        if modules.isdisjoint(re.findall(r"\w+", program)):
            return []
        return [name for name in imported(program) if modules & set(name.split("."))]

    assert len(tests_in(PLANTED)) == 3, "each form of import is seen"
    found = {str(path.relative_to(TESTS)): tests_in(path.read_text("utf-8")) for path in sorted(TESTS.rglob("*.py"))}
    assert {path: names for path, names in found.items() if names} == {}
