"""A producer's sender and in-flight store against a node that does everything a node and a network can do.

The node is a model in this process: it works when the test says so, loses replies, refuses, forgets scripts, is cut
off, works off requests of lines that are long gone, moves partitions and falls back. Judged is what it holds in the
end.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from pydantic import SecretStr

from mqlayer.domain.routing import Lp, LpRange, NodeId, PartitionId, Route, RouteVersion
from mqlayer.errors import (
    AcknowledgedLoss,
    BacklogFull,
    NodeOutOfMemory,
    PublishAborted,
)
from mqlayer.producing.append_answers import AppendAnswers
from mqlayer.producing.follow_ups import ProducerJob, RenewSource, Reroute, StoredLookup
from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.in_flight import InFlight
from mqlayer.producing.losses import AcknowledgedMark, FormerSources
from mqlayer.producing.message import chunks_of
from mqlayer.producing.node_sender import NodeSender
from mqlayer.producing.options import ProducerOptions
from mqlayer.producing.outcomes import Appended, Recovered
from mqlayer.producing.receipts import receipt_of
from mqlayer.producing.send_queues import LpQueue, PartitionQueue, PendingSend, TopicQueues
from mqlayer.redis.node_connection import Node
from mqlayer.redis.wire import bulk
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from tests.proof.model_node import ADDRESS, BACKLOG_LIMIT, ModelConnection, ModelNode, Partition

LPS = (3, 600)
NEVER, AT_ONCE = float("inf"), 0.0
NODE = Node(NodeId(1), "node", ADDRESS, "run")
OPTIONS = ProducerOptions(max_in_flight=3)
NO_DATABASE: Any = None
RUNTIME = Runtime(NO_DATABASE, Settings(dsn=SecretStr("x")))


class FakeSender(NodeSender):
    """A sender whose thread never runs: the test does its work."""

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__(NODE, "node", world.guarded, RUNTIME, OPTIONS, lambda node_id: NODE)

    def _new_connection(self, node: Node) -> Any:
        return ModelConnection(self._world.node)

    def wake_locked(self) -> None:
        pass

    @property
    def fake_connection(self) -> ModelConnection:
        line: Any = self._connection
        assert isinstance(line, ModelConnection)
        return line

    def do_connect(self) -> bool:
        return self._connected()


class World(RuleBasedStateMachine):
    """One producer, one topic of one partition at a time, one node."""

    @initialize()
    def make(self) -> None:
        self.node = ModelNode()
        self.snapshot = copy.deepcopy(self.node.partitions)
        self.fell_back = False
        self.in_flight = InFlight(source=1, max_count=10_000, max_bytes=10**9)
        self.guarded = GuardedInFlight(self.in_flight, self.note)
        self.sender = FakeSender(self)
        self.serving, self.version = 1, 1
        self.sources = itertools.count(2)
        self.numbers = itertools.count(1)
        self.published: list[PendingSend] = []
        self.bodies: dict[PendingSend, list[str]] = {}
        self.stranded: list[TopicQueues] = []
        self.renewals = 0
        self.searches: list[StoredLookup] = []
        self.read: list[tuple[AcknowledgedMark, int]] = []
        self.topic = TopicQueues(self.route(), self.table(), 0.0)
        self.in_flight.queues.topics["orders"] = self.topic
        self.sender.do_connect()

    def route(self) -> Route:
        ranges = (LpRange(0, 1024, PartitionId(self.serving), NodeId(1)),)
        return Route(1, "orders", RouteVersion(self.version), ranges, 1_000, BACKLOG_LIMIT)

    def table(self) -> list[Any]:
        slot = self.in_flight.queues.partition_queues.setdefault(
            self.serving, PartitionQueue(self.serving, self.sender.queue, BACKLOG_LIMIT)
        )
        return [slot] * 1024

    def note(self, job: ProducerJob) -> None:
        """Note a job of the in-flight store; it runs when the test says so."""
        if isinstance(job, Reroute):
            self.stranded.append(job.topic)
        elif isinstance(job, RenewSource):
            self.renewals += 1
        elif isinstance(job, StoredLookup):
            self.searches.append(job)

    # What a producer does

    @rule(
        lp=st.sampled_from(LPS),
        count=st.integers(1, 3),
        deadline=st.sampled_from([NEVER, NEVER, AT_ONCE]),
        bulk_=st.booleans(),
        eager=st.sampled_from([False, False, True]),
    )
    def publish(self, lp: int, count: int, deadline: float, bulk_: bool, eager: bool = False) -> None:
        bodies = [str(next(self.numbers)) for _ in range(count)]
        pieces = tuple(piece for body in bodies for piece in chunks_of(bulk(b"1"), bulk(b"k"), body.encode()))
        pending = PendingSend(pieces, count, 10 * count, deadline, None, eager=eager)
        self.published.append(pending)
        self.bodies[pending] = bodies
        if bulk_ and self.sender.good and self.sender.unanswered_count < OPTIONS.max_in_flight:
            self.sender.send_now(self.topic, {Lp(lp): pending}, self.topic.table[lp])
        else:
            with self.guarded as in_flight:
                in_flight.accept(self.topic, Lp(lp), pending, time.monotonic())

    @rule(data=st.data(), refused=st.booleans())
    def withdraw(self, data: st.DataObject, refused: bool) -> None:
        """Somebody cancels a future or an await: what is taken back is never stored, the others stay in order."""
        waiting = [pending for pending in self.published if pending.outcome is None]
        if waiting:
            pending = data.draw(st.sampled_from(waiting))
            if refused:
                self.guarded.withdraw_refused(pending)
            else:
                with self.guarded as in_flight:
                    in_flight.settlement.withdraw(pending)

    @rule()
    def push(self) -> None:
        self.sender.push()

    @precondition(
        lambda self: self.sender.unanswered_count and (self.node.cut_off or self.sender.fake_connection.outbox)
    )
    @rule()
    def pull(self) -> None:
        self.sender.pull()

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        waiting = [pending for pending in self.published if pending.outcome is None]
        if waiting:
            self.guarded.abandon([data.draw(st.sampled_from(waiting))])

    @rule()
    def connect(self) -> None:
        if not self.sender.unanswered_count:
            self.sender.do_connect()

    @rule()
    def time_passes(self) -> None:
        for slot in self.in_flight.queues.partition_queues.values():
            slot.retry_at = 0.0

    @rule()
    def go_on(self) -> None:
        """What a healthy system does all the time."""
        self.node.cut_off = False
        self.time_passes()
        self.connect()
        self.push()
        self.work(3)
        while self.sender.unanswered_count and self.sender.fake_connection.outbox:
            self.sender.pull()

    # What a node and a network do

    @rule(steps=st.integers(1, 4))
    def work(self, steps: int) -> None:
        line = self.sender.fake_connection
        for _ in range(min(steps, len(line.inbox))):
            line.outbox.append(self.node.work(line.inbox.popleft()))

    @rule(steps=st.integers(1, 4))
    def work_for_a_connection_that_is_gone(self, steps: int) -> None:
        for _ in range(min(steps, len(self.node.ghosts))):
            self.node.work(self.node.ghosts.popleft())

    @rule()
    def cut(self) -> None:
        self.node.cut_off = True

    @rule()
    def heal(self) -> None:
        self.node.cut_off = False

    @precondition(lambda self: self.sender.unanswered_count)
    @rule(worked=st.integers(0, 3), arrive_later=st.booleans(), refused_then=st.booleans())
    def break_connection(self, worked: int, arrive_later: bool, refused_then: bool) -> None:
        """Requests are worked off and their replies lost; the others arrive later or never; a new line is made."""
        if refused_then and not self.node.next_refusals:
            self.work(worked)
            worked = 0
            self.refuse_next(["full"])
        if worked:
            self.work(worked)
        self.sender.fake_connection.outbox.clear()
        if not arrive_later:
            self.sender.fake_connection.inbox.clear()
        self.sender.pull()
        self.node.cut_off = False
        self.connect()

    @rule(kinds=st.lists(st.sampled_from(["memory", "full"]), min_size=1, max_size=2))
    def refuse_next(self, kinds: list[str]) -> None:
        refusals = {"memory": redis.exceptions.OutOfMemoryError("OOM"), "full": [b"full", 9]}
        self.node.next_refusals.extend(refusals[kind] for kind in kinds)

    @rule(lp=st.sampled_from(LPS), later=st.integers(1, 3))
    def refuse_the_first_of_several(self, lp: int, later: int) -> None:
        """What is under way behind a refused message finds a gap."""
        for _ in range(1 + later):
            self.publish(lp, 1, NEVER, bulk_=False)
            self.sender.push()
        self.refuse_next(["memory"])
        self.work(1 + later)

    @rule(on=st.booleans())
    def memory(self, on: bool) -> None:
        self.node.out_of_memory = on

    @rule(on=st.booleans())
    def limit(self, on: bool) -> None:
        self.node.limited = on

    @rule()
    def trim(self) -> None:
        for partition in self.node.partitions.values():
            partition.trimmed = len(partition.log)

    @rule()
    def forget_scripts(self) -> None:
        self.node.scripts_missing = True

    @rule()
    def remember(self) -> None:
        self.snapshot = copy.deepcopy(self.node.partitions)

    @rule()
    def fall_back(self) -> None:
        """The server restarts with older data: every line ends, and nothing of them is worked off any more."""
        if self.snapshot.keys() != self.node.partitions.keys():
            return
        self.node.partitions, self.fell_back = copy.deepcopy(self.snapshot), True
        self.sender.fake_connection.inbox.clear()
        self.sender.fake_connection.outbox.clear()
        self.node.ghosts.clear()
        if self.sender.unanswered_count:
            self.sender.pull()
        self.sender.fake_connection.close()

    @rule()
    def be_emptied(self) -> None:
        """The server falls back to its beginning, behind what earlier losses left."""
        for partition in self.node.partitions.values():
            partition.log, partition.marks, partition.trimmed = [], {}, 0
        self.remember()
        self.fall_back()

    @rule(lp=st.sampled_from(LPS))
    def fall_back_behind_an_answer(self, lp: int) -> None:
        """What was published last is acknowledged, and lost."""
        self.remember()
        self.publish(lp, 1, NEVER, bulk_=False)
        self.go_on()
        self.fall_back()
        self.publish(lp, 1, NEVER, bulk_=False)

    @rule(lp=st.sampled_from(LPS))
    def be_emptied_behind_a_loss(self, lp: int) -> None:
        """What the first loss left is lost with what was published since."""
        self.publish(lp, 2, NEVER, bulk_=False)
        self.go_on()
        self.fall_back_behind_an_answer(lp)
        self.go_on()
        self.run_errands()
        self.publish(lp, 1, NEVER, bulk_=False)
        self.go_on()
        self.be_emptied()

    @rule()
    def seal(self) -> None:
        self.node.partitions[self.serving].state = "sealed"

    @precondition(lambda self: self.node.partitions[self.serving].state == "sealed")
    @rule()
    def open_successor(self) -> None:
        parent = self.node.partitions[self.serving]
        self.serving, self.version = self.serving + 1, self.version + 1
        self.node.partitions[self.serving] = Partition(marks=dict(parent.marks))

    # What the scheduler does

    @rule()
    def run_errands(self) -> None:
        stranded, renewals, searches = self.stranded, self.renewals, self.searches
        self.stranded, self.renewals, self.searches = [], 0, []
        with self.guarded as in_flight:
            for topic in stranded:
                topic.adopt(self.route(), self.table(), 0.0)
                in_flight.queues.release(topic)
            for _ in range(renewals):
                in_flight.queues.renew(next(self.sources))
            for search in searches:
                in_flight.settlement.located(search.pending, self.answer(search))

    @rule()
    def read_marks(self) -> None:
        """The scheduler compares what the node has with what it acknowledged; what that says may come to pass later."""
        self.read = [
            (claim, self.node.partitions[claim.partition].marks.get((claim.source, claim.queue.lp), 0))
            for claim in self.in_flight.losses.expected_marks(self.sender.queue.node_id)
            if claim.partition in self.node.partitions
        ]

    @rule()
    def act_on_marks(self) -> None:
        with self.guarded as in_flight:
            for claim, mark in self.read:
                in_flight.losses.check_mark(claim, mark)
        self.read = []

    def answer(self, search: StoredLookup) -> Recovered:
        found = {}
        for number, partition in self.node.partitions.items():
            for offset, (source, lp, seq, _) in enumerate(partition.log, start=1):
                found[source, lp, seq] = (number, offset)
        return search.outcome({identity: found[identity] for identity in search.wanted() if identity in found})

    # What must hold

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        self.settle_all()
        self.read_marks()
        self.act_on_marks()
        self.judge()

    def settle_all(self) -> None:
        """Make everything well and go on until nothing is pending."""
        self.node.out_of_memory = self.node.limited = self.node.cut_off = False
        self.node.next_refusals.clear()
        if self.node.partitions[self.serving].state == "sealed":
            self.open_successor()
        for _ in range(400):
            if not self.in_flight.capacity.count:
                return
            self.run_errands()
            self.time_passes()
            if not self.sender.unanswered_count:
                self.sender.do_connect()
            self.sender.push()
            self.work(10)
            while self.sender.unanswered_count and self.sender.fake_connection.outbox:
                self.sender.pull()
        raise AssertionError(f"{self.in_flight.capacity.count} messages never settle")

    def judge(self) -> None:
        queues = self.in_flight.queues
        assert {queue for queue in queues if queue.blocked_by is not None} == queues.blocked
        follow_ups = self.in_flight.follow_ups
        assert (follow_ups.listeners, follow_ups.nodes, follow_ups.jobs) == ([], {}, []), "left undone"
        held = [record for number in sorted(self.node.partitions) for record in self.node.partitions[number].log]
        place = {
            (number, offset): record[3]
            for number, partition in self.node.partitions.items()
            for offset, record in enumerate(partition.log, start=1)
        }
        bodies = [body for _, _, _, body in held]
        assert len(bodies) == len(set(bodies)), "stored twice"
        for lp in LPS:
            numbers = [int(body) for _, record_lp, _, body in held if record_lp == lp]
            assert numbers == sorted(numbers), f"LP {lp} is out of order"
        lost = 0
        for pending in self.published:
            if isinstance(pending.outcome, Appended | Recovered):
                for index, body in enumerate(self.bodies[pending]):
                    receipt = receipt_of(pending, index)
                    if body in bodies:
                        assert self.fell_back or place[receipt.partition, receipt.offset or 0] == body
                    else:
                        assert self.fell_back, f"{body} is lost"
                        lost += 1
            else:
                assert isinstance(pending.outcome, BacklogFull | NodeOutOfMemory | PublishAborted | AcknowledgedLoss)
                assert self.fell_back or not isinstance(pending.outcome, AcknowledgedLoss)
                assert not set(self.bodies[pending]) & set(bodies), "failed, yet stored"
        assert self.in_flight.counts["lost"] == lost, "not all that is lost was told"
        chains: dict[tuple[int, int], list[int]] = {}
        for source, lp, seq, _ in held:
            chains.setdefault((source, lp), []).append(seq)
        assert all(chain == list(range(1, len(chain) + 1)) for chain in chains.values()), chains
        assert self.in_flight.capacity.size == 0


def run(examples: int, **changes: Any) -> None:
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **changes,
        ),
    )


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused partition is left alone until the test says that time has passed."""
    monkeypatch.setattr("mqlayer.producing.append_answers.backoff_s", lambda refusals: 1e6)


