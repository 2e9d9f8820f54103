"""Common parts of bulk actions and replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import typer

from mqlayer.cli.output import echo
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import runtime_here
from mqlayer.postgres.database import Database
from mqlayer.redelivery import BulkAction, Replay, new_worker
from mqlayer.runtime.runtime import Runtime

KeyOption = Annotated[str | None, typer.Option(help="Only of this message key.")]
RateOption = Annotated[float, typer.Option(min=0, help="Messages a second, at most; 0: no limit.")]
BackgroundOption = Annotated[bool, typer.Option("--background", help="Let the worker do it.")]

AnyJob = TypeVar("AnyJob", BulkAction, Replay)


@dataclass(frozen=True, slots=True)
class JobCommands(Generic[AnyJob]):
    """Commands of one kind of job. `report`: prints a result, as JSON or not."""

    name: str
    command: str
    work: Callable[..., AnyJob]
    report: Callable[[AnyJob, bool], None]

    def begin(self, database: Database, claim: Callable[[str | None], int], *, background: bool, as_json: bool) -> None:
        """Begin a job for this process, and finish it; or for the worker."""
        worker = None if background else new_worker()
        job_id = claim(worker)
        if worker is None:
            echo(f"{self.name} {job_id} is left to the worker: see mqlayer {self.command} show {job_id}")
            return
        echo(f"{self.name} {job_id}; if it is cut off: mqlayer {self.command} resume {job_id}", err=True)
        self._finish(database, job_id, worker, as_json=as_json)

    def resume(self, job_id: int, claim: Callable[[Runtime, str], None], *, as_json: bool) -> None:
        """Claim a job that was cut off, and finish it."""
        with runtime_here() as runtime:
            check_change(runtime.control)
            worker = new_worker()
            claim(runtime, worker)
            self._finish(runtime.control, job_id, worker, as_json=as_json)

    def _finish(self, database: Database, job_id: int, worker: str, *, as_json: bool) -> None:
        try:
            done = self.work(database, job_id, worker=worker)
        except KeyboardInterrupt:
            # The worker takes the job over, so show how to end it.
            echo(f"cut off; the worker goes on with it, or: mqlayer {self.command} cancel {job_id}", err=True)
            raise
        self.report(done, as_json)


def ended_text(done: BulkAction | Replay) -> str:
    """Return its state, after this process's work."""
    return "running, in another process" if done.state == "running" else done.state


def common_columns(one: Replay) -> dict[str, Any]:
    """Return common columns: filter, actor, times."""
    return {
        "filter": one.filter.as_json(),
        "actor": one.actor,
        "started_at": one.started_at,
        "ended_at": one.ended_at,
        "worked_on": one.worked_on,
    }
