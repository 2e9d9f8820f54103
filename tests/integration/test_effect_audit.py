"""The effect audit: effects removed and added are found; what can't be decided is said to be so."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from mqlayer.archive import create_snapshot
from mqlayer.domain.routing import lp_of
from tests.fixtures.archived import ArchivedTopics
from tests.fixtures.archived_topics import BEGAN, OUTCOMES, RECORDS, ArchivedTopic, Row
from tests.fixtures.commands import Commands
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.timeout(240)

NOW = BEGAN + timedelta(hours=2)
LP = lp_of(b"k1")
OTHER = lp_of(b"k2")


def outcome(first: int, last: int, *, word: str = "handled", group: str = "billing", **facts: Any) -> Row:
    row: Row = {
        "topic": "orders", "group": group, "partition": 1, "first_offset": first, "last_offset": last,
        "outcome": word, "attempts": 1, "delivered_at": BEGAN, "settled_at": BEGAN + timedelta(hours=1), "actor": "m1",
        "reason": None, "epoch": 1, "position": first,
    }  # fmt: skip
    return row | facts


def effect(kind: str, key: str | None, seq: int, **facts: Any) -> Row:
    row: Row = {
        "topic": "orders", "group": "billing", "kind": kind, "source": 1, "lp": LP, "key": key, "seq": seq,
        "seek": 0, "read_at": NOW,
    }  # fmt: skip
    return row | facts


def judged(
    spark: Any, effects: list[Row], outcomes: list[Row]
) -> tuple[dict[Any, str], dict[Any, tuple[str, str | None]]]:
    """Return verdicts of messages by group, LP and seq, and of effects by group, kind, LP and seq with the reason."""
    from mqlayer.spark.transforms import effects as transforms

    topic = ArchivedTopic(partitions=1)
    for number in range(6):
        topic.publish("k1", after_s=number)
    topic.publish("k2", after_s=9)
    records = spark.createDataFrame(topic.records, RECORDS)
    rows = spark.createDataFrame(effects, transforms.EFFECTS)
    cut = spark.createDataFrame(
        [("orders", 1, LP, 1, 6), ("orders", 1, OTHER, 1, 1)],
        "topic string, source bigint, lp int, first_seq bigint, last_seq bigint",
    )
    messages = transforms.ended(records, spark.createDataFrame(outcomes, OUTCOMES)).persist()
    of_messages = transforms.judged_messages(messages, rows, horizon="7 days").collect()
    of_effects = transforms.judged_effects(rows, records, messages, cut).collect()
    return (
        {(row.group, row.lp, row.seq): row.verdict for row in of_messages},
        {(row.group, row.kind, row.lp, row.seq): (row.verdict, row.reason) for row in of_effects},
    )


def test_the_last_message_of_a_key_is_proved_and_those_before_it_are_covered(spark: Any) -> None:
    """k1 has offsets and seqs 1 to 6, k2 has offset 7 and seq 1."""
    rows = [effect("key", "k1", 6), effect("key", "k2", 1, lp=OTHER)]
    messages, effects = judged(spark, rows, [outcome(1, 7)])
    assert messages == {
        **{("billing", LP, seq): "covered" for seq in range(1, 6)},
        ("billing", LP, 6): "proved",
        ("billing", OTHER, 1): "proved",
    }
    assert set(effects.values()) == {("proved", None)}


@pytest.mark.full
def test_an_effect_that_was_removed_is_found(spark: Any) -> None:
    """The row of k2 is gone; the row of k1 was put back by two messages; of `notes` one of two rows is gone."""
    rows = [effect("key", "k1", 4), effect("inbox", None, 1, group="notes")]
    messages, _ = judged(spark, rows, [outcome(1, 7), outcome(1, 2, group="notes"), outcome(1, 1, group="mail")])
    faults = {message for message, verdict in messages.items() if verdict == "without effect"}
    assert faults == {("billing", LP, 5), ("billing", LP, 6), ("billing", OTHER, 1), ("notes", LP, 2)}
    assert (messages["notes", LP, 1], messages["mail", LP, 1]) == ("proved", "no rows")


@pytest.mark.full
def test_an_effect_that_was_added_is_found(spark: Any) -> None:
    """A dead message has one, a message that was never there, and a key of another message."""
    outcomes = [outcome(1, 3), outcome(4, 4, word="exhausted"), outcome(7, 7)]
    rows = [
        effect("key", "k1", 4), effect("key", "k3", 2), effect("inbox", None, 3), effect("inbox", None, 4),
        effect("message", None, 1, lp=OTHER),
    ]  # fmt: skip
    _, effects = judged(spark, rows, outcomes)
    dead = ("without handling", "the message is exhausted")
    assert effects == {
        ("billing", "key", LP, 4): dead,
        ("billing", "key", LP, 2): ("without handling", "the message has another key"),
        ("billing", "inbox", LP, 3): ("proved", None),
        ("billing", "inbox", LP, 4): dead,
        ("billing", "message", OTHER, 1): ("proved", None),
    }


@pytest.mark.full
def test_what_can_not_be_decided_is_no_fault(spark: Any) -> None:
    outcomes = [
        outcome(1, 1, settled_at=NOW - timedelta(days=8)),
        outcome(2, 2, group="sought"),
        outcome(3, 3, group="names"),
        outcome(4, 4, group="retried", word="exhausted"),
        outcome(4, 4, group="retried", word="redriven", position=9),
        outcome(5, 5, group="again", word="parked"),
        outcome(5, 5, group="again", position=9),
    ]
    rows = [
        effect("key", "k2", 9, lp=OTHER),
        effect("key", "k1", 1, group="sought", seek=1),
        effect("name", None, 6, group="names"),
        effect("message", None, 4, group="retried"),
        effect("message", None, 5, group="again"),
        effect("inbox", None, 1, source=2),
        effect("replay", None, 3),
    ]
    messages, effects = judged(spark, rows, outcomes)
    assert messages == {
        ("billing", LP, 1): "expired",
        ("sought", LP, 2): "sought",
        ("names", LP, 3): "named",
        ("again", LP, 5): "proved",
    }
    assert {(*key[:2], word) for key, (word, _) in effects.items()} == {
        ("billing", "key", "later"),
        ("sought", "key", "waiting"),
        ("names", "name", "waiting"),
        ("retried", "message", "waiting"),
        ("again", "message", "proved"),
        ("billing", "inbox", "unknown source"),
        ("billing", "replay", "of a replay"),
    }


@pytest.mark.full
def test_the_rows_of_a_database_are_read_and_judged(
    archived: ArchivedTopics, spark: Any, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the fence's and the inbox's own functions; then one row is removed and another one added."""
    from mqlayer.spark.effect_reader import effects_reader
    from mqlayer.spark.jobs.job import JobParams
    from mqlayer.spark.jobs.runner import SPARK_JOBS, tables_of

    archived.put("k1", "k1", "k2", outcomes=True)
    archived.connection.execute("UPDATE mqlayer_archive.outcome SET outcome = 'handled', reason = NULL")
    ((group,),) = archived.rows("SELECT group_id FROM mqlayer.consumer_group")
    for key, seq in (("k1", 1), ("k1", 2), ("k2", 1)):
        archived.rows(
            "SELECT answer FROM mqlayer_app.fence_v1(%s, %s::smallint, 1, %s, %s, 1, 0)",
            group, lp_of(key.encode()), key, seq,
        )  # fmt: skip
    archived.rows("SELECT mqlayer_app.inbox_put_v1(%s, 1, %s::smallint, 1, NULL, 0, NULL)", group, LP)
    create_snapshot(runtime_of(archived.database), "s")
    read = partial(effects_reader, "s", dsn=archived.dsn, application_dsn=archived.dsn)

    def audit() -> Any:
        found = SPARK_JOBS["effects"](tables_of(spark, "s", dsn=archived.dsn), JobParams(effects=read()))
        words = Counter({one["verdict"]: one["count"] for one in found.facts["messages"]})
        found.release()
        return found, words

    found, words = audit()
    assert (found.good, words) == (True, {"proved": 3})
    assert "Clean: no message contradicts its effect." in found.section.html()
    archived.connection.execute("DELETE FROM mqlayer_app.fence_applied WHERE key = 'k2'")
    archived.rows("SELECT mqlayer_app.inbox_put_v1(%s, 1, %s::smallint, 2, NULL, 0, NULL)", group, OTHER)
    archived.rows("SELECT answer FROM mqlayer_app.fence_v1(%s, %s::smallint, 1, 'k9', 1, 1, 0)", group, LP)
    found, words = audit()
    assert (found.good, words) == (False, {"proved": 2, "without effect": 1})
    assert {(one["verdict"], one["key"]) for one in found.facts["findings"]} == {
        ("without handling", "k9"),
        ("without effect", "k2"),
    }
    monkeypatch.setenv("MQLAYER_DSN", archived.dsn)
    told = run("analytics", "effects", "--snapshot", "s", "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["handled_without_effect"] == 1