@pytest.mark.slow
def test_whatever_happens_each_message_is_stored_once_in_order_or_failed_and_not_stored(
    request: pytest.FixtureRequest,
) -> None:
    run(400 if request.config.getoption("--long", default=False) else 120)


def test_a_stored_message_refused_at_its_repetition_is_settled_by_what_is_accepted_behind_it() -> None:
    world = World()
    world.make()
    world.publish(lp=3, count=1, deadline=NEVER, bulk_=False)
    world.push()
    world.break_connection(worked=1, arrive_later=False, refused_then=True)
    world.push()
    world.publish(lp=3, count=1, deadline=NEVER, bulk_=False)
    world.go_on()
    world.teardown()
    assert all(isinstance(pending.outcome, Appended | Recovered) for pending in world.published)


def refused_when_its_time_is_over() -> None:
    """A stored message whose answer was lost is refused at its repetition, after its deadline."""
    world = World()
    world.make()
    world.publish(lp=3, count=1, deadline=AT_ONCE, bulk_=False)
    world.push()
    world.break_connection(worked=1, arrive_later=False, refused_then=True)
    world.push()
    world.go_on()
    world.teardown()


def test_a_message_that_may_be_stored_never_fails() -> None:
    refused_when_its_time_is_over()


def test_forgetting_that_a_message_may_be_stored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a story of its own: chance finds it in some thousands of runs."""
    forget_what_is_unsure(monkeypatch)
    with pytest.raises(AssertionError):
        refused_when_its_time_is_over()


def emptied_behind_a_loss() -> None:
    """What was acknowledged under a source that its queue left is lost, with what was since."""
    world = World()
    world.make()
    world.be_emptied_behind_a_loss(lp=3)
    world.teardown()
    assert world.in_flight.counts["lost"] == 1 + 2 + 1


def test_what_was_acknowledged_under_a_former_source_is_missed() -> None:
    emptied_behind_a_loss()


def test_forgetting_former_sources_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_former_sources(monkeypatch)
    with pytest.raises(AssertionError, match="not all that is lost was told"):
        emptied_behind_a_loss()


def refused_with_another_under_way() -> None:
    """Of two requests the first is refused, and its answer is read before the second one's."""
    world = World()
    world.make()
    world.refuse_the_first_of_several(lp=3, later=1)
    world.pull()
    world.teardown()
    assert all(isinstance(pending.outcome, Appended | Recovered) for pending in world.published)


