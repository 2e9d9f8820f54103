"""A future of `send_async` is a `concurrent.futures.Future` in all that its users see, though it is made in parts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, as_completed, wait  # noqa: A004

import pytest

from mqlayer.domain.message import Identity
from mqlayer.domain.routing import LpRange, NodeId, PartitionId, Route, RouteVersion
from mqlayer.errors import PublishAborted
from mqlayer.producing.listeners import ReceiptFuture, notify_all
from mqlayer.producing.outcomes import Appended, Recovered, SendOutcome
from mqlayer.producing.receipts import Receipt
from mqlayer.producing.send_queues import NodeQueue, PartitionQueue, PendingSend, TopicQueues

RECEIPT = Receipt("orders", 1, 7, Identity(1, 2, 3))


@pytest.fixture
def future() -> ReceiptFuture:
    """A future whose message can't be withdrawn."""
    return ReceiptFuture(lambda _: False)


def test_it_knows_all_that_a_future_is_made_of() -> None:
    """Another Python may add a field: then `ReceiptFuture` must have it."""
    known = {"_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"}
    assert vars(Future()).keys() == known


def test_a_receipt_that_came_before_anybody_asked_is_there(future: ReceiptFuture) -> None:
    assert not future.done()
    future.set_result(RECEIPT)
    assert future.done()
    assert not future.cancelled()
    assert not future.running()
    assert future.result() is RECEIPT
    assert future.exception() is None
    called: list[Future[Receipt]] = []
    future.add_done_callback(called.append)
    assert called == [future]
    assert wait([future], timeout=10).done == {future}


def test_an_error_is_raised(future: ReceiptFuture) -> None:
    future.set_exception(ValueError("no"))
    assert future.done()
    with pytest.raises(ValueError, match="no"):
        future.result()


def test_without_an_outcome_a_wait_ends_by_its_time(future: ReceiptFuture) -> None:
    with pytest.raises(TimeoutError):
        future.result(timeout=0.001)
    assert not wait([future], timeout=0.001).done
    with pytest.raises(AttributeError):
        _ = future.unknown


@pytest.mark.parametrize(
    ("outcome", "offset"),
    [(Appended(1, 1, None), 7), (Recovered(1, None, ((1, 8),)), 8), (PublishAborted("t", 2, "x"), 0)],
)
def test_its_message_settles_it(outcome: SendOutcome, offset: int) -> None:
    """A stored message's receipt is made when it is read, others' at once."""
    pending = send()
    future = watched(pending)
    pending.outcome, pending.offset = outcome, 7
    notify_all([future])
    # The garbage collector skips a pending send, so a cycle would stay for good.
    assert pending.listener is None
    assert future.done()
    assert not future.cancel()
    if isinstance(outcome, PublishAborted):
        assert future.exception() is outcome
        with pytest.raises(PublishAborted):
            future.result()
    else:
        assert future.exception() is None
        assert future.result() == future.result() == RECEIPT._replace(offset=offset)
        assert "Receipt" in repr(future)


def test_a_withdrawn_message_is_cancelled() -> None:
    future = watched(send(), withdraw=lambda _: True)
    assert future.cancel()
    assert future.cancelled()
    assert future.cancel()


def test_a_batch_settles_watched_futures_behind_the_others() -> None:
    """A callback that looks at its neighbours finds them settled."""
    sends = [send() for _ in range(3)]
    first, second, third = (watched(pending) for pending in sends)
    seen: list[bool] = []
    second.add_done_callback(lambda _: seen.extend(one.done() for one in (first, third)))
    for pending in sends:
        pending.outcome, pending.offset = Appended(1, 1, None), 7
    notify_all([first, second, third])
    assert seen == [True, True]
    assert [one.result() for one in (first, second, third)] == [RECEIPT] * 3


@pytest.mark.parametrize("how", ["result", "wait", "as_completed", "callback", "asyncio"])
def test_threads_that_wait_are_woken_whenever_the_outcome_comes(how: str) -> None:
    """The outcome and the first wait race: neither order may lose the wake-up."""
    for _ in range(200):
        pending, start = send(), threading.Barrier(2)
        future = watched(pending)
        thread = threading.Thread(target=settle, args=(pending, future, start))
        thread.start()
        start.wait(10)
        assert woken(future, how)
        thread.join()


def send() -> PendingSend:
    """A message of LP 2, the third."""
    route = Route(1, "orders", RouteVersion(1), (LpRange(0, 1024, PartitionId(1), NodeId(1)),), 1_000, 0)
    topic = TopicQueues(route, [PartitionQueue(1, NodeQueue(NodeId(1), "n1", "run"), 0)] * 1024, 0.0)
    return PendingSend((), 1, 0, 0.0, None, first=3, queue=topic.queue_of(2, 1))


def watched(pending: PendingSend, withdraw: Callable[[PendingSend], bool] = lambda _: False) -> ReceiptFuture:
    """Return a message's future."""
    future = pending.listener = ReceiptFuture(withdraw, pending)
    return future


def settle(pending: PendingSend, future: ReceiptFuture, start: threading.Barrier) -> None:
    """Store the message once the other thread begins to wait."""
    start.wait(10)
    pending.outcome, pending.offset = Appended(1, 1, None), 7
    notify_all([future])


def woken(future: ReceiptFuture, how: str) -> bool:
    """Wait in one of the ways that there are."""
    if how == "result":
        return future.result(timeout=10) == RECEIPT
    if how == "wait":
        return wait([future], timeout=10, return_when=FIRST_COMPLETED).done == {future}
    if how == "as_completed":
        return list(as_completed([future], timeout=10)) == [future]
    if how == "asyncio":
        return asyncio.run(awaited(future)) == RECEIPT
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    return called.wait(10)


async def awaited(future: ReceiptFuture) -> Receipt:
    """Return the receipt in a loop."""
    return await asyncio.wait_for(asyncio.wrap_future(future), 10)
