"""The jobs on outcomes that real members wrote, held against what the handlers themselves noted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.archive import archive_pass, create_snapshot
from mqlayer.errors import Reject
from mqlayer.redelivery import DeadFilter, new_worker, release_parked, start_redrive, work_on
from mqlayer.topics import set_archived
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

import_or_leave_out("pyspark")

FLAKY, POISON, DEADLY = b"flaky", b"poison", b"deadly"
LIMIT = 3
SEEN = (("failures", "members"), ("failures", "attempts"), ("fairness", "members"), ("latency", "groups"))


class Fault(Exception):
    """What a handler fails with."""


class Members:
    """Two members of a group, what each was given, and when each message was handled."""

    def __init__(
        self, stage: Stage, group: str, *, policy: Any, fails: dict[bytes, int], gate: threading.Event
    ) -> None:
        self.group, self._fails, self._gate = group, fails, gate
        self.begun: Counter[bytes] = Counter()
        self.handled_at: dict[bytes, float] = {}
        self.recorders = {}
        for _ in range(2):
            recorder = Recorder(self._act)
            app = stage.consume(recorder, group=group, policy=policy, attempt_limit=LIMIT, backoff_s=(0.02,))
            self.recorders[member_of(app).member_id] = recorder
        wait_until(lambda: set(stage.owners(group).values()) == set(self.recorders), what="each has a partition")

    def _act(self, body: bytes, ctx: Context) -> None:
        kind = body.split(b"-")[0]
        self.begun[body] += 1
        if kind == b"slow":
            assert self._gate.wait(20)
        if self.begun[body] <= self._fails.get(kind, 0):
            raise Reject("not for us") if kind == POISON else Fault("no stock")
        self.handled_at[body] = time.time()

    def retries(self) -> int:
        """Runs beyond each message's first one."""
        return sum(count - 1 for count in self.begun.values())


@pytest.mark.full
def test_jobs_say_what_the_handlers_saw(stage: Stage, spark: Any) -> None:
    """Case 79: latency, failures and fairness of two groups of two members, with keys that fail, die, are parked,
    released and redriven."""
    from mqlayer.spark.jobs.job import JobParams
    from mqlayer.spark.jobs.runner import SPARK_JOBS, tables_of

    set_archived(runtime_of(stage.database), stage.topic, archived=True)
    gate = threading.Event()
    # Of `dying` what fails three times is dead, and handled once it is redriven; what is rejected stays dead.
    dying = Members(stage, "dying", policy="dead_letter", fails={FLAKY: 2, POISON: 99, DEADLY: LIMIT}, gate=gate)
    # Of `parking` what fails three times is parked, and handled at the second attempt after its release.
    parking = Members(stage, "parking", policy="park", fails={FLAKY: 2, DEADLY: LIMIT + 1}, gate=gate)
    bodies = [(f"key-{number % 8}", b"plain-%d" % number) for number in range(80)]
    bodies += [("key-1", FLAKY), ("key-2", POISON), ("bad", DEADLY), ("bad", b"behind"), ("slow-key", b"slow")]
    sent_at = time.time()
    stage.send(bodies)
    quick = {body for _, body in bodies} - {b"slow"}
    wait_until(lambda: quick - {POISON, DEADLY} <= dying.handled_at.keys(), what="all but the slow one")
    wait_until(lambda: quick - {DEADLY, b"behind"} <= parking.handled_at.keys(), what="all but the parked")
    quick_by = time.time()
    gate.set()
    for group in ("dying", "parking"):
        stage.wait_settled(group)
    worker = new_worker()
    wanted = DeadFilter(cause="exhausted")
    work_on(
        stage.database,
        start_redrive(runtime_of(stage.database, actor="otto"), stage.topic, "dying", wanted, worker=worker),
        worker=worker,
    )
    release_parked(runtime_of(stage.database, actor="olga"), stage.topic, "parking", key="bad")
    wait_until(lambda: DEADLY in dying.handled_at, what="redriven")
    wait_until(lambda: b"behind" in parking.handled_at, what="released")
    wait_until(lambda: nothing_is_parked(stage), what="in line again")
    ended_at = time.time()
    assert archive_pass(stage.runtime).ended
    create_snapshot(runtime_of(stage.database), "s")

    tables = tables_of(spark, "s", dsn=stage.dsn)
    facts = {name: SPARK_JOBS[name](tables, JobParams()).facts for name in ("audit", "latency", "failures", "fairness")}
    assert facts["audit"]["verdict"] == "clean"
    # What became of each message, and in the end.
    words = {(row["group"], row["outcome"]): (row["messages"], row["final"]) for row in facts["failures"]["by_outcome"]}
    assert words == {
        ("dying", "handled"): (84, 84), ("dying", "rejected"): (1, 1), ("dying", "exhausted"): (1, 0),
        ("dying", "redriven"): (1, 0), ("parking", "handled"): (85, 85), ("parking", "parked"): (2, 0),
    }  # fmt: skip
    errors = {(row["group"], row["outcome"]): row for row in facts["failures"]["errors"]}
    assert {key: (row["attempts"], row["final"]) for key, row in errors.items()} == {
        ("dying", "rejected"): (1, 1), ("dying", "exhausted"): (LIMIT, 0),
    }  # fmt: skip
    assert "no stock" in errors["dying", "exhausted"]["reason"]
    assert "not for us" in errors["dying", "rejected"]["reason"]
    # A redrive begins attempts anew: its first one is no retry.
    for members, again, attempts in ((dying, 1, {1: 83, 3: 1}), (parking, 0, {1: 83, 3: 1, LIMIT + 2: 1})):
        seen = {
            f"{job}.{table}": [row for row in facts[job][table] if row["group"] == members.group] for job, table in SEEN
        }
        assert sum(row["retries"] for row in seen["failures.members"]) == members.retries() - again
        assert {row["attempts"]: row["messages"] for row in seen["failures.attempts"]} == attempts
        # Who did it.
        shares = {row["actor"]: row["messages"] for row in seen["fairness.members"]}
        assert shares == {member: len(one.ended) for member, one in members.recorders.items()}
        assert all(0 < row["busy_s"] <= ended_at - sent_at for row in seen["fairness.members"])
        # How long it took.
        (row,) = seen["latency.groups"]
        assert row["messages"] == len(members.handled_at)
        assert 0 < row["p50_ms"] <= (quick_by - sent_at) * 1000 + 50
        longest = max(members.handled_at.values()) - sent_at
        assert longest * 1000 - 50 <= row["longest_ms"] <= (ended_at - sent_at) * 1000 + 50


def nothing_is_parked(stage: Stage) -> bool:
    with stage.database.connection() as connection:
        return connection.execute("SELECT 1 FROM mqlayer.parked_key LIMIT 1").fetchone() is None
