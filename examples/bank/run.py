"""The README's main job, on real servers: pgbench's bank, outbox to read model.

While pgbench runs, partitions of the topic are split, moved and merged; half-way one consumer is killed and another one
stopped past its lease. With `--pop` the consumers are receivers of an ordered pop, stopped past a visibility timeout.

    python -m examples.bank.run --seconds 20

Exit code 0 only if no message was lost, none was out of order, and the read model equals pgbench's own tables.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer

from examples.bank.archiving import ArchiveFailed, archive, certify, no_spark, spark_begun
from examples.bank.crews import Crew, Members, Receivers
from examples.bank.faults import Faults
from examples.bank.figures import Details, Figures, Verdict
from examples.bank.rerouting import PREFIX, Rerouting
from examples.bank.show import STEPS, Show, others_apart, show_verdict
from examples.bank.stage import CONSUMER_PROCESSES, PARTITIONS, SCALE, Stage
from mqlayer.errors import MqlayerError
from mqlayer.stack.wait import comes_true

DEFAULT_RATE: Final = 200
JOINED_WITHIN_S: Final = 60.0
STALLED_AFTER_S: Final = 30.0
LOOK_EVERY_S: Final = 0.5


class RunFailed(Exception):
    """The run could not be carried out: nothing can be said about the promise."""


def main(
    seconds: Annotated[int, typer.Option(min=1, help="How long pgbench runs.")] = 20,
    rate: Annotated[int, typer.Option(min=0, help="Transactions per second; 0: as fast as possible.")] = DEFAULT_RATE,
    clients: Annotated[int, typer.Option(min=1, max=100, help="Clients of pgbench.")] = 8,
    scale: Annotated[int, typer.Option(min=1, help="Branches of the bank, of 100,000 accounts each.")] = SCALE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object.")] = False,  # noqa: FBT002
    spark: Annotated[bool, typer.Option(help="End with Spark's order audit of the archive.")] = True,  # noqa: FBT002
    pop: Annotated[bool, typer.Option("--pop", help="Consume by ordered pop, without members.")] = False,  # noqa: FBT002
    logs: Annotated[Path | None, typer.Option(help="Where to keep the logs; else they go with the rest.")] = None,
) -> None:
    """Run the bank and judge it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with (
            _directory() as directory,
            others_apart(directory / "others.log") as stderr,
            Show(stderr, steps=len(STEPS) - (not spark)) as show,
            _stage(directory, logs, pop=pop, scale=scale) as stage,
        ):
            verdict, details = _run(stage, show, seconds=seconds, rate=rate, clients=clients, spark=spark)
        show_verdict(verdict, details, pop=pop, on_stderr=as_json)
    except (MqlayerError, RunFailed, ArchiveFailed) as error:
        hint = "" if logs else "; --logs DIRECTORY keeps what the processes said"
        sys.stderr.write(f"bank: {error}{hint}\n")
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(asdict(verdict)))
    raise typer.Exit(0 if verdict.good else 1)


def _run(stage: Stage, show: Show, *, seconds: int, rate: int, clients: int, spark: bool) -> tuple[Verdict, Details]:
    figures, crew = _set_up(stage, show)
    show.step("load", f"pgbench runs for {seconds} s, {f'{rate} transactions/s' if rate else 'as fast as it can'}")
    faults_at = _load(stage, figures, crew, show, seconds=seconds, rate=rate, clients=clients)
    show.step("draining", "until each message has its effect")
    with spark_begun(show.note) if spark else no_spark() as audit:
        _drain(figures, show)
        show.note("stopping the processes, and comparing the tables")
        stage.stop_processes()
        verdict, details = figures.verdict(), figures.details(faults_at)
        show.step("archive", "the remaining messages, and a snapshot")
        verdict = replace(verdict, archived=archive(stage.control_dsn))
        if spark:
            show.step("Spark", "audits the order of every archived message")
            verdict = replace(verdict, audit=audit(stage.control_dsn))
        show.note("an order certificate, and its check")
        verdict = replace(verdict, certificate=certify(stage.control_dsn, stage.directory))
    show.note("stopping the servers")
    return verdict, details


