"""A topic that the control database lost and the outbox knows: created again, it has another id (TRAPS 2h)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mqlayer.relay import relay_once
from tests.fixtures.wait import wait_until
from tests.proof.outbox_world import QUICK, OutboxWorld

FORMER_ID = 1_000_000
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "fail-over-postgres.md"


@pytest.fixture
def world(database_dsn: str, redis_url: str, key_prefix: str) -> OutboxWorld:
    """A topic that the outbox knows under another id, with two messages there; and one that is as it has to be."""
    world = OutboxWorld(database_dsn, key_prefix, [redis_url])
    world.add_topic("orders", partitions=1)
    world.rows("UPDATE mqlayer_app.topic SET topic_id = %s", FORMER_ID)
    world.rows("UPDATE mqlayer_app.counter SET topic_id = %s", FORMER_ID)
    world.add_topic("payments", partitions=1)
    world.publish(2, keys=1, tag="before")
    return world


def values(world: OutboxWorld, topic: str) -> list[str]:
    """Return what a topic's partitions hold."""
    return [record.value for record in world.records() if record.topic == topic]


def test_other_topics_go_on_and_the_log_says_what_to_do(world: OutboxWorld, caplog: pytest.LogCaptureFixture) -> None:
    world.publish(3, topic="payments", keys=1)
    with world.relay():
        wait_until(lambda: len(values(world, "payments")) == 3, what="the other topic's messages")
    (told, *_) = (record for record in caplog.records if record.message == "topic_not_attached")
    assert told.__dict__["topic"] == "orders"
    assert "docs/how-to/fail-over-postgres.md" in told.__dict__["reason"]
    assert values(world, "orders") == []


def test_its_messages_are_published_anew_once_the_former_one_has_another_name(world: OutboxWorld) -> None:
    """As docs/how-to/fail-over-postgres.md has it."""
    rename, publish = re.findall(r"```sql\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    relay_once(world.settings(), limits=QUICK)
    world.rows("SELECT mqlayer_app.publish_at_v1('orders', 'key-0', 'later', now() + interval '1 day')")
    world.rows(rename)
    relay_once(world.settings(), limits=QUICK)
    world.rows(publish)
    world.publish(1, keys=1, tag="after")
    world.rows("UPDATE mqlayer_app.delayed SET due_at = now()")
    with world.relay():
        wait_until(lambda: len(values(world, "orders")) == 4, what="all of its messages")
    assert values(world, "orders")[:3] == ["before-0", "before-1", "after-0"]
    assert world.rows("SELECT DISTINCT topic_id FROM mqlayer_app.outbox WHERE topic_id = %s", FORMER_ID) == []
