"""Micro-batches published to a topic: each row once, in the order of its key, whatever is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from mqlayer.domain.routing import lp_of
from mqlayer.errors import Conflict, InvalidInput
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.spark import QUICK_QUERIES, SETTINGS
from tests.fixtures.wait import wait_until
from tests.proof.world import World

import_or_leave_out("pyspark")

PROGRAM = Path(__file__).parents[1] / "fixtures" / "sink_program.py"
KEYS = [f"key-{number}" for number in range(40)]
# A session begins within seconds, or within minutes of a machine that others keep busy.
RUN_S = 300.0
ROWS = "key string, n int, body string, headers map<string,string>, tags array<string>"


def rows(batch: int, *, each: int = 3) -> list[tuple[Any, ...]]:
    """Return a micro-batch: some rows of each key, in no order."""
    numbers = range(batch * each, (batch + 1) * each)
    made = [(key, n, f"{key}/{n}", {"n": str(n)}, ["vip"]) for n in numbers for key in KEYS]
    return sorted(made, key=lambda row: hash((row[1] * 7919) % 31))


def published(dsn: str) -> dict[str, list[str]]:
    """Return what the outbox has of each key, in the order of its LP."""
    found: dict[str, list[str]] = {}
    with psycopg.connect(dsn) as connection:
        for key, body in connection.execute("SELECT key, body FROM mqlayer_app.outbox ORDER BY lp, seq"):
            found.setdefault(key, []).append(body.decode())
    return found


def expected(batches: int, *, each: int = 3) -> dict[str, list[str]]:
    return {key: [f"{key}/{n}" for n in range(batches * each)] for key in KEYS}


def test_a_repeated_batch_is_dropped_whole_or_goes_on_where_it_broke_off(spark: Any, world: World) -> None:
    from mqlayer.spark import publish_batches

    publish = publish_batches("orders", order_by=["n"], name="test", dsn=world.dsn)
    assert "postgres" not in repr(publish)
    publish(spark.createDataFrame(rows(0), ROWS), 0)
    assert published(world.dsn) == expected(1)
    with psycopg.connect(world.dsn) as connection:
        kept = connection.execute("SELECT headers::jsonb FROM mqlayer_app.outbox WHERE key = 'key-7' ORDER BY seq")
        assert [headers["n"] for (headers,) in kept] == ["0", "1", "2"]
    # As after a kill between this and Spark's own commit: the whole is there.
    publish(spark.createDataFrame(rows(0), ROWS), 0)
    assert published(world.dsn) == expected(1)
    # A part fails: others are committed, and the repetition publishes the rest.
    bad = [(*row[:2], None, *row[3:]) if row[0] == "key-7" else row for row in rows(1)]
    with pytest.raises(Exception, match="a row without a body"):
        publish(spark.createDataFrame(bad, ROWS), 1)
    broken = published(world.dsn)
    assert broken["key-7"] == expected(1)["key-7"]
    publish(spark.createDataFrame(rows(1), ROWS), 1)
    assert published(world.dsn) == expected(2)
    with pytest.raises(Conflict, match="published micro-batch 1, and this is 0"):
        publish(spark.createDataFrame(rows(0), ROWS), 0)


@pytest.mark.full
def test_what_can_t_be_published_is_refused(spark: Any, world: World) -> None:
    from mqlayer.spark import publish_batches

    frame = spark.createDataFrame(rows(0), ROWS)
    with pytest.raises(InvalidInput, match="a name="):
        publish_batches("orders", order_by=["n"], dsn=world.dsn)(frame, 0)
    publish = publish_batches("orders", order_by=["n"], name="test", dsn=world.dsn)
    with pytest.raises(InvalidInput, match="no column body"):
        publish(frame.drop("body"), 0)
    with pytest.raises(InvalidInput, match="the column body is int"):
        publish(frame.withColumn("body", frame["n"]), 0)
    with pytest.raises(Exception, match="a row without a key"):
        publish(spark.createDataFrame([(None, 1, "x", None, None)], ROWS), 0)
    with pytest.raises(InvalidInput, match="order_by"):
        publish_batches("orders", order_by=[], dsn=world.dsn)
    with pytest.raises(InvalidInput, match="no name of a table"):
        publish_batches("orders", order_by=["n"], dsn=world.dsn, positions="x; DROP TABLE y")
    with pytest.raises(Exception, match="unknown topic"):
        publish_batches("payments", order_by=["n"], name="test", dsn=world.dsn)(frame, 0)
    assert published(world.dsn) == {}


class Stream:
    """Files of rows, each a micro-batch, that a program publishes, or the session that tests share."""

    def __init__(self, folder: Path, dsn: str, python: Path, spark: Any) -> None:
        self.dsn, self._folder, self._python, self._spark = dsn, folder, python, spark
        (folder / "source").mkdir()
        self.batches = 0

    def add(self) -> None:
        """Add a file, the next batch."""
        path = self._folder / "source" / f"{self.batches:03}.json"
        lines = [json.dumps({"key": key, "n": n, "body": body}) for key, n, body, *_ in rows(self.batches)]
        path.write_text("\n".join(lines))
        os.utime(path, (1_700_000_000 + self.batches,) * 2)
        self.batches += 1

    def publish(self) -> None:
        """Publish what is new in the session that is there: another one takes seconds to start."""
        from tests.fixtures.sink_program import publish_files

        publish_files(self._spark, *self._places, dsn=self.dsn)

    def start(self, failpoints: str) -> subprocess.Popen[bytes]:
        """Start the program: failpoints kill it."""
        settings = {key.replace(".", "__"): value for key, value in (SETTINGS | QUICK_QUERIES).items()}
        settings |= {
            "spark__pyspark__python": str(self._python),
            "spark__python__worker__faulthandler__enabled": "false",
        }
        environment = os.environ | {
            "MQLAYER_DSN": self.dsn, "MQLAYER_ALLOW_FAILPOINTS": "1", "MQLAYER_FAILPOINTS": failpoints,
            "PYSPARK_PYTHON": str(self._python),
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, PROGRAM, *self._places, json.dumps(settings)], env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def _places(self) -> tuple[str, str]:
        return str(self._folder / "source"), str(self._folder / "checkpoint")

    def run(self, failpoints: str) -> int:
        """Run it to its end; what of it outlives its driver ends too."""
        program = self.start(failpoints)
        try:
            return program.wait(RUN_S)
        finally:
            end(program)

    def positions(self) -> Counter[int]:
        """Return how many parts are at which batch."""
        with psycopg.connect(self.dsn) as connection:
            if connection.execute("SELECT to_regclass('public.mqlayer_stream_position')").fetchone() == (None,):
                return Counter()
            return Counter(
                batch
                for (batch,) in connection.execute("SELECT batch FROM public.mqlayer_stream_position WHERE part >= 0")
            )


def end(program: subprocess.Popen[bytes]) -> None:
    """Kill the driver, its Java process and all workers at once, as the loss of a machine does."""
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    program.wait(10)


@pytest.fixture(scope="session")
def streaming(spark: Any) -> Any:
    """The session, which has begun to listen for what streams ask of this process: those threads are no test's."""
    from pyspark import java_gateway

    listen: Any = java_gateway.ensure_callback_server_started
    listen(spark.sparkContext._gateway)
    return spark


