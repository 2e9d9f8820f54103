"""A future of `send_async` is a `concurrent.futures.Future` in all that its users see, though it is made in parts."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, as_completed, wait  # noqa: A004

import pytest

from mqlayer.domain.message import Identity
from mqlayer.producing.listeners import ReceiptFuture
from mqlayer.producing.receipts import Receipt

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


@pytest.mark.parametrize("how", ["result", "wait", "as_completed", "callback"])
def test_threads_that_wait_are_woken_whenever_the_outcome_comes(how: str) -> None:
    """The outcome and the first wait race: neither order may lose the wake-up."""
    for _ in range(200):
        future, start = ReceiptFuture(lambda _: False), threading.Barrier(2)
        thread = threading.Thread(target=settle, args=(future, start))
        thread.start()
        start.wait(10)
        assert woken(future, how)
        thread.join()


def settle(future: ReceiptFuture, start: threading.Barrier) -> None:
    """Set the receipt once the other thread begins to wait."""
    start.wait(10)
    future.set_result(RECEIPT)


def woken(future: ReceiptFuture, how: str) -> bool:
    """Wait in one of the ways that there are."""
    if how == "result":
        return future.result(timeout=10) is RECEIPT
    if how == "wait":
        return wait([future], timeout=10, return_when=FIRST_COMPLETED).done == {future}
    if how == "as_completed":
        return list(as_completed([future], timeout=10)) == [future]
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    return called.wait(10)