def test_what_is_refused_waits_for_the_answers_about_what_is_under_way_behind_it() -> None:
    refused_with_another_under_way()


def test_sending_again_before_all_answers_came_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a story of its own: chance finds it in some hundreds of runs."""
    resolve_too_early(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        refused_with_another_under_way()


@pytest.mark.parametrize(("looked", "answered"), [(1, 2), (2, 1)])
def test_of_two_marks_behind_which_messages_are_lost_the_lower_one_counts(looked: int, answered: int) -> None:
    """A look at one partition of a queue and an answer of another one, which puts the telling off until it comes."""
    world = World()
    world.make()
    world.publish(3, 3, NEVER, bulk_=False)
    world.go_on()
    world.publish(3, 1, NEVER, bulk_=False)
    world.push()
    (claim,) = world.in_flight.losses.expected_marks(world.sender.queue.node_id)
    with world.guarded as in_flight:
        in_flight.losses.check_mark(claim, looked)
        assert not in_flight.follow_ups.listeners
    partition = world.node.partitions[world.serving]
    partition.log, partition.marks[claim.source, 3] = partition.log[:answered], answered
    world.work(1)
    world.pull()
    failure = world.published[-1].outcome
    assert isinstance(failure, AcknowledgedLoss)
    assert [(loss.first, loss.last) for loss in failure.losses] == [(2, 3)]
    assert world.in_flight.counts["lost"] == 2
    assert list(world.in_flight.losses.former) == [(claim.queue, claim.source, 1)]


def forget_former_sources(patch: pytest.MonkeyPatch) -> None:
    """A queue that goes on under another source forgets what was acknowledged under the one before."""
    patch.setattr(FormerSources, "add", lambda former, queue, acked: None)


def forget_what_is_unsure(patch: pytest.MonkeyPatch) -> None:
    """A message that may be stored fails for good, and its seq goes to the next one."""
    patch.setattr(LpQueue, "note_uncertain", lambda queue: None)


def give_lost_seqs_out_again(patch: pytest.MonkeyPatch) -> None:
    """After a loss the queue goes on behind the mark under the same incarnation."""

    def restart(queue: LpQueue, source: int | None) -> None:
        if hasattr(queue, "source"):
            queue.next_seq, queue.acked = queue.lost_after + 1, queue.lost_after
        else:
            original(queue, source)

    original = LpQueue.restart
    patch.setattr(LpQueue, "restart", restart)


def put_back_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """What flew is sent again in the wrong order."""

    def put_back(queue: LpQueue) -> None:
        queue.waiting.extendleft(queue.in_flight)
        queue.in_flight.clear()

    patch.setattr(LpQueue, "requeue", put_back)


def leave_what_is_behind_a_failure(patch: pytest.MonkeyPatch) -> None:
    """Later messages of the LP go on after one failed; the seqs have a hole."""

    def cut_off(queue: LpQueue, index: int) -> list[PendingSend]:
        pending = queue.waiting[index]
        del queue.waiting[index]
        return [pending]

    patch.setattr(LpQueue, "truncate", cut_off)


def resolve_too_early(patch: pytest.MonkeyPatch) -> None:
    """A queue is sent again while answers about it are still to come."""
    patch.setattr(
        AppendAnswers, "resolve_batch", lambda answers, batch, unanswered, now: answers.resolve(batch.queues(), now)
    )


def take_repetitions_for_losses(patch: pytest.MonkeyPatch) -> None:
    """A gap behind a refused batch is taken for a loss."""

    def mixed(answers: AppendAnswers, batch: Any, *rest: Any) -> Any:
        for queue in batch.queues():
            queue.acked += 1
        return original(answers, batch, *rest)

    original = AppendAnswers.mixed
    patch.setattr(AppendAnswers, "mixed", mixed)


# How many runs it takes to the first finding is chance: some of them take minutes on a busy machine.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "plant",
    [
        give_lost_seqs_out_again,
        put_back_in_reverse,
        leave_what_is_behind_a_failure,
        take_repetitions_for_losses,
        forget_former_sources,
    ],
)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        # It ends with the first finding; which run that is changes with any change of the library.
        run(10_000, phases=[Phase.generate], database=None, print_blob=False, derandomize=True)
