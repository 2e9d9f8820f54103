"""Run schedules: in a process of its own, so that a job's length and memory are not the worker's.

A run has a lease, renewed while it lives. The steps, and what a crash behind each leaves:

- claimed: the lease ends, the worker's next look ends the run and makes its schedule due again
- snapshot's name noted: the same; a snapshot that was made counts among the schedule's
- each job's result noted: the same; the results of ended jobs stay
- ended: older snapshots are dropped by the next run

A job is a process group that holds the read end of a pipe and ends itself at the pipe's end: with the run, however
that ended. What jobs leave is whole or goes on: pages and certificates are renamed into place, exports repeat nothing.
A run that lost its lease notes nothing more.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from psycopg.types.json import Jsonb

from mqlayer.archive.schedules import EXPORT, RunState, Schedule, ScheduledRun, find_schedule, schedule_runs
from mqlayer.archive.snapshots import create_snapshot, drop_snapshot, list_snapshots
from mqlayer.errors import Conflict, InvalidInput, MqlayerError, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redaction import redact
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

LEASE_S: Final = 60.0
RENEW_S: Final = 10.0
AGAIN_S: Final = 600.0
"""When a lost run's schedule is due again."""
RUNS_KEPT: Final = 1_000
FACTS_LIMIT: Final = 4_000
"""Bytes of a job's facts that are kept; tables are in the files."""
ERROR_CHARACTERS: Final = 1_000
LOST: Final = "its process ended without a word, or lost its lease: see the worker's log"

JOB_PROGRAM: Final = "mqlayer.cli.scheduled_job"
"""The command `mqlayer`, which ends with the run."""
CERTIFICATE: Final = "certificate.json"

JobCommand = Callable[[str, Schedule, str, Path | None], Sequence[str]]
"""Returns the words of a command, of job, schedule, snapshot and directory. Raises InvalidInput."""


def start_due(runtime: Runtime) -> str | None:
    """Start the run that is due, if any, as a process of its own; return its schedule."""
    with runtime.control.connection() as connection:
        connection.execute(query("schedule_runs_end_lost"), {"error": LOST, "again_s": AGAIN_S})
        row = connection.execute(query("schedule_due")).fetchone()
    if row is None:
        return None
    words = [sys.executable, "-m", "mqlayer", "analytics", "schedule", "run", row[0], "--if-due"]
    # Its own session: it goes on when the worker is restarted. Its errors are in the worker's log.
    subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    return str(row[0])


def command_of(job: str, schedule: Schedule, snapshot: str, directory: Path | None) -> Sequence[str]:
    """Return a job's command, in this interpreter. Raises InvalidInput for a certificate without a directory."""
    words = [sys.executable, "-m", JOB_PROGRAM]
    if job == EXPORT:
        topics = [word for topic in schedule.topics or () for word in ("--topic", topic)]
        return [*words, "archive", "export", "--to", str(schedule.export_to), *topics, "--json"]
    words += ["analytics", job, "--snapshot", snapshot, "--json"]
    if job == "certify":
        return words + _certificate_words(schedule.name, snapshot, directory)
    if directory is not None:
        words += ["--html", str(directory / schedule.name / snapshot / f"{job}.html")]
    return words


def _certificate_words(name: str, snapshot: str, directory: Path | None) -> list[str]:
    if directory is None:
        raise InvalidInput("certificates go below MQLAYER_ANALYTICS_DIR: set it for the worker")
    words = ["--out", str(directory / name / snapshot / CERTIFICATE)]
    # Each continues the one before: what was certified once is compared for ever. Names end in the runs' numbers.
    made = [one for one in (directory / name).glob(f"*/{CERTIFICATE}") if one.parent.name != snapshot]
    numbered = [(int(number), one) for one in made if (number := one.parent.name.rpartition("-")[2]).isdecimal()]
    return [*words, "--continues", str(max(numbered)[1])] if numbered else words


