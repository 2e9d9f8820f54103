"""Members that come under load: few partitions move, nobody else notices; and how soon a waiting member wakes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from itertools import count, islice, pairwise
from math import ceil
from statistics import median

import pytest

from mqlayer import App, Context
from mqlayer.consuming.ordered.member import OrderedMember
from mqlayer.groups.admin import set_group
from mqlayer.groups.members import HeartbeatReply, MemberSession
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.variants import some_of
from tests.fixtures.wait import awake_s, wait_until, within
from tests.proof.runtimes import runtime_of

PARTITIONS = 12
PATIENT_S = 20.0
"""A lease that does not run out on a busy machine: partitions would be taken anew."""


class Load:
    """Publishes one message after the other to every partition, until it is closed."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._closing = stage, threading.Event()
        self._keys = [stage.key_in(partition) for partition in stage.partitions]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._closing.wait(0.01):
            number += 1
            self._stage.send((key, b"%d" % number) for key in self._keys)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


class Watched:
    """A handler that notes when each partition's messages were handled, and under which epoch."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = defaultdict(list)
        self.epochs: dict[int, set[int]] = defaultdict(set)

    def __call__(self, _body: bytes, ctx: Context) -> None:
        self.times[ctx.partition].append(awake_s())
        self.epochs[ctx.partition].add(ctx.epoch)


@pytest.mark.parametrize("members", some_of([1, 2, 3], 3))
def test_one_more_member_under_load_moves_few_partitions_and_the_others_go_on(
    start_stage: StartStage, redis_url: str, members: int
) -> None:
    """Case 45: those that stay keep their owner and epoch, and get stuck no longer than before it came."""
    stage = start_stage(redis_url, partitions=PARTITIONS)
    watched, settings = Watched(), stage.settings(lease_s=PATIENT_S)
    apps: list[App] = [stage.consume(watched, settings=settings) for _ in range(members)]
    names = {member_of(app).member_id for app in apps}
    wait_until(lambda: set(stage.owners().values()) == names, what="each to own something")
    wait_until(lambda: all(target == owner for _, owner, _, target in stage.assignments()), what="no hand-over")
    load = Load(stage)
    try:
        wait_until(lambda: len(watched.times) == PARTITIONS, what="all partitions to be handled")
        before = {partition: (owner, epoch) for partition, owner, epoch, _ in stage.assignments()}
        began = awake_s()
        newcomer = member_of(stage.consume(watched, settings=settings)).member_id
        wait_until(
            lambda: sum(owner == newcomer for owner in stage.owners().values()) == PARTITIONS // (members + 1),
            timeout_s=30,
            what="the new member's share",
        )
        counts = {partition: len(times) for partition, times in watched.times.items()}
        wait_until(
            lambda: all(len(watched.times[partition]) > count + 5 for partition, count in counts.items()),
            timeout_s=30,
            what="all partitions to go on",
        )
        ended = awake_s()
    finally:
        load.close()
    after = {partition: (owner, epoch) for partition, owner, epoch, _ in stage.assignments()}
    moved = {partition for partition in after if after[partition] != before[partition]}
    assert len(moved) <= ceil(PARTITIONS / (members + 1))
    assert {after[partition][0] for partition in moved} == {newcomer}
    for partition in after.keys() - moved:
        assert watched.epochs[partition] == {before[partition][1]}, "it was taken anew"
        times = [at for at in watched.times[partition] if began - 0.5 <= at <= ended]
        assert max(later - earlier for earlier, later in pairwise(times)) < 2.0, "it was stuck"


class LateAnswers:
    """Has a member hear each answer of its heartbeats once more, behind every later one."""

    def __init__(self, member: OrderedMember, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[HeartbeatReply] = []
        self.late, self.changes = 0, list[str]()
        self._member, self._follow = member, member.assignments.follow
        monkeypatch.setattr(member.assignments, "follow", self._hear)

    def _hear(self, session: MemberSession, answer: HeartbeatReply) -> None:
        self._follow(session, answer)
        wanted = {assigned.partition for assigned in answer.assignments if not assigned.release}
        for late in self.heard:
            if late.allocation < answer.allocation:
                before, held = self._settings(), self._held()
                self._follow(session, late)
                self.late += 1
                after = self._held()
                if before != self._settings():
                    self.changes.append(f"settings of {late}")
                if not after.items() <= held.items():
                    self.changes.append(f"taken by {late}")
                if wanted & (held.keys() - after.keys()):
                    self.changes.append(f"dropped by {late}")
        self.heard.append(answer)

    def _settings(self) -> tuple[object, ...]:
        settings, assigned = self._member.settings, self._member.assignments._assigned
        return (settings.rules, settings.tag_filter, settings.archived, assigned, settings.rate_limiter.limit)

    def _held(self) -> dict[int, int]:
        return {int(owned.partition): owned.epoch for owned in self._member.ownership.all()}


def test_an_answer_of_an_earlier_allocation_that_comes_late_is_ignored(
    start_stage: StartStage, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 49: it takes nothing, drops nothing and sets nothing, whatever was assigned or set since."""
    stage = start_stage(redis_url, partitions=4)
    recorder, settings = Recorder(), stage.settings(lease_s=PATIENT_S)
    first = member_of(stage.consume(recorder, settings=settings))
    wait_until(lambda: len(first.owned()) == 4, what="all partitions")
    answers = LateAnswers(first, monkeypatch)
    heard = answers.heard
    wait_until(lambda: heard, what="an answer that is late later on")
    second = stage.consume(recorder, settings=settings)
    other = member_of(second)
    wait_until(lambda: [len(first.owned()), len(other.owned())] == [2, 2], what="half each")
    stage.send_numbers(keys=8, each=20)
    set_group(runtime_of(stage.database, actor="a test"), stage.topic, "g", attempt_limit=5, rate_limit=1e6)
    wait_until(lambda: first.settings.rules.attempt_limit == 5, what="the new settings")
    second.stop()
    wait_until(lambda: len(first.owned()) == 4, what="all partitions again")
    stage.send_numbers(keys=8, each=20, first=21)
    stage.wait_settled()
    beats = len(heard)
    wait_until(lambda: len(heard) > beats, what="one more heartbeat")
    assert len({answer.allocation for answer in heard}) > 2
    assert answers.late > 2
    assert answers.changes == []
    recorder.assert_in_order()
    assert recorder.count() == 8 * 40
    epochs = {partition: epoch for partition, _, epoch, _ in stage.assignments()}
    assert {int(owned.partition): owned.epoch for owned in first.ownership.all()} == epochs


