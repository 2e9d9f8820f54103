"""Schedules of analytics: snapshots at fixed times, jobs on them, and what a lost run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import SecretStr

from mqlayer.archive import list_snapshots
from mqlayer.archive.certify import load_certificate
from mqlayer.archive.scheduled_runs import CERTIFICATE, LOST, command_of, run_schedule, start_due
from mqlayer.archive.schedules import (
    SCHEDULED_JOBS,
    SCHEDULES_LIMIT,
    Schedule,
    ScheduledRun,
    create_schedule,
    drop_schedule,
    find_schedule,
    pause_schedule,
    resume_schedule,
    schedule_runs,
    schedules,
)
from mqlayer.cli.spark_requirements import check_spark
from mqlayer.doctor import CheckStatus, diagnose
from mqlayer.doctor.health import system_health
from mqlayer.errors import Conflict, InvalidInput, NotFound, SparkMissing
from mqlayer.exporter.samples import control_samples
from mqlayer.failpoints import ENVIRONMENT_VARIABLE
from mqlayer.postgres.rights import Right
from mqlayer.settings import Settings
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.lakes import archived_ids, ids
from tests.fixtures.missing_tools import import_or_leave_out, leave_out
from tests.fixtures.roles import role_dsn
from tests.fixtures.spark_cluster import descendants
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

DAY = 86_400
GOOD = {"job": "audit", "good": True, "verdict": "clean", "records": 3, "topics": [1]}
PROGRAM = """
import sys
from mqlayer.archive.scheduled_runs import run_schedule
from mqlayer.postgres.database import Database
from mqlayer.runtime import Runtime
from mqlayer.settings import Settings
says = [sys.executable, "-c", 'print(\\'{"job": "audit"}\\')']
with Database(sys.argv[1]) as database:
    run_schedule(Runtime(database, Settings()), "nightly", lease_s=0.5, command=lambda *_: says)
"""


RUNS: Final = """
import sys
from pathlib import Path
from mqlayer.archive.scheduled_runs import run_schedule
from mqlayer.postgres.database import Database
from mqlayer.runtime import Runtime
from mqlayer.settings import Settings
with Database(sys.argv[1]) as database:
    run_schedule(Runtime(database, Settings()), "nightly", directory=Path(sys.argv[2]))
"""


def program(text: str) -> Sequence[str]:
    return [sys.executable, "-c", text]


def says(facts: dict[str, Any], code: int = 0) -> Any:
    """A job's command that prints these facts."""
    return lambda *_: program(f"import sys; print('starts'); print({json.dumps(facts)!r}); sys.exit({code})")


@pytest.fixture
def nightly(archived: ArchivedTopics) -> ArchivedTopics:
    """A schedule of one job, of an archive of three records."""
    archived.put("a", "b", "a")
    create_schedule(runtime_of(archived.database), "nightly", every_s=DAY, jobs=["audit"], keep=2)
    return archived


def sql(archived: ArchivedTopics, text: str) -> None:
    with archived.database.connection() as connection:
        connection.execute(text)


def due(archived: ArchivedTopics) -> None:
    sql(archived, "UPDATE mqlayer.analytics_schedule SET next_at = now() - interval '2 days 1 hour'")


def test_a_run_makes_a_snapshot_and_notes_what_each_job_found(nightly: ArchivedTopics) -> None:
    runtime = runtime_of(nightly.database)
    done = run_schedule(runtime, "nightly", command=says(GOOD))
    assert done is not None
    assert (done.state, done.error, done.job) == ("good", None, None)
    assert done.results["audit"]["state"] == "good"
    assert done.results["audit"]["facts"] == {name: GOOD[name] for name in ("job", "good", "verdict", "records")}
    (snapshot,) = list_snapshots(nightly.database)
    assert (snapshot.name, snapshot.records) == (done.snapshot, 3)
    assert find_schedule(nightly.database, "nightly").last == done


def test_only_the_newest_snapshots_of_a_schedule_stay(nightly: ArchivedTopics) -> None:
    runtime = runtime_of(nightly.database)
    made = [run_schedule(runtime, "nightly", command=says(GOOD)) for _ in range(4)]
    kept = {one.name for one in list_snapshots(nightly.database)}
    assert kept == {one.snapshot for one in made[2:] if one is not None}
    assert [one.run_id for one in schedule_runs(nightly.database, "nightly")] == sorted(
        (one.run_id for one in made if one is not None), reverse=True
    )


