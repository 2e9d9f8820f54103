"""What a person sees of a run: steps, events and progress as they come, and the table at the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from examples.bank.figures import Details, Progress, Verdict
from examples.bank.stage import LEASE_S
from mqlayer.cli.output import fold

STEPS: Final = ("set-up", "load", "faults", "draining", "archive", "Spark")
LABEL: Final = 1 + max(len(f"1/{len(STEPS)} {name}") for name in STEPS)
PLAIN_LINE_EVERY_S: Final = 5.0
PLAIN_WIDTH: Final = 80
AUDITS: Final = {"clean": "[green]clean[/]", None: "left out"}
CERTIFICATES: Final = {"accepted": "[green]accepted[/]", None: "left out"}
NEXT: Final = (
    ("  docs/tutorial/ordered-consumer.md", "your own consumer, in ten minutes"),
    ("  scripts/demo --pop", "the same by ordered pop: no members"),
    ("  scripts/demo --seconds 60 --rate 0", "as many transactions as fit, for longer"),
    ("  scripts/bench", "rates and times beside plain Redis"),
)


@contextmanager
def others_apart(log: Path) -> Iterator[TextIO]:
    """Lend the standard error; what libraries and programs print meanwhile goes to a file."""
    kept = [os.dup(number) for number in (1, 2)]
    _flush()
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        with open(kept[1], "w", buffering=1, encoding=sys.stderr.encoding, closefd=False) as ours:
            yield ours
    finally:
        _flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


class Show:
    """Steps with their events: a bar below them on a terminal, else a line now and then."""

    def __init__(self, stream: TextIO, *, steps: int = len(STEPS)) -> None:
        self._console = Console(file=stream, highlight=False)
        self._width = self._console.width if self._console.is_terminal else PLAIN_WIDTH
        columns = (TextColumn(f"{{task.description:<{LABEL - 1}}}"), BarColumn(8), TextColumn("{task.fields[figures]}"))
        self._bar = Bar(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, figures="")
        self._steps = steps
        self._label = ""
        self._began = time.monotonic()
        self._last_line = 0.0
        self._printing = threading.Lock()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, name: str, event: str) -> None:
        """Begin a step."""
        label = f"{STEPS.index(name) + 1}/{self._steps} {name}"
        self._bar.reset(self._task, description=label, total=None, figures="")
        with self._printing:
            self._label = label
        self.note(event)

    def note(self, event: str) -> None:
        """Show an event with its time; the first of a step with the step's name."""
        with self._printing:
            begin = f"{time.monotonic() - self._began:6.1f} s  {self._label:<{LABEL}}"
            self._label = ""
            for number, line in enumerate(fold(event, self._width - len(begin), hang="")):
                self._console.print(f"{'' if number else begin:{len(begin)}}{line}", markup=False, soft_wrap=True)

    def update(self, now: Progress, *, done: float, total: float) -> None:
        """Show how far the step is, by any measure."""
        figures = (
            f"{now.applied:,} of {now.messages:,} applied, p99 {now.recent_ms[1]:.0f} ms, {now.violations} out of order"
        )
        self._bar.update(self._task, completed=done, total=total, figures=figures, refresh=True)
        if self._bar.disable and time.monotonic() - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.note(figures)


def show_verdict(verdict: Verdict, details: Details, *, pop: bool, on_stderr: bool) -> None:
    """Print the verdict, what each figure means, and what to try next."""
    console = Console(stderr=on_stderr, highlight=False)
    console.print(
        "\n[green]The promise held[/]: every key in order, nothing lost, each effect once.\n"
        if verdict.good
        else "\n[red]THE PROMISE IS BROKEN[/]: see the red figures.\n"
    )
    show_columns(console, _rows(verdict, details, "visibility timeout" if pop else "lease"))
    console.print("\nNext:")
    show_columns(console, NEXT)


def show_columns(console: Console, rows: Sequence[tuple[str, ...]]) -> None:
    """Print columns, the second of three at the right; the last one is folded."""
    *columns, _ = zip(*rows, strict=True)
    widths = [max(len(Text.from_markup(text)) for text in column) for column in columns]
    begin = sum(widths) + 2 * len(widths)
    for *texts, last in rows:
        line = Text()
        for number, text in enumerate(map(Text.from_markup, texts)):
            text.align("right" if number else "left", widths[number])
            line.append_text(text).append("  ")
        for number, part in enumerate(fold(last, console.width - begin, hang="")):
            console.print((Text(" " * begin) if number else line) + Text(part), soft_wrap=True)


def _rows(verdict: Verdict, details: Details, hold: str) -> list[tuple[str, ...]]:
    lacking = verdict.messages - (verdict.archived or 0)
    calm = f"{_ms(details.calm_p50_ms, '')} / {_ms(details.calm_p99_ms)}"
    return [
        ("transactions of pgbench", f"{verdict.transactions:,}", "each changes an account and a branch"),
        ("messages", f"{verdict.messages:,}", "two per transaction, published with it"),
        ("order violations", _judged(verdict.violations), "must be 0"),
        ("lost", _judged(verdict.lost), "never applied: must be 0"),
        ("duplicates refused", f"{verdict.duplicates:,}", "delivered again after a fault"),
        ("stale owners refused", f"{details.stale:,}", "woken too late to have an effect"),
        ("messages per second", f"{verdict.rate_per_s:,.0f}", "as pgbench publishes: --rate sets it"),
        ("publish to effect: p50", _ms(verdict.p50_ms), "half of the messages were faster"),
        ("publish to effect: p99", _ms(verdict.p99_ms), _p99_means(verdict, hold)),
        ("  before the faults", calm, "p50 and p99 while no process dies"),
        ("  the longest", _ms(details.worst_ms), f"the {hold}, then the queue behind it"),
        ("read model", "[green]equal[/]" if verdict.model_equal else "[red]NOT EQUAL[/]", "to pgbench's own tables"),
        ("not in the archive", _judged(lacking), "must be 0"),
        ("Spark's order audit", AUDITS.get(verdict.audit, "[red]NOT CLEAN[/]"), "of every archived message"),
        ("order certificate", CERTIFICATES.get(verdict.certificate, "[red]NOT ACCEPTED[/]"), "of the same, checked"),
    ]  # fmt: skip


def _p99_means(verdict: Verdict, hold: str) -> str:
    if verdict.p99_ms < LEASE_S * 1000 / 4:
        return "fewer than 1 in 100 waited for a fault"
    return f"keys of the killed and the stopped consumer waited until its {hold} of {LEASE_S:g} s ended"


def _judged(count: int) -> str:
    return f"[red]{count:,}[/]" if count else "[green]0[/]"


def _ms(value: float, unit: str = " ms") -> str:
    return f"{value:,.0f}{unit}" if value >= 10 else f"{value:.1f}{unit}"