def _set_up(stage: Stage, show: Show) -> tuple[Figures, Crew]:
    show.step("set-up", "two partition nodes, a broker, and Postgres")
    stage.start_servers()
    show.note("pgbench's tables, the topic, the trigger, the read model")
    stage.prepare()
    show.note(f"the relay, a Celery worker, {'processes that receive' if stage.pop else 'consumer processes'}")
    stage.start_processes()
    figures = Figures(stage.control_dsn, stage.bank_dsn)
    crew = _crew(stage, figures)
    if not comes_true(crew.complete, within_s=JOINED_WITHIN_S):
        raise RunFailed(f"the consumers were not all at work within {JOINED_WITHIN_S:g} s")
    return figures, crew


def _crew(stage: Stage, figures: Figures) -> Crew:
    if stage.pop:
        return Receivers(figures, stage.control_dsn, stage.receiver_pids, prefix=PREFIX)
    return Members(figures, spared_pid=stage.worker_pid, members=CONSUMER_PROCESSES + 1, partitions=PARTITIONS)


def _load(stage: Stage, figures: Figures, crew: Crew, show: Show, *, seconds: int, rate: int, clients: int) -> Any:
    """Run pgbench to its end, with the faults half-way; return when they began."""
    faults = Faults(crew, note=show.note)
    rerouting = Rerouting(stage.control_dsn, note=show.note)
    faults_at = None
    began = time.monotonic()
    rerouting.start()
    with _ended(stage.start_load(seconds=seconds, rate=rate, clients=clients)) as load:
        try:
            while load.poll() is None:
                elapsed_s = time.monotonic() - began
                rerouting.follow(elapsed_s / seconds)
                if not faults.started and elapsed_s >= seconds / 2:
                    faults_at = figures.now()
                    show.step("faults", f"one consumer is killed, one is stopped past its {crew.hold}")
                    faults.start()
                show.update(figures.progress(), done=elapsed_s, total=seconds)
                comes_true(lambda: load.poll() is not None, within_s=LOOK_EVERY_S)
            faults.finish()
            rerouting.finish()
        finally:
            faults.cancel()
        if load.returncode:
            raise RunFailed(f"pgbench ended with {load.returncode}: {stage.load_log.read_text()[-500:]}")
    if faults.error or rerouting.error:
        raise RunFailed(faults.error or rerouting.error)
    if not rerouting.done:
        raise RunFailed("not all route changes were made")
    return faults_at


def _drain(figures: Figures, show: Show) -> None:
    """Wait until all that was published is applied, for as long as it goes on."""
    applied, moved_at = -1, time.monotonic()
    while time.monotonic() - moved_at < STALLED_AFTER_S:
        now = figures.progress()
        show.update(now, done=now.applied, total=now.messages)
        if now.applied >= now.messages:
            return
        if now.applied != applied:
            applied, moved_at = now.applied, time.monotonic()
        time.sleep(LOOK_EVERY_S)
    show.note(f"nothing moved for {STALLED_AFTER_S:g} s: giving up on the rest")


@contextmanager
def _directory() -> Iterator[Path]:
    """Lend a directory; nothing of it is left afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="mqlayer-bank-"))
    # The account of Postgres must be able to enter.
    directory.chmod(0o755)
    # Temporary files of processes that have to be killed go with it.
    temporary = directory / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    os.environ["TMPDIR"] = str(temporary)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _stage(directory: Path, logs: Path | None, *, pop: bool, scale: int) -> Iterator[Stage]:
    """Lend a stage; nothing of it runs afterwards, whatever happens."""
    stage = Stage(directory, pop=pop, scale=scale)
    try:
        yield stage
    finally:
        _ignore_interrupts()
        try:
            if logs is not None:
                _keep_logs(directory, logs)
        finally:
            stage.close()


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """See that a process has ended when the block is left."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _keep_logs(directory: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in directory.rglob("*.log"):
        shutil.copy(log, target / log.name if log.parent == directory else target / f"{log.parent.name}-{log.name}")


def _ignore_interrupts() -> None:
    """Let nothing come between us and the end of our processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