@pytest.mark.parametrize(
    ("command", "state", "job"),
    [
        (says(GOOD | {"good": False}, 1), "faults", "faults"),
        (lambda *_: program("import sys; sys.exit('no Java: install it')"), "failed", "failed"),
        (lambda *_: program("import os; os.abort()"), "failed", "failed"),
        (says(GOOD, 1), "failed", "failed"),
    ],
    ids=["faults", "error", "crash", "unwritten"],
)
def test_a_job_that_finds_faults_and_one_that_fails_are_told_apart(
    nightly: ArchivedTopics, command: Any, state: str, job: str
) -> None:
    runtime = runtime_of(nightly.database)
    done = run_schedule(runtime, "nightly", command=command)
    assert done is not None
    assert (done.state, done.results["audit"]["state"]) == (state, job)
    problems = {one.alert.name for one in system_health(runtime).problems if one.item == "nightly"}
    assert problems == {"MqlayerScheduleFaults" if state == "faults" else "MqlayerScheduleFailed"}
    samples = control_samples(runtime)
    assert samples["mqlayer.schedule.faults"] == [(int(state == "faults"), {"schedule": "nightly"})]
    assert samples["mqlayer.schedule.failed"] == [(int(state == "failed"), {"schedule": "nightly"})]
    (found,) = [one for one in diagnose(Settings(dsn=SecretStr(nightly.dsn))) if one.check == "schedules"]
    assert found.verdict is (CheckStatus.BROKEN if state == "faults" else CheckStatus.WARNING)
    assert "audit" in found.seen


def test_a_failed_jobs_last_line_is_kept(nightly: ArchivedTopics) -> None:
    told = "can't reach postgresql://me:secret@host/db"
    done = run_schedule(
        runtime_of(nightly.database), "nightly", command=lambda *_: program(f"import sys; sys.exit({told!r})")
    )
    assert done is not None
    assert "can't reach" in done.results["audit"]["error"]
    assert "secret" not in done.results["audit"]["error"]
    (found,) = [one for one in diagnose(Settings(dsn=SecretStr(nightly.dsn))) if one.check == "schedules"]
    assert "can't reach" in found.seen


def test_a_due_schedule_runs_once_and_keeps_its_time_of_day(nightly: ArchivedTopics) -> None:
    runtime = runtime_of(nightly.database)
    due(nightly)
    began = find_schedule(nightly.database, "nightly").next_at
    assert run_schedule(runtime, "nightly", if_due=True, command=says(GOOD)) is not None
    assert run_schedule(runtime, "nightly", if_due=True, command=says(GOOD)) is None
    upcoming = find_schedule(nightly.database, "nightly").next_at
    assert upcoming > datetime.now(UTC)
    assert (upcoming - began) % timedelta(seconds=DAY) == timedelta()
    pause_schedule(runtime, "nightly")
    due(nightly)
    assert run_schedule(runtime, "nightly", if_due=True, command=says(GOOD)) is None, "it is paused"
    resume_schedule(runtime, "nightly")
    assert run_schedule(runtime, "nightly", if_due=True, command=says(GOOD)) is not None


def test_one_run_goes_on_at_a_time(nightly: ArchivedTopics) -> None:
    runtime = runtime_of(nightly.database)
    create_schedule(runtime, "weekly", every_s=7 * DAY)
    inner: list[Any] = []

    def command(*_: Any) -> Sequence[str]:
        inner.append(run_schedule(runtime, "weekly"))
        inner.append(start_due(runtime))
        return says(GOOD)()  # type: ignore[no-any-return]

    done = run_schedule(runtime, "nightly", command=command)
    assert done is not None
    assert inner == [None, None]
    assert run_schedule(runtime, "weekly") is not None


PLACES = ("after_claim", "before_snapshot", "after_snapshot", "before_job", "after_job")


@pytest.mark.parametrize("place", [f"schedule.{place}" for place in PLACES])
def test_a_run_killed_anywhere_is_ended_and_its_schedule_runs_again(nightly: ArchivedTopics, place: str) -> None:
    runtime = runtime_of(nightly.database)
    killed = ask_python("-c", PROGRAM, nightly.dsn, env=os.environ | armed(f"{place}=kill@1"))
    assert killed.returncode == -9, "the place was not reached"
    before = find_schedule(nightly.database, "nightly").running
    assert before is not None

    def again() -> Any:
        return run_schedule(runtime, "nightly", command=says(GOOD))

    done = wait_until(again, timeout_s=20, what="the lost run's lease ends")
    assert done.state == "good"
    lost = schedule_runs(nightly.database, "nightly")[1]
    assert (lost.run_id, lost.state, lost.error) == (before.run_id, "failed", LOST)
    made = {one.name for one in list_snapshots(nightly.database)}
    assert made == {one.snapshot for one in schedule_runs(nightly.database, "nightly")} & made
    for _ in range(2):
        again()
    assert len(list_snapshots(nightly.database)) == 2, "a lost run's snapshot goes like others"


