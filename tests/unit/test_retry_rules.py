"""Rules for messages that fail: waits, and which errors are final."""

from __future__ import annotations

import pickle
import sqlite3

import pytest

from mqlayer import PauseKey, Reject, RetryLater, Skip
from mqlayer.domain.retry_rules import DEFAULT_BACKOFF_S, LONGEST_TABLE, RetryRules, error_name, exponential
from mqlayer.errors import HandlerControl, HandlerFault, InvalidInput, MessageTimeout, MqlayerError
from mqlayer.groups.group import RetrySettings, settings_of


def test_waits_follow_the_table_and_its_last_entry_serves_for_all_beyond_it() -> None:
    """Case 66."""
    rules = RetryRules(backoff_s=(1.0, 5.0, 30.0))
    assert [rules.wait_s(failed, 0.5) for failed in (1, 2, 3, 4, 400)] == [1.0, 5.0, 30.0, 30.0, 30.0]


def test_jitter_leaves_out_up_to_its_part_of_a_wait_by_the_share_given() -> None:
    rules = RetryRules(backoff_s=(10.0,), jitter=0.2)
    assert [rules.wait_s(1, share) for share in (0.0, 0.5, 1.0)] == [10.0, 9.0, 8.0]


def test_a_group_of_which_nothing_is_said_has_the_sources_table_and_17_attempts() -> None:
    rules = settings_of().rules()
    assert rules == RetryRules()
    assert (rules.backoff_s, rules.attempt_limit, rules.policy) == (DEFAULT_BACKOFF_S, 17, "park")
    assert (DEFAULT_BACKOFF_S[0], DEFAULT_BACKOFF_S[-1]) == (1, 7200)
    assert (rules.time_limit_s, rules.max_time_limit_s, rules.jitter) == (None, None, 0.0)


def test_an_exponential_backoff_grows_by_its_factor_up_to_its_limit() -> None:
    assert exponential(1, 2, 10) == (1, 2, 4, 8, 10)
    assert exponential(0.5, 10, 50) == (0.5, 5, 50)
    assert exponential(7, 2, 7) == (7,)


@pytest.mark.parametrize("numbers", [(0, 2, 10), (1, 1, 10), (5, 2, 4), (1, 2, float("inf")), (1, float("nan"), 5)])
def test_an_exponential_backoff_that_never_grows_or_ends_is_refused(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidInput, match="a factor over 1"):
        exponential(*numbers)
    with pytest.raises(InvalidInput, match=f"more than {LONGEST_TABLE}"):
        exponential(1, 1.0000001, 100)


class Busy(OSError):
    """One that a program brings."""


@pytest.mark.parametrize(
    ("final", "retried", "error", "is_final"),
    [
        ((), (), ValueError(), False),
        (("ValueError",), (), ValueError(), True),
        (("ValueError",), (), KeyError(), False),
        (("LookupError",), (), KeyError(), True),
        (("sqlite3.DatabaseError",), (), sqlite3.IntegrityError(), True),
        (("IntegrityError",), (), sqlite3.IntegrityError(), False),
        ((), ("OSError",), ConnectionError(), False),
        ((), ("OSError",), ValueError(), True),
        (("Exception",), ("OSError",), ConnectionError(), False),
        (("ConnectionError",), ("OSError",), ConnectionResetError(), True),
        (("OSError",), ("OSError",), OSError(), True),
        ((error_name(Busy),), (), Busy(), True),
        (("mqlayer.errors.MessageTimeout",), (), MessageTimeout(5.0), True),
        (("Exception",), (), MessageTimeout(5.0), True),
        ((), ("OSError",), MessageTimeout(5.0), False),
        (("Exception",), ("OSError",), RetryLater(1), False),
        ((), ("OSError",), PauseKey(1), False),
    ],
)
def test_an_error_is_final_by_its_class_or_its_nearest_base_that_is_named(
    final: tuple[str, ...], retried: tuple[str, ...], error: BaseException, *, is_final: bool
) -> None:
    assert RetryRules(non_retryable_errors=final, retryable_errors=retried).is_final(error) is is_final


def test_errors_may_be_said_as_classes_and_in_any_order() -> None:
    settings = settings_of(
        non_retryable_errors=["shop.errors.Gone", KeyError, "KeyError"],
        retryable_errors=[sqlite3.OperationalError, Busy],
    )
    assert settings.non_retryable_errors == ("KeyError", "shop.errors.Gone")
    assert settings.retryable_errors == ("sqlite3.OperationalError", f"{Busy.__module__}.Busy")


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"jitter": 1.5}, "from 0 to 1"),
        ({"jitter": float("nan")}, "from 0 to 1"),
        ({"attempt_limit": 0}, "whole number from 1"),
        ({"attempt_limit": 2.5}, "whole number from 1"),
        ({"policy": "hope"}, "one of park, block, dead_letter, skip"),
        ({"non_retryable_errors": ("NoError",)}, "no exception 'NoError' of its own"),
        ({"non_retryable_errors": ("print",)}, "no exception 'print' of its own"),
        ({"non_retryable_errors": ("a b",)}, "names no exception"),
        ({"retryable_errors": "OSError"}, "not the text 'OSError'"),
        ({"time_limit_s": 0.0}, "over 0 seconds"),
        ({"max_time_limit_s": float("nan")}, "over 0 seconds"),
        ({"time_limit_s": 5.0, "max_time_limit_s": 4.0}, "of 5 s is over max_time_limit_s, 4 s"),
        ({"backoff_s": (1.0, -1.0)}, "0 seconds or more"),
    ],
)
def test_rules_that_no_group_can_have_are_refused(bad: RetrySettings, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        settings_of(**bad)


def test_what_handlers_raise_survives_pickling_and_says_what_it_asks_for() -> None:
    said: list[HandlerControl | HandlerFault] = [
        RetryLater(2.5, "the bank is closed"), Reject("no such account"), Skip(), PauseKey(60), MessageTimeout(5.0),
    ]  # fmt: skip
    for error in said:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
        assert isinstance(again, MqlayerError)
    assert str(said[0]) == "try it again in 2.5 s: the bank is closed"
    assert str(said[1]) == "rejected: no such account"


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_wait_that_never_ends_is_refused(seconds: float) -> None:
    for kind in (RetryLater, PauseKey):
        with pytest.raises(InvalidInput, match="waits for 0 seconds or more"):
            kind(seconds)
    with pytest.raises(InvalidInput, match="say why"):
        Reject("")