def test_a_waiting_member_wakes_at_once_when_something_is_published(stage: Stage) -> None:
    """Case 61, of appends: by the median of twenty, each when all before is handled."""
    begun: list[float] = []

    def note(_body: bytes, _ctx: Context) -> None:
        begun.append(time.monotonic())

    app = stage.consume(note)
    wait_until(lambda: len(member_of(app).owned()) == 2, what="both partitions")

    def median_wait_s() -> float:
        waits = []
        for number in range(len(begun) + 1, len(begun) + 21):
            sent = time.monotonic()
            stage.send([(f"key-{number}", b"1")])
            wait_until(lambda number=number: len(begun) == number, what="it to be handled")  # type: ignore[misc]
            waits.append(begun[-1] - sent)
        return median(waits)

    within(median_wait_s, 0.2, what="the median of twenty waits")


def test_appends_behind_a_blocked_head_are_read_and_wake_nobody_but_the_reader(stage: Stage) -> None:
    """Case 61: at 1,000 a second a member reads each once, for other keys may be among them; with none it rests."""
    key = stage.key_in(stage.partitions[0])
    begun = threading.Event()

    def fail(_body: bytes, _ctx: Context) -> None:
        begun.set()
        raise ValueError

    stage.send([(key, b"0")])
    app = stage.consume(fail, policy="block", backoff_s=(60.0,))
    assert begun.wait(10)
    numbers = count(1)

    def used() -> float:
        before_s = used_s()
        elapsed_s = stage.send_evenly(key, islice(numbers, 1_199), per_s=1_000)
        after_s = used_s()
        used = {name: (after_s[name] - before_s[name]) / elapsed_s for name in before_s}
        # By pick-up and settling none at all; a thread that looked at each append would take a multiple of this.
        return max(used.pop("mqlayer-g-node-1-reading") / 0.3, max(used.values()) / 0.03)

    # One thread collects the garbage of all.
    within(used, 1.0, what="the part that each thread may use")
    sent = next(numbers)
    wait_until(lambda: max(owned.next_read for owned in member_of(app).ownership.all()) == sent + 1, what="all read")


def used_s() -> dict[str, float]:
    """Return by name how much of a core each thread of a member has used so far, in s."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("mqlayer-g-")]
    return {thread.name: time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads}
