"""`mqlayer parked`, `dead`, `key skip-head`, and what other commands say of parked keys: words, JSON, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mqlayer.cli.message_output import SHOWN_LIMIT
from mqlayer.doctor import CheckStatus, Finding
from mqlayer.doctor.control import check_parked
from mqlayer.doctor.findings import LIMITS
from mqlayer.doctor.postgres import CheckedDatabase
from mqlayer.domain.body_text import decoded
from mqlayer.domain.message import Record
from mqlayer.domain.routing import lp_of
from mqlayer.groups import join
from tests.fixtures.commands import Commands, facts_of
from tests.fixtures.consumers import Stage
from tests.fixtures.failed_messages import Failing, identity_of


@pytest.fixture
def failing(stage: Stage) -> Failing:
    """A group of a topic of two partitions, with a member that lives."""
    failing = Failing(stage)
    join(stage.database, group_id=failing.group_id, member_id="m1", lease_s=600)
    return failing


@pytest.fixture
def typed(failing: Failing, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    """Commands on the stage's database."""
    monkeypatch.setenv("MQLAYER_DSN", failing.stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", failing.stage.prefix)
    return Commands()


def numbered(failing: Failing, key: str, *numbers: int) -> list[tuple[int, Record]]:
    return failing.publish(*((key, str(number).encode()) for number in numbers))


# -- parked ----------------------------------------------------------------------------------------------------------


def test_parked_keys_are_listed_shown_released_and_discarded(failing: Failing, typed: Commands) -> None:
    assert typed.text("parked", "list") == "nothing is parked\n"
    a, b = numbered(failing, "a", 1, 2), numbered(failing, "b", 3)
    failing.park(*a, attempts=17)
    failing.park(*b, cause="retry", due_in_s=600, attempts=2)
    failing.attempt(a[0], 17, "KeyError at shop.py:9")

    (line,) = typed.lines("parked", "list", "orders", "g", "--key", "a")
    since, place = line.pop("parked_at"), line.pop("cursor")
    assert (since > "2026", place.endswith(b"a".hex())) == (True, True)
    assert line == {
        "topic": "orders", "group": "g", "lp": int(lp_of(b"a")), "key": "a", "alone": False, "messages": 2,
        "bytes": sum(len(r.m) + len(r.key) + len(r.body) for _, r in a), "head": str(identity_of(a[0])),
        "cause": "exhausted", "attempts": 17, "due_at": None, "due_in_s": None,
    }  # fmt: skip
    table = typed.text("parked", "list", "orders", "g")
    assert ("when released" in table, "in 10 min" in table, "there may be more" in table) == (True, True, False)
    first = typed.text("parked", "list", "--limit", "1").splitlines()
    place = first[-1].removeprefix("there may be more: --after ")
    rest = typed.lines("parked", "list", "--after", place)
    assert len(rest) == 1
    assert [one["key"] for one in typed.lines("parked", "list", "--waiting")] == ["a"]

    shown = typed.text("parked", "show", "orders", "g", "a")
    assert facts_of(shown)["cause"] == "exhausted"
    assert [str(identity_of(one)) in shown for one in a] == [True, True]
    assert "and 1 message more" in typed.text("parked", "show", "orders", "g", "a", "--limit", "1")
    (whole,) = typed.lines("parked", "show", "orders", "g", "a")
    assert [one["message"] for one in whole["line"]] == [str(identity_of(one)) for one in a]
    one = typed.text("parked", "show", "orders", "g", "--message", str(identity_of(a[0])))
    assert ("KeyError at shop.py:9" in one, "next attempt when an operator releases it" in one) == (True, True)

    assert typed.text("parked", "release", "orders", "g", "a") == "key a will be tried now\n"
    assert failing.key_row("a") == ("exhausted", True, 0)
    told = typed.text("parked", "release", "orders", "g", "--all", "--cause", "retry")
    assert told == "1 parked key of group g of topic orders will be tried now\n"
    told = typed.text("parked", "discard", "orders", "g", "a", "--head", "--reason", "poison")
    assert told == "1 message of key a discarded: see mqlayer dead list orders g\n"
    told = typed.text("parked", "discard", "orders", "g", "--message", str(identity_of(b[0])), "--reason", "old")
    assert told.startswith(f"1 message of the key of message {identity_of(b[0])} discarded")
    assert (failing.parked(), failing.dead()) == ([b"2"], [b"1", b"3"])


def test_what_is_not_parked_is_refused_with_what_to_do(failing: Failing, typed: Commands) -> None:
    for words in (("show",), ("release",), ("discard", "--reason", "no")):
        said = typed.failure("parked", words[0], "orders", "g", "z", *words[1:])
        assert "mqlayer parked list orders" in said
    assert "choose one" in typed.failure("parked", "release", "orders", "g", "a", "--all")
    assert "name a key" in typed.failure("parked", "show", "orders", "g")
    assert "with its zone" in typed.failure("parked", "list", "--since", "yesterday")
    assert typed("parked", "discard", "orders", "g", "a").exit_code == 2, "no reason"


# -- dead ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dead_messages_are_listed_shown_and_discarded(failing: Failing, typed: Commands) -> None:
    assert typed.text("dead", "list") == "no message is dead\n"
    a = failing.publish(("a", b'{"id": 7, "who": "J\xc3\xb6rg"}'), ("a", b"\x00\xff"))
    failing.dead_letter(a[0], reason="KeyError at shop.py:9\nsecond line", age_s=60)
    failing.dead_letter(a[1], cause="rejected", reason="no such customer")
    failing.attempt(a[0], 1, "KeyError at shop.py:9")
    lines = typed.lines("dead", "list", "orders", "g")
    assert [(one["dead_id"], one["cause"], one["key"]) for one in lines] == [
        (2, "rejected", "a"),
        (1, "exhausted", "a"),
    ]
    assert lines[1]["reason"] == "KeyError at shop.py:9\nsecond line"
    table = typed.text("dead", "list", "--limit", "1")
    assert table.splitlines()[-1] == "there may be more: --after 2"
    assert [one["dead_id"] for one in typed.lines("dead", "list", "--after", "2")] == [1]
    assert "second line" not in typed.text("dead", "list")
    assert [one["dead_id"] for one in typed.lines("dead", "list", "--error", "customer")] == [2]

    shown = typed.text("dead", "show", str(identity_of(a[0])))
    assert '"who": "J\u00f6rg"' in shown
    assert "body: 25 B, shown as json" in shown
    (whole,) = typed.lines("dead", "show", "1")
    assert (whole["message"], whole["body_is"], whole["body_cut"]) == (str(identity_of(a[0])), "json", False)
    assert json.loads(whole["body"]) == {"id": 7, "who": "J\u00f6rg"}
    assert [one["error"] for one in whole["attempts"]] == ["KeyError at shop.py:9"]
    assert typed("dead", "show", "2", "--raw").stdout_bytes == b"\x00\xff"
    assert "\n00 ff\n" in typed.text("dead", "show", "2")

    assert typed.text("dead", "discard", "1", "--reason", "cancelled") == "dead message 1 is discarded\n"
    assert typed.lines("dead", "list", "--cause", "discarded")[0]["reason"] == "cancelled"
    assert "mqlayer dead list" in typed.failure("dead", "show", "4711")
    assert "source:lp:seq" in typed.failure("dead", "show", "what")


@pytest.mark.parametrize(
    ("body", "kind", "shown"),
    [
        (None, None, None),
        (b"", "text", ""),
        (b'{"b":1,"a":[]}', "json", '{\n  "b": 1,\n  "a": []\n}'),
        (b"\x1b[31mred", "text", "\x1b[31mred"),
        ("J\u00f6rg\nlives".encode(), "text", "J\u00f6rg\nlives"),
        (b"\xff\x01", "hex", "ff 01"),
        (b"[" * 100_000, "text", "[" * 100_000),
        (b"9" * 10_000, "text", "9" * 10_000),
    ],
)
def test_a_body_is_shown_as_what_it_seems_to_be(body: bytes | None, kind: str | None, shown: str | None) -> None:
    assert decoded(body) == (kind, shown)


def test_a_long_body_is_cut_and_says_so(failing: Failing, typed: Commands) -> None:
    body = b"x" * (SHOWN_LIMIT + 7)
    failing.dead_letter(*failing.publish(("a", body)))
    assert "7 more characters; --raw writes all of it" in typed.text("dead", "show", "1")
    assert typed.lines("dead", "show", "1")[0]["body_cut"]
    assert typed("dead", "show", "1", "--raw").stdout_bytes == body


def test_redrive_by_command_one_a_key_and_the_rest(failing: Failing, typed: Commands) -> None:
    """Case 68."""
    failing.dead_letter(*numbered(failing, "a", 1, 2), *numbered(failing, "b", 3, 4))
    (bodiless,) = failing.dead_letter(*numbered(failing, "c", 5), body=False)
    assert "say which" in typed.failure("dead", "redrive", "orders", "g")
    assert "say which" in typed.failure("dead", "redrive", "orders", "g", "--all", "--key", "a")
    told = typed.text("dead", "redrive", "orders", "g", "--all", "--plan")
    assert told == ("5 dead messages would be sent, but 1 of them have no body; nothing was changed: --yes does this\n")
    assert typed.lines("dead", "redrive", "orders", "g", "--all") == [{"messages": 5, "without_body": 1}]
    told = typed.text("dead", "redrive", "orders", "g", "--message", "3", "--yes")
    assert told == "bulk action 1 is done: 1 message given back, 0 skipped, 0 failed; mqlayer bulk show 1\n"
    (line,) = typed.lines("dead", "redrive", "orders", "g", "--key", "a", "--rate", "1000", "--yes")
    assert (line["state"], line["done"], line["per_s"], line["filter"]) == ("done", 2, 1_000.0, {"key": "a"})
    assert "left to the worker" in typed.text("dead", "redrive", "orders", "g", "--all", "--background", "--yes")
    assert [one["state"] for one in typed.lines("bulk", "list")] == ["running", "done", "done"]
    assert typed.text("bulk", "cancel", "3") == (
        "bulk action 3 is cancelled: 0 messages given back, 0 skipped, 0 failed\n"
    )
    assert "is cancelled" in typed.failure("bulk", "resume", "3")
    typed.text("dead", "redrive", "orders", "g", "--all", "--yes")
    results = typed.lines("bulk", "show", "4")[0]["items"]
    assert [(one["dead_id"], one["result"]) for one in results] == [(4, "done"), (bodiless, "no_body")]
    assert typed.text("bulk", "show", "4", "--limit", "1").splitlines()[-1] == "there may be more: --after 1"
    assert (failing.parked("a"), failing.parked("b")) == ([b"1", b"2"], [b"3", b"4"])
    assert len(typed.lines("dead", "list", "--redriven")) == 5


# -- key skip-head, and what others say ------------------------------------------------------------------------------


def test_the_head_of_a_key_is_passed_over_by_command(failing: Failing, typed: Commands) -> None:
    """Case 69."""
    a = numbered(failing, "a", 1, 2)
    words = ("key", "skip-head", "orders", "g", "a", "--reason", "poison")
    assert "waits for message" in typed.failure(*words, "--message", str(identity_of(a[1])))
    told = typed.text(*words, "--message", str(identity_of(a[0])))
    assert told == f"message {identity_of(a[0])} is passed over: dead message 1\n"
    failing.park(a[1])
    result = typed(*words)
    assert result.stdout == f"message {identity_of(a[1])} is passed over: dead message 2\n"
    assert "its ack is refused" in result.stderr
    nothing = typed.failure("key", "skip-head", "orders", "g", "a b", "--reason", "poison")
    assert "see where it is: mqlayer key explain orders 'a b' --group g" in nothing


def explained(typed: Commands, key: str) -> dict[str, Any]:
    (found,) = typed.lines("key", "explain", "orders", key, "--group", "g")
    return found


def test_a_parked_key_is_explained_with_what_to_run_next(failing: Failing, typed: Commands) -> None:
    assert explained(typed, "a")["parked"] is None
    a = numbered(failing, "a b", 1, 2)
    failing.park(*a, attempts=17)
    found = explained(typed, "a b")
    parked = found["parked"]
    assert (parked["cause"], parked["attempts"], parked["messages"], parked["due_at"]) == ("exhausted", 17, 2, None)
    assert parked["head"] == str(identity_of(a[0]))
    assert found["run_next"].startswith("mqlayer parked release orders g 'a b'  # or discard it, or key skip-head")
    said = typed.text("key", "explain", "orders", "a b", "--group", "g")
    assert (
        f"cause exhausted: 2 messages, the first is {identity_of(a[0])}, 17 failed attempts, next attempt when" in said
    )
    failing.sql("UPDATE mqlayer.parked_key SET cause = 'rejected'")
    skip = "mqlayer key skip-head orders 'a b' --group g  # the handler rejected it; once a changed handler takes it: "
    assert explained(typed, "a b")["run_next"] == f"{skip}mqlayer parked release orders g 'a b'"
    failing.sql("UPDATE mqlayer.parked_key SET due_at = clock_timestamp() + interval '1 hour'")
    assert explained(typed, "a b")["run_next"].startswith("nothing: it is tried again at ")
    failing.sql("UPDATE mqlayer.parked_key SET due_at = clock_timestamp()")
    assert explained(typed, "a b")["run_next"] == "nothing: it is due, its owner tries it"
    failing.sql("UPDATE mqlayer.member SET lease_until = '-infinity'")
    assert explained(typed, "a b")["run_next"].startswith("mqlayer consume")


def test_lag_names_what_is_parked(failing: Failing, typed: Commands) -> None:
    assert "parked" not in typed.text("group", "lag", "orders", "g")
    failing.park(*numbered(failing, "a", 1, 2))
    failing.park(*numbered(failing, "b", 3), due_in_s=600)
    (found,) = typed.lines("group", "lag", "orders", "g")
    since, size = found["parked"].pop("since"), sum(len(r.m) + len(r.key) + len(r.body) for _, r in failing.records())
    assert (found["parked"], since > "2026") == ({"keys": 2, "messages": 3, "waiting": 1, "bytes": size}, True)
    said = typed.text("group", "lag", "orders", "g")
    assert "parked: 3 messages of 2 keys, 1 of them wait for an operator: mqlayer parked list orders g" in said


def test_the_doctor_names_keys_that_wait_for_an_operator_and_keys_that_nobody_tries(failing: Failing) -> None:
    def findings() -> list[Finding]:
        with failing.stage.database.connection() as connection:
            return check_parked(CheckedDatabase(connection, "database", "here"), LIMITS)

    (fine,) = findings()
    assert (fine.verdict, fine.seen) == (CheckStatus.OK, "no key is parked")
    failing.park(*numbered(failing, "a", 1), due_in_s=600)
    (fine,) = findings()
    assert (fine.verdict, fine.seen) == (CheckStatus.OK, "none of 1 parked keys waits for an operator")
    failing.park(*numbered(failing, "b", 2))
    (waits,) = findings()
    assert waits.verdict is CheckStatus.WARNING
    assert "1 of 2 parked keys of group g of topic orders wait for an operator" in waits.seen
    assert waits.fix.startswith("mqlayer parked list orders g --waiting")
    failing.park(*numbered(failing, "c", 3), due_in_s=-600)
    overdue, _ = findings()
    assert overdue.verdict is CheckStatus.BROKEN
    assert "has been due for 10 min, and nobody tries it" in overdue.seen
    failing.sql("UPDATE mqlayer.consumer_group SET key_messages_limit = 1")
    _, full, _ = findings()
    assert (full.verdict, "mqlayer parked stats orders g" in full.fix) == (CheckStatus.WARNING, True)
