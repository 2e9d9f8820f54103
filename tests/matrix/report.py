"""What a row's run came to, and the table of all rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from xml.etree import ElementTree as ET


@dataclass(frozen=True, slots=True)
class RowResult:
    """Counts of a run; `versions` were those of the servers that answered; `trouble` says why there are none."""

    name: str
    versions: str = ""
    run: int = 0
    failed: tuple[str, ...] = ()
    skipped: int = 0
    seconds: float = 0.0
    trouble: str = ""
    notes: tuple[str, ...] = ()
    """What tests recorded: properties of the JUnit file."""

    @property
    def good(self) -> bool:
        """Whether tests ran, and none failed."""
        return not self.trouble and not self.failed and self.run > 0

    @classmethod
    def of_junit(cls, name: str, versions: str, file: Path, *, seconds: float, code: int) -> Self:
        """Read pytest's JUnit file."""
        try:
            cases = list(ET.parse(file).iter("testcase"))
        except (OSError, ET.ParseError):
            return cls(name, versions, seconds=seconds, trouble=f"pytest ended with {code} and no report")
        failed = tuple(
            _name_of(case) for case in cases if any(case.find(kind) is not None for kind in ("failure", "error"))
        )
        skipped = sum(case.find("skipped") is not None for case in cases)
        trouble = f"pytest ended with {code}" if code and not failed else ""
        notes = tuple(f"{noted.get('name')}: {noted.get('value')}" for case in cases for noted in case.iter("property"))
        return cls(name, versions, len(cases) - skipped, failed, skipped, seconds, trouble, notes)


def table(results: Iterable[RowResult]) -> str:
    """Return the table, as Markdown."""
    lines = [
        "| row | versions | tests run | passed | failed | skipped | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if result.trouble and not result.run:
            lines.append(f"| {result.name} | {result.versions or result.trouble} | 0 | | | | |")
            continue
        passed, failed = result.run - len(result.failed), len(result.failed)
        counts = f"{result.run:,} | {passed:,} | {failed} | {result.skipped} | {result.seconds:.0f}"
        lines.append(f"| {result.name} | {result.versions} | {counts} |")
    return "\n".join(lines)


def _name_of(case: ET.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"
