"""The check that no test leaves a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.fixtures.threads import stack_of, threads_left


@pytest.fixture(scope="module")
def of_the_module() -> Iterator[threading.Thread]:
    """A thread of a wider fixture, which begins within a test."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="of-the-module")
    thread.start()
    yield thread
    done.set()
    thread.join()


def test_a_thread_that_ends_in_time_is_not_left_and_one_that_does_not_is_told_with_its_place() -> None:
    before, ends, stays = threading.enumerate(), threading.Event(), threading.Event()
    threads = [threading.Thread(target=event.wait, name=name) for event, name in ((ends, "ends"), (stays, "stays"))]
    for thread in threads:
        thread.start()
    assert set(threads_left(before, within_s=0.0)) == set(threads)
    ends.set()
    threads[0].join()
    (left,) = threads_left(before, within_s=0.0)
    assert left.name == "stays"
    assert "in wait" in stack_of(left)
    assert threads_left(threading.enumerate(), within_s=0.0) == [], "it was there before"
    stays.set()
    assert threads_left(before) == []


def test_a_wider_fixtures_thread_is_not_its_first_tests(request: pytest.FixtureRequest) -> None:
    before = threading.enumerate()
    thread = request.getfixturevalue("of_the_module")
    assert thread in threading.enumerate()
    assert thread not in before
    assert threads_left(before, within_s=0.0) == []
