"""`mqlayer analytics …` on a snapshot as it is typed; what it writes, and what `route split` makes of its report."""

from __future__ import annotations

import json
import os
import re
import runpy
import stat
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest

from mqlayer.archive import create_snapshot
from mqlayer.domain.routing import lp_of
from mqlayer.postgres.database import Database
from tests.fixtures.archived_topics import BEGAN
from tests.fixtures.commands import Commands
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

ROOT: Final = Path(__file__).parents[2]
EVIL: Final = "<script>alert('k')</script>"
KEYS: Final = [EVIL, *(f"key-{number}" for number in range(40))]
SPARK: Final = ("--conf", "spark.sql.shuffle.partitions=2")
TABLES: Final = {
    "audit": {"chains"},
    "latency": {"groups", "minutes", "published"},
    "skew": {"lps", "keys", "partitions"},
    "failures": {"by_outcome", "errors", "members", "attempts"},
    "fairness": {"members", "groups"},
    "journeys": {"stages", "keys", "messages"},
}

pytestmark = [pytest.mark.timeout(240), pytest.mark.world(by_commands=True)]


@pytest.fixture
def analysed(world: World, spark: Any) -> World:
    """Its topic is in the archive, most of the load in one key, with the snapshot `nightly` of it."""
    with Database(world.dsn) as database:
        archive(database)
        create_snapshot(runtime_of(database), "nightly")
    return world


def archive(database: Database) -> None:
    """Write into the archive what an archiver would have."""
    with database.connection() as connection:
        connection.execute("UPDATE mqlayer.topic SET archived = true")
        for table in ("record", "outcome"):
            connection.execute(f"CREATE TABLE mqlayer_archive.{table}_all PARTITION OF mqlayer_archive.{table} DEFAULT")
        connection.execute("INSERT INTO mqlayer_archive.topic VALUES (1, 1)")
        connection.execute(
            "INSERT INTO mqlayer.consumer_group (group_id, topic_id, name, start, backoff_s) OVERRIDING SYSTEM VALUE "
            "VALUES (1, 1, 'billing', 'earliest', '{1}')"
        )
        marks: Counter[int] = Counter()
        offsets = {1: 0, 2: 0}
        for key in [*KEYS, *["hot"] * 60]:
            lp = lp_of(key.encode())
            marks[lp] += 1
            partition = 1 if lp < 512 else 2
            offsets[partition] += 1
            connection.execute(
                "INSERT INTO mqlayer_archive.record "
                "VALUES (1, 1, 1, %s, %s, 1, %s, %s, %s, %s, %s, NULL, NULL, 'secret body')",
                (partition, offsets[partition], lp, marks[lp], BEGAN, BEGAN, key.encode()),
            )
        for found, seq in marks.items():
            connection.execute("INSERT INTO mqlayer_archive.mark VALUES (1, 1, %s, 1, %s)", (found, seq))
        for partition, last in offsets.items():
            for first, until, word, reason in ((1, last - 1, "handled", None), (last, last, "exhausted", EVIL)):
                connection.execute(
                    "INSERT INTO mqlayer_archive.outcome "
                    "VALUES (1, 1, 1, %s, %s, %s, %s, 2, %s, %s, 'm1', %s, %s, 1, 1)",
                    (partition, first, until, word, BEGAN, BEGAN, reason, BEGAN),
                )