def run_schedule(
    runtime: Runtime,
    name: str,
    *,
    if_due: bool = False,
    directory: Path | None = None,
    lease_s: float = LEASE_S,
    command: JobCommand = command_of,
) -> ScheduledRun | None:
    """Run a schedule now: snapshot, jobs, files below `directory`, and drop old snapshots.

    Returns None where another run goes on, or with `if_due` where it is not due. Raises NotFound, Conflict if the
    run lost its lease.
    """
    find_schedule(runtime.control, name)
    worker = f"{socket.gethostname()} {os.getpid()}"[:255]
    facts = {"name": name, "only_due": if_due, "worker": worker, "lease_s": lease_s}
    with runtime.control.connection() as connection, connection.transaction():
        connection.execute(query("schedule_runs_end_lost"), {"error": LOST, "again_s": AGAIN_S})
        row = connection.execute(query("schedule_run_claim"), facts).fetchone()
    if row is None:
        return None
    failpoint("schedule.after_claim")
    found = find_schedule(runtime.control, name)
    run = _Run(runtime, found, int(row[0]), lambda job, snapshot: command(job, found, snapshot, directory))
    return run.perform(lease_s)


class _Run:
    def __init__(
        self, runtime: Runtime, schedule: Schedule, run_id: int, command: Callable[[str, str], Sequence[str]]
    ) -> None:
        self._runtime, self._schedule, self._run_id, self._command = runtime, schedule, run_id, command
        self._child: subprocess.Popen[str] | None = None
        self._lost = threading.Event()

    def perform(self, lease_s: float) -> ScheduledRun:
        with self._renewing(lease_s):
            state, error = self._steps()
            self._end(state, error)
        self._clean()
        (run,) = schedule_runs(self._runtime.control, self._schedule.name, limit=1, after=self._run_id + 1)
        return run

    def _steps(self) -> tuple[RunState, str | None]:
        try:
            snapshot = self._snapshot() if self._schedule.needs_snapshot else ""
        except Conflict:
            if self._lost.is_set():
                raise
            return "failed", "its snapshot's name is taken: it runs again at its next time"
        except MqlayerError as error:
            return "failed", f"no snapshot: {error}"[:ERROR_CHARACTERS]
        found: dict[str, Any] = {}
        for job in self._schedule.jobs:
            self._note(job, found)
            failpoint("schedule.before_job")
            found = {job: self._job(job, snapshot)}
            states = found[job]["state"]
            log.info("scheduled_job_ended", extra={"schedule": self._schedule.name, "job": job, "word": states})
            self._note(job, found)
            failpoint("schedule.after_job")
        results = self._results()
        return _state_of([one["state"] for one in results.values()]), None

    def _snapshot(self) -> str:
        name = f"{self._schedule.name}-{datetime.now(UTC):%Y%m%d}-{self._run_id}"
        if name in {one.name for one in list_snapshots(self._runtime.control)}:
            raise Conflict(f"snapshot {name!r} exists", "another name comes with the next run")
        # Before the snapshot: a later run drops what this one made.
        self._note(None, {}, snapshot=name)
        failpoint("schedule.before_snapshot")
        create_snapshot(self._runtime, name, topics=self._schedule.topics)
        failpoint("schedule.after_snapshot")
        return name

    def _job(self, job: str, snapshot: str) -> dict[str, Any]:
        began = time.monotonic()
        try:
            code, out, errors = self._ran(self._command(job, snapshot))
        except InvalidInput as error:
            return {"state": "failed", "seconds": 0.0, "error": str(error)[:ERROR_CHARACTERS]}
        if self._lost.is_set():
            raise _lost_lease(self._schedule.name)
        facts = _facts_of(out)
        # A job that was good, and whose page could not be written, found no fault.
        faults = facts is not None and facts.get("good") is False
        state = "good" if code == 0 else "faults" if faults else "failed"
        found: dict[str, Any] = {"state": state, "seconds": round(time.monotonic() - began, 1)}
        said = None if facts is None else facts.pop("error", None)
        if facts is not None:
            found["facts"] = facts
        if state == "failed":
            said = (errors.strip().splitlines() or ["it said nothing"])[-1]
        if said is not None:
            found["error"] = redact(str(said))[:ERROR_CHARACTERS]
        return found

    def _ran(self, words: Sequence[str]) -> tuple[int, str, str]:
        pipe = subprocess.PIPE
        reading, writing = os.pipe()
        try:
            # A group of its own, for Java too.
            with subprocess.Popen(words, stdin=reading, stdout=pipe, stderr=pipe, text=True, process_group=0) as child:
                self._child = child
                out, errors = child.communicate()
            return child.returncode, out, errors
        finally:
            os.close(reading)
            os.close(writing)

    def _note(self, job: str | None, results: Mapping[str, Any], *, snapshot: str | None = None) -> None:
        facts = {"run_id": self._run_id, "job": job, "snapshot": snapshot, "results": Jsonb(dict(results))}
        self._fenced("schedule_run_note", facts)

    def _end(self, state: RunState, error: str | None) -> None:
        self._fenced("schedule_run_end", {"run_id": self._run_id, "state": state, "error": error})
        log.info("scheduled_run_ended", extra={"schedule": self._schedule.name, "word": state})

    def _fenced(self, name: str, facts: Mapping[str, Any]) -> None:
        with self._runtime.control.connection() as connection:
            if self._lost.is_set() or connection.execute(query(name), facts).fetchone() is None:
                raise _lost_lease(self._schedule.name)

    def _results(self) -> Mapping[str, Any]:
        (run,) = schedule_runs(self._runtime.control, self._schedule.name, limit=1, after=self._run_id + 1)
        return run.results

    def _clean(self) -> None:
        database, name = self._runtime.control, self._schedule.name
        with database.connection() as connection:
            made = connection.execute(query("schedule_snapshots"), {"name": name}).fetchall()
        for (snapshot,) in made[self._schedule.keep :]:
            try:
                drop_snapshot(self._runtime, snapshot)
            except NotFound:
                log.info("scheduled_snapshot_gone", extra={"snapshot": snapshot})
        with database.connection() as connection:
            connection.execute(query("schedule_runs_clean"), {"name": name, "keep": RUNS_KEPT})

    @contextmanager
    def _renewing(self, lease_s: float) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._renew, args=(lease_s, over), name="renews the run", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _renew(self, lease_s: float, over: threading.Event) -> None:
        facts = {"run_id": self._run_id, "lease_s": lease_s}
        until = time.monotonic() + lease_s
        while not over.wait(min(RENEW_S, lease_s / 6)):
            asked = time.monotonic()
            if (there := _renewed(self._runtime.control, facts)) is True:
                until = asked + lease_s
            if there is False or time.monotonic() > until:
                self._lost.set()
                if (child := self._child) is not None and child.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGTERM)
                return


def _state_of(states: Sequence[str]) -> RunState:
    return "failed" if "failed" in states else "faults" if "faults" in states else "good"


def _facts_of(output: str) -> dict[str, Any] | None:
    """Return the plain facts of the last JSON line; None: there is none."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "job" in found:
            plain = {name: value for name, value in found.items() if isinstance(value, str | int | float | bool)}
            return plain if len(json.dumps(plain)) <= FACTS_LIMIT else {}
    return None


def _renewed(database: Database, facts: Mapping[str, Any]) -> bool | None:
    """Whether the lease was extended; None: not known."""
    try:
        with database.connection() as connection:
            return connection.execute(query("schedule_run_renew"), facts).fetchone() is not None
    except MqlayerError:
        return None


def _lost_lease(name: str) -> Conflict:
    return Conflict(f"the run of schedule {name!r} lost its lease", "another process may run it: nothing is to be done")