def test_a_lost_run_is_due_again_soon(nightly: ArchivedTopics) -> None:
    sql(
        nightly,
        "INSERT INTO mqlayer.analytics_run (schedule, worker, lease_until) VALUES ('nightly', 'gone 1', now() - "
        "interval '1 s')",
    )
    sql(nightly, "UPDATE mqlayer.analytics_schedule SET next_at = now() + interval '1 day'")
    assert start_due(runtime_of(nightly.database)) is None
    one = find_schedule(nightly.database, "nightly")
    assert one.running is None
    assert one.last is not None
    assert one.last.error == LOST
    assert one.next_at < datetime.now(UTC) + timedelta(minutes=11)


def test_a_run_that_lost_its_lease_notes_nothing_more(nightly: ArchivedTopics) -> None:
    runtime = runtime_of(nightly.database)

    def command(*_: Any) -> Sequence[str]:
        sql(
            nightly,
            "UPDATE mqlayer.analytics_run SET state = 'failed', error = 'taken', ended_at = now() "
            "WHERE state = 'running'",
        )
        return program("import time; time.sleep(60)")

    with pytest.raises(Conflict, match="lost its lease"):
        run_schedule(runtime, "nightly", lease_s=0.6, command=command)
    (run,) = schedule_runs(nightly.database, "nightly")
    assert (run.state, run.error, run.results) == ("failed", "taken", {})


def test_without_anything_archived_the_run_fails_and_says_why(archived: ArchivedTopics) -> None:
    runtime = runtime_of(archived.database)
    archived.topic("mails", archived=False)
    create_schedule(runtime, "nightly", every_s=DAY, topics=["mails"])
    done = run_schedule(runtime, "nightly")
    assert done is not None
    assert done.state == "failed"
    assert "is not archived" in str(done.error)


def test_wrong_schedules_are_refused_with_what_to_do(nightly: ArchivedTopics) -> None:
    runtime = runtime_of(nightly.database)

    def refused(kind: type[Exception], match: str, name: str = "other", **given: Any) -> None:
        with pytest.raises(kind, match=match):
            create_schedule(runtime, name, **{"every_s": DAY} | given)

    refused(Conflict, "exists", "nightly")
    refused(InvalidInput, "ten|10 minutes", every_s=599)
    refused(InvalidInput, "366 days", every_s=367 * DAY)
    refused(InvalidInput, "no scheduled job order: choose from audit", jobs=["order"])
    refused(InvalidInput, "keeps 1 to 100", keep=0)
    refused(InvalidInput, "no time zone", first_at=datetime(2026, 1, 1))  # noqa: DTZ001 - the case
    refused(InvalidInput, "at most 40", "a" * 41)
    refused(InvalidInput, "--export-to PATH", jobs=["export"])
    refused(InvalidInput, "--export-to PATH", jobs=["audit"], export_to="lake")
    refused(InvalidInput, "has no credentials", jobs=["export"], export_to="s3://me:secret@bucket/lake")
    refused(InvalidInput, "at most 1024 bytes", jobs=["export"], export_to="/" + "a" * 1024)
    with pytest.raises(NotFound):
        drop_schedule(runtime, "other")
    with pytest.raises(NotFound):
        run_schedule(runtime, "other")
    for number in range(SCHEDULES_LIMIT - 1):
        create_schedule(runtime, f"s{number}", every_s=DAY)
    refused(InvalidInput, "drop one")
    assert len(schedules(nightly.database)) == SCHEDULES_LIMIT


