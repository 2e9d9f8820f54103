"""Which failpoints the library has, read from its source."""

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "mqlayer"


@dataclass(frozen=True, slots=True, order=True)
class FailpointUse:
    """One call of `failpoint(...)` in the source."""

    name: str
    path: Path
    line: int


@cache
def failpoint_names(package: Path = PACKAGE) -> frozenset[str]:
    """Return every failpoint name that the package uses."""
    return frozenset(use.name for use in failpoint_uses(package))


def failpoint_uses(package: Path = PACKAGE) -> list[FailpointUse]:
    """Return every call of `failpoint` in the package, sorted by name.

    Raises ValueError for a call whose name is not one literal string: a test could not know it.
    """
    uses = (use for path in _python_files(package) for use in _uses_in(path))
    return sorted(uses)


def _python_files(package: Path) -> Iterator[Path]:
    # os.walk and not rglob: mqlayer/workers and mqlayer/spark are symlinks, which rglob passes by.
    for directory, _, names in os.walk(package, followlinks=True):
        yield from (Path(directory, name) for name in sorted(names) if name.endswith(".py"))


def _uses_in(path: Path) -> Iterator[FailpointUse]:
    source = path.read_text(encoding="utf-8")
    if "failpoint" not in source:
        return
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Call) and _is_failpoint(node.func):
            yield FailpointUse(_literal_name(node, path), path, node.lineno)


def _is_failpoint(function: ast.expr) -> bool:
    match function:
        case ast.Name(id="failpoint") | ast.Attribute(attr="failpoint"):
            return True
        case _:
            return False


def _literal_name(call: ast.Call, path: Path) -> str:
    match call:
        case ast.Call(args=[ast.Constant(value=str(name))], keywords=[]):
            return name
        case _:
            raise ValueError(f"{path}:{call.lineno}: failpoint takes one literal name")