@pytest.fixture
def stream(world: World, spark_python: Path, streaming: Any, tmp_path: Path) -> Stream:
    """The first batch is published: failpoints count in a process, and Spark may take another one for the next."""
    made = Stream(tmp_path, world.dsn, spark_python, streaming)
    made.add()
    made.publish()
    made.add()
    return made


PARTS = len({lp_of(key.encode()) // 32 for key in KEYS})


@pytest.mark.full
@pytest.mark.timeout(4 * RUN_S)
@pytest.mark.parametrize(
    "failpoints",
    [
        "spark_sink.before_commit=kill@5",
        "spark_sink.after_commit=kill@5",
        "spark_sink.before_mark=kill@1",
        "spark_sink.after_mark=kill@1",
    ],
)
def test_a_kill_costs_no_row_and_repeats_none(stream: Stream, failpoints: str) -> None:
    """A worker in the middle of the second batch; the driver behind its last part, before and after it notes that."""
    assert stream.run(failpoints) != 0
    assert sum(map(len, published(stream.dsn).values())) < len(KEYS) * 6 or "_mark" in failpoints
    stream.add()
    stream.publish()
    assert published(stream.dsn) == expected(3)


@pytest.mark.full
@pytest.mark.timeout(4 * RUN_S)
def test_a_machine_lost_in_the_middle_of_a_batch_costs_no_row(stream: Stream, tmp_path: Path) -> None:
    program = stream.start(f"spark_sink.before_commit=wait:{tmp_path / 'never'}@8")
    try:
        wait_until(lambda: stream.positions()[1] == 7, timeout_s=RUN_S, what="seven parts of the second batch")
    finally:
        end(program)
    assert 0 < stream.positions()[1] < PARTS
    stream.publish()
    assert published(stream.dsn) == expected(2)
    # Nothing is left to do.
    stream.publish()
    assert published(stream.dsn) == expected(2)


@pytest.mark.full
@pytest.mark.timeout(4 * RUN_S)
def test_the_page_s_example_publishes_what_it_reads(
    world: World, spark_python: Path, streaming: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second run, in the session that is there, publishes what came since, and nothing again."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "publish-from-spark.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    words = " ".join(f"--conf {name}={value}" for name, value in (SETTINGS | QUICK_QUERIES).items() if "=" not in value)
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", f"--master local[1] {words} pyspark-shell")
    monkeypatch.setenv("MQLAYER_DSN", world.dsn)
    monkeypatch.setenv("PYSPARK_PYTHON", str(spark_python))
    world.add_topic("sizes", partitions=1)
    world.rows(
        "WITH it AS (UPDATE mqlayer.topic SET archived = true WHERE name = 'orders' RETURNING topic_id) "
        "INSERT INTO mqlayer_archive.topic (topic_id) SELECT topic_id FROM it RETURNING 1"
    )
    with psycopg.connect(world.dsn, autocommit=True) as connection:
        archive = ArchivedTopics(world.dsn, connection, world.database)
        archive.put("a", "b", None, "a", body=b"four")

        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2_000:]
        first = published(world.dsn)
        assert {key: len(bodies) for key, bodies in first.items()} == {"a": 2, "b": 1}
        archive.put("a", body=b"later")
        # Spark's files are where its process began.
        exec(block.replace("checkpoints/sizes", str(tmp_path / "checkpoints" / "sizes")), {})
        found = published(world.dsn)
        assert [json.loads(body)["bytes"] for body in found["a"]] == [4, 4, 5]