def test_every_job_has_a_command_and_a_page(tmp_path: Path, nightly: ArchivedTopics) -> None:
    one = find_schedule(nightly.database, "nightly")
    for job in set(SCHEDULED_JOBS) - {"certify", "export"}:
        words = command_of(job, one, "cut", tmp_path)
        assert words[1:6] == ["-m", "mqlayer.cli.scheduled_job", "analytics", job, "--snapshot"]
        assert str(tmp_path / "nightly" / "cut" / f"{job}.html") in words
    words = command_of("export", replace(one, topics=("orders", "mails"), export_to="/lake"), "", None)
    assert words[3:] == ["archive", "export", "--to", "/lake", "--topic", "orders", "--topic", "mails", "--json"]
    for number in (9, 10):
        (tmp_path / "nightly" / f"nightly-20261127-{number}").mkdir(parents=True)
        (tmp_path / "nightly" / f"nightly-20261127-{number}" / CERTIFICATE).touch()
    words = command_of("certify", one, "nightly-20261128-11", tmp_path)
    made, newest = (str(tmp_path / "nightly" / name / CERTIFICATE)
                    for name in ("nightly-20261128-11", "nightly-20261127-10"))  # fmt: skip
    assert words[4:] == ["certify", "--snapshot", "nightly-20261128-11", "--json", "--out", made, "--continues", newest]


def test_a_schedule_is_read_back_as_it_was_made(archived: ArchivedTopics) -> None:
    first = datetime(2030, 1, 1, 2, tzinfo=UTC)
    made = create_schedule(
        runtime_of(archived.database), "nightly", every_s=DAY, jobs=["export", "skew", "audit"], topics=["orders"],
        first_at=first, export_to="s3://bucket/lake/",
    )  # fmt: skip
    assert isinstance(made, Schedule)
    assert (made.jobs, made.topics, made.next_at, made.keep) == (("audit", "skew", "export"), ("orders",), first, 3)
    assert (made.export_to, made.paused_at, made.last, made.running) == ("s3://bucket/lake", None, None, None)
    assert schedules(archived.database) == [made]


def test_a_schedule_of_exports_alone_makes_no_snapshot(archived: ArchivedTopics) -> None:
    """A snapshot would hold all days back from retention."""
    runtime = runtime_of(archived.database)
    archived.put("a")
    create_schedule(runtime, "lake", every_s=DAY, jobs=["export"], export_to="/lake")
    done = run_schedule(runtime, "lake", command=says({"job": "export", "good": True, "records": 1}))
    assert done is not None
    assert (done.state, done.snapshot, done.results["export"]["facts"]["records"]) == ("good", None, 1)
    assert list_snapshots(archived.database) == []


def test_a_certificate_without_a_place_fails_and_says_which_setting(archived: ArchivedTopics) -> None:
    archived.put("a")
    create_schedule(runtime_of(archived.database), "nightly", every_s=DAY, jobs=["certify"])
    done = run_schedule(runtime_of(archived.database), "nightly")
    assert done is not None
    assert done.state == "failed"
    assert "MQLAYER_ANALYTICS_DIR" in done.results["certify"]["error"]