class Page(HTMLParser):
    """What is in a page: its elements, what they link to, and their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.shown = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in {"href", "src", "srcset", "action"}]

    def handle_data(self, data: str) -> None:
        self.shown += data


@pytest.mark.full
@pytest.mark.usefixtures("queries_as_in_production")
def test_all_jobs_write_parquet_and_one_page_that_fetches_nothing(
    analysed: World, run: Commands, spark: Any, tmp_path: Path
) -> None:
    page = tmp_path / "reports" / "nightly.html"
    lines = run.lines("analytics", "all", "--snapshot", "nightly", "--out", str(tmp_path), "--html", str(page), *SPARK)
    facts = {line["job"]: line for line in lines}
    assert list(facts) == ["audit", "latency", "skew", "failures", "fairness", "journeys"]
    assert {line["snapshot"] for line in lines} == {"nightly"}
    assert (facts["audit"]["verdict"], facts["audit"]["records"], facts["audit"]["gaps"]) == ("clean", 101, 0)
    assert facts["latency"]["groups"][0]["messages"] == 99
    assert facts["skew"]["hottest_keys"][0]["key"] == "hot"
    assert [(row["outcome"], row["messages"]) for row in facts["failures"]["by_outcome"]] == [
        ("handled", 99),
        ("exhausted", 2),
    ]
    assert [row["final"] for row in facts["failures"]["by_outcome"]] == [99, 2]
    assert facts["fairness"]["groups"][0]["gini_messages"] == 0
    for job, tables in TABLES.items():
        assert {path.name for path in (tmp_path / job).iterdir()} == tables
    assert spark.read.parquet(str(tmp_path / "skew" / "lps")).agg({"records": "sum"}).first()[0] == 101
    text = page.read_text("utf-8")
    seen = Page(text)
    assert "script" not in seen.tags
    assert all(link.startswith("#") for link in seen.links)
    assert not re.search(r"url\(|@import|https?://", text)
    assert EVIL in seen.shown
    assert "secret body" not in text
    assert "Clean: every record is in order" in seen.shown


@pytest.mark.full
def test_each_job_is_a_program(
    analysed: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As spark-submit runs it: with the session that is there, and an exit code."""

    def code(job: str, *words: str) -> object:
        monkeypatch.setattr("sys.argv", [job, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "spark" / "jobs" / f"{job}.py"), run_name="__main__")
        return ended.value.code

    for job in TABLES:
        page = tmp_path / f"{job}.html"
        assert code(job, "--snapshot", "nightly", "--topic", "orders", "--html", str(page)) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["job"], said["good"]) == (job, True)
        assert f'<section id="{job}"' in page.read_text()
        assert code(job, "--snapshot", "weekly") == 1
        assert capsys.readouterr().err.startswith("mqlayer: unknown snapshot 'weekly'")


@pytest.mark.full
def test_an_audit_that_is_not_clean_says_so_and_exits_with_1(analysed: World, run: Commands) -> None:
    analysed.rows("UPDATE mqlayer_archive.record SET key = 'other' WHERE key = 'key-7' RETURNING 1")
    result = run("analytics", "audit", "--snapshot", "nightly", *SPARK)
    assert result.exit_code == 1
    assert "order audit: not clean" in result.stdout
    assert f"its key's LP is {lp_of(b'other')}" in result.stdout


def test_a_topic_is_split_where_the_report_says(analysed: World, run: Commands, tmp_path: Path) -> None:
    """From the report to routes: one plan for each partition, each from the version that the one before makes."""
    file = tmp_path / "split.json"
    run.text(
        "analytics", "skew", "--snapshot", "nightly", "--topic", "orders", "--partitions", "5",
        "--split-report", str(file), *SPARK,
    )  # fmt: skip
    report = json.loads(file.read_text())
    points = {one["partition"]: one["at"] for one in report["partitions"]}
    assert sum(len(at) for at in points.values()) == 3
    loads = [load for one in report["partitions"] for load in one["loads"]]
    assert sum(loads) == 101
    assert max(loads) == 60, "one key, one LP: as light as it gets"
    words = ("route", "split", "orders", "--from-report", str(file))
    planned = run.text(*words)
    assert planned.splitlines()[-1] == "nothing was changed: --yes does this"
    splits = [partition for partition, at in points.items() if at]
    assert [int(n) for n in re.findall(r"ends partition (\d+)", planned)] == splits
    said = run.text(*words, "--yes")
    assert said.splitlines()[-1] == f"route version {1 + len(splits)} of topic orders is in force"
    bounds = [row["lp_from"] for row in run.lines("route", "show", "orders")]
    assert bounds == sorted([0, 512, *(point for at in points.values() for point in at)])
    again = run.failure(*words)
    assert f"topic 'orders' is at route version {1 + len(splits)}, the report is of 1" in again
    assert "mqlayer analytics skew --snapshot NAME --topic orders --partitions 5" in again


