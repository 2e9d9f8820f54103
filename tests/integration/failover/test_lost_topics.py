"""A topic that the control database lost and the outbox knows: created again, it has another id (TRAPS 2h)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mqlayer.logs import event_of
from mqlayer.relay import relay_once
from tests.fixtures.wait import wait_until
from tests.proof.world import QUICK, World

FORMER_ID = 1_000_000
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "fail-over-postgres.md"

pytestmark = pytest.mark.world(partitions=1)


@pytest.fixture(autouse=True)
def _lost(world: World) -> None:
    """The outbox knows the topic under another id, with two messages there; another topic is as it has to be."""
    world.rows("UPDATE mqlayer_app.topic SET topic_id = %s", FORMER_ID)
    world.rows("UPDATE mqlayer_app.counter SET topic_id = %s", FORMER_ID)
    world.add_topic("payments", partitions=1)
    world.publish(2, keys=1, tag="before")


def values(world: World, topic: str) -> list[str]:
    """Return what a topic's partitions hold."""
    return [record.value for record in world.records() if record.topic == topic]


def test_other_topics_go_on_and_the_log_says_what_to_do(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.publish(3, topic="payments", keys=1)
    with world.relay():
        wait_until(lambda: len(values(world, "payments")) == 3, what="the other topic's messages")
    (told, *_) = (record for record in caplog.records if event_of(record) == "topic_not_attached")
    assert told.__dict__["topic"] == "orders"
    assert "the page 'Handle a Postgres fail-over'" in told.__dict__["reason"]
    assert values(world, "orders") == []


def test_its_messages_are_published_anew_once_the_former_one_has_another_name(world: World) -> None:
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