@pytest.fixture
def certified(archived: ArchivedTopics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ArchivedTopics:
    """A schedule of a certificate and an export, whose jobs are real."""
    import_or_leave_out("deltalake")
    import_or_leave_out("pyarrow")
    archived.put("a", "b", "a", outcomes=True)
    create_schedule(
        runtime_of(archived.database), "nightly", every_s=DAY, jobs=["certify", "export"],
        export_to=str(tmp_path / "lake"),
    )  # fmt: skip
    monkeypatch.setenv("MQLAYER_DSN", archived.dsn)
    monkeypatch.setenv("MQLAYER_ANALYTICS_DIR", str(tmp_path / "found"))
    return archived


def last_run(archived: ArchivedTopics) -> ScheduledRun:
    last = find_schedule(archived.database, "nightly").last
    assert last is not None
    return last


def test_certificates_continue_each_other_and_exports_go_on(
    certified: ArchivedTopics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the worker starts them; then a record is altered, and what the export has."""
    import_or_leave_out("cryptography")
    key = tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
    monkeypatch.setenv("MQLAYER_CERTIFICATE_KEY", str(key))
    words = ("mqlayer", "analytics", "schedule", "run", "nightly", "--if-due")
    first = ask_python(*words, env=os.environ)
    assert first.returncode == 0, first
    before = last_run(certified)
    made = tmp_path / "found" / "nightly" / str(before.snapshot) / CERTIFICATE
    facts = before.results["certify"]["facts"]
    assert (facts["file"], facts["records"], facts["signed"], facts["audit"]) == (str(made), 3, True, "clean")
    assert load_certificate(made).signature is not None
    assert before.results["export"]["facts"]["records"] == 3
    assert ids(tmp_path / "lake") == archived_ids(certified)
    certified.put("c")
    sql(certified, "UPDATE mqlayer_archive.record SET body = 'forged' WHERE seq = 1 AND key = 'b'")
    sql(certified, "UPDATE mqlayer_archive.lake_topic SET record_digest = record_digest + 1")
    due(certified)
    assert ask_python(*words, env=os.environ).returncode == 1
    after = last_run(certified)
    assert after.state == "faults"
    assert after.results["certify"]["state"] == after.results["export"]["state"] == "faults"
    assert "does not continue that certificate" in after.results["certify"]["error"]
    assert "were verified or are archived" in after.results["export"]["error"]
    assert [one.name for one in (tmp_path / "found" / "nightly").iterdir()] == [before.snapshot], "nothing is certified"


@pytest.mark.full
def test_jobs_killed_in_the_middle_are_whole_after_the_next_run(
    certified: ArchivedTopics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime, found = runtime_of(certified.database), tmp_path / "found"
    for name, value in armed("certify.before_rename=kill@1,lake.after_records=kill@1").items():
        monkeypatch.setenv(name, value)
    done = run_schedule(runtime, "nightly", directory=found)
    assert done is not None
    assert {job: one["state"] for job, one in done.results.items()} == {"certify": "failed", "export": "failed"}
    assert list(found.rglob(CERTIFICATE)) == []
    monkeypatch.delenv(ENVIRONMENT_VARIABLE)
    certified.put("c")
    done = run_schedule(runtime, "nightly", directory=found)
    assert done is not None
    assert done.state == "good", done.results
    assert load_certificate(found / "nightly" / str(done.snapshot) / CERTIFICATE).records == 4
    assert ids(tmp_path / "lake") == archived_ids(certified)


def test_a_job_ends_with_its_killed_run(
    certified: ArchivedTopics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stands in the middle of its work, and would go on for a minute."""
    for name, value in armed(f"certify.before_rename=wait:{tmp_path / 'never'}").items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([sys.executable, "-c", RUNS, certified.dsn, tmp_path]) as run:
        (unfinished,) = wait_until(lambda: list(tmp_path.rglob("*.unfinished")), timeout_s=60, what="it writes")
        job = int(unfinished.name.split(".")[-2])
        assert not is_gone(job)
        run.kill()
    wait_until(lambda: is_gone(job), timeout_s=20, what="the job ends")


@pytest.mark.full
def test_java_ends_with_a_killed_run(nightly: ArchivedTopics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        check_spark()
    except SparkMissing as missing:
        leave_out(str(missing))
    monkeypatch.setenv("MQLAYER_DSN", nightly.dsn)
    with subprocess.Popen([sys.executable, "-c", RUNS, nightly.dsn, tmp_path]) as run:

        def java() -> list[int]:
            return [pid for pid in descendants(run.pid) if is_java(pid)]

        wait_until(java, timeout_s=120, what="Java")
        all_ = descendants(run.pid)
        run.kill()
    wait_until(lambda: all(map(is_gone, all_)), timeout_s=60, what="job and Java end")


def test_all_that_a_job_started_ends_with_standard_input() -> None:
    text = (
        "import subprocess, sys; from mqlayer.cli.scheduled_job import watch_starter; watch_starter(); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid, flush=True); child.wait()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(program(text), stdin=pipe, stdout=pipe, text=True, process_group=0) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        child = int(job.stdout.readline())
        job.stdin.close()
        assert job.wait(20) == -signal.SIGTERM
    wait_until(lambda: is_gone(child), timeout_s=20, what="the child ends")


def is_java(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "java"
    except OSError:
        return False


def is_gone(pid: int) -> bool:
    """Whether a process ended, though no other may have asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.full
def test_effects_and_journeys_run_with_the_workers_right(
    archived: ArchivedTopics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        check_spark()
    except SparkMissing as missing:
        leave_out(str(missing))
    archived.put("a", "b", "a", outcomes=True)
    create_schedule(runtime_of(archived.database), "nightly", every_s=DAY, jobs=["effects", "journeys"])
    dsn = role_dsn(archived.dsn, Right.WORK)
    for name in ("MQLAYER_DSN", "MQLAYER_APP_DSN"):
        monkeypatch.setenv(name, dsn)
    monkeypatch.setenv("MQLAYER_ANALYTICS_DIR", str(tmp_path))
    words = ("mqlayer", "analytics", "schedule", "run", "nightly", "--if-due")
    said = ask_python(*words, env=os.environ, timeout=240.0)
    done = last_run(archived)
    assert (said.returncode, done.state) == (0, "good"), done.results
    assert done.results["effects"]["facts"]["verdict"] == "clean"
    assert {page.name for page in tmp_path.rglob("*.html")} == {"effects.html", "journeys.html"}