def test_one_partition_of_a_report_can_be_split(analysed: World, run: Commands, tmp_path: Path) -> None:
    file = report_file(tmp_path, {1: [100, 200], 2: []})
    assert "makes a partition: LPs [100, 200)" in run.text("route", "split", "orders", "1", "--from-report", str(file))
    assert "does not split partition 2, but 1" in run.failure(
        "route", "split", "orders", "2", "--from-report", str(file)
    )


def report_file(directory: Path, at: dict[int, list[int]], **facts: Any) -> Path:
    """Write a report by hand."""
    partitions = [
        {"partition": number, "lp_from": 0, "lp_to": 512, "records": 1, "at": points, "loads": [1]}
        for number, points in at.items()
    ]
    report = {"kind": "mqlayer split report 1", "snapshot": "s", "topic": "orders", "version": 1, "wanted": 4}
    file = directory / "by-hand.json"
    file.write_text(json.dumps(report | {"partitions": partitions} | facts))
    return file


@pytest.mark.parametrize(
    ("at", "facts", "said"),
    [
        ({1: [100]}, {"topic": "payments"}, "the report is of topic 'payments', not of 'orders'"),
        ({1: [100]}, {"version": 3}, "is at route version 1, the report is of 3"),
        ({1: []}, {}, "the report splits nothing"),
        ({1: [100]}, {"kind": "something else"}, "is a 'something else'"),
        ({1: [100]}, {"wanted": "many"}, "is no split report"),
        ({1: [700]}, {}, "a part would be empty"),
    ],
)
@pytest.mark.usefixtures("world")
def test_reports_that_do_not_fit_are_one_line(run: Commands, tmp_path: Path, at: Any, facts: Any, said: str) -> None:
    file = report_file(tmp_path, at, **facts)
    assert said in run.failure("route", "split", "orders", "--from-report", str(file), "--yes")
    assert len(run.lines("route", "show", "orders")) == 2


def test_what_does_not_go_with_a_report_is_refused(run: Commands, tmp_path: Path) -> None:
    file = str(report_file(tmp_path, {1: [100]}))
    assert "choose" in run.failure("route", "split", "orders", "--from-report", file, "--at", "5")
    assert "can't read the split report" in run.failure("route", "split", "orders", "--from-report", file + "x")
    assert "but the report is of route version 1" in run.failure(
        "route", "split", "orders", "--from-report", file, "--if-version", "2"
    )
    assert "name the partition to split" in run.failure("route", "split", "orders")


@pytest.mark.full
def test_what_analytics_can_not_do_is_one_line(analysed: World, run: Commands, tmp_path: Path) -> None:
    def failure(*words: str) -> str:
        return run.failure("analytics", *words, *SPARK)

    assert "unknown snapshot 'weekly'" in failure("audit", "--snapshot", "weekly")
    assert "has no topic payments; it holds orders" in failure("audit", "--snapshot", "nightly", "--topic", "payments")
    assert "--conf takes a setting of Spark's" in failure("audit", "--snapshot", "nightly", "--conf", "memory=1g")
    assert "a split only adds" in failure("skew", "--snapshot", "nightly", "--partitions", "1")


def test_without_java_it_says_what_to_install(
    analysed: World, run: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("analytics", "audit", "--snapshot", "nightly")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "JAVA_HOME has no bin/java: install Java 17 or newer" in run.failure(*words)
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    assert f"{java} is Java 11: install Java 17 or newer" in run.failure(*words)
    monkeypatch.setenv("JAVA_HOME", "")
    monkeypatch.setenv("PATH", os.devnull)
    assert "there is no Java: install Java 17 or newer" in run.failure(*words)
    monkeypatch.setattr("mqlayer.cli.spark_requirements.find_spec", lambda _: None)
    assert "pip install 'mqlayer[spark]'" in run.failure(*words)
