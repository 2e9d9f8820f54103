"""What a person sees of a run: progress and events as they come, and the table at the end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from examples.bank.figures import Details, Verdict
from examples.bank.figures import Progress as Now

AUDITS: Final = {"clean": "[green]clean[/]", None: "left out"}
PLAIN_LINE_EVERY_S: Final = 5.0


class Show:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, *, seconds: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description:<5}"), BarColumn(10), TextColumn("{task.fields[figures]}"))
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._progress.add_task("bank", total=seconds, figures="")
        self._began = time.monotonic()
        self._last_line = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, event: str) -> None:
        """Show an event with its time."""
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  {event}", markup=False, soft_wrap=True)

    def update(self, phase: str, elapsed_s: float, now: Now) -> None:
        """Show how far the run is."""
        p50, p99 = now.recent_ms
        figures = (
            f"{now.applied:,} of {now.messages:,} applied, p50 {p50:.0f} ms, p99 {p99:.0f} ms, "
            f"{now.violations} out of order"
        )
        self._progress.update(self._task, description=phase, completed=elapsed_s, figures=figures)
        if self._progress.disable and time.monotonic() - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.note(f"{phase}: {figures}")


def show_verdict(verdict: Verdict, details: Details, *, on_stderr: bool) -> None:
    """Print the table."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in _rows(verdict, details):
        table.add_row(name, value)
    Console(stderr=on_stderr, highlight=False).print(table)


def _rows(verdict: Verdict, details: Details) -> list[tuple[str, str]]:
    return [
        ("transactions of pgbench", f"{verdict.transactions:,}"),
        ("messages", f"{verdict.messages:,}"),
        ("order violations", _judged(verdict.violations)),
        ("lost", _judged(verdict.lost)),
        ("duplicates, refused by the fence", f"{verdict.duplicates:,}"),
        ("of stale owners and tokens, refused", f"{details.stale:,}"),
        ("messages per second", f"{verdict.rate_per_s:,}"),
        ("end to end p50 / p99", f"{verdict.p50_ms} / {verdict.p99_ms} ms"),
        ("  before the faults", f"{details.calm_p50_ms} / {details.calm_p99_ms} ms"),
        ("  the longest", f"{details.worst_ms} ms"),
        ("read model equals pgbench's tables", "[green]yes[/]" if verdict.model_equal else "[red]NO[/]"),
        ("not in the archive", _judged(verdict.messages - (verdict.archived or 0))),
        ("order audit of the archive, by Spark", AUDITS.get(verdict.audit, "[red]NOT CLEAN[/]")),
    ]


def _judged(count: int) -> str:
    return f"[red]{count:,}[/]" if count else "[green]0[/]"
