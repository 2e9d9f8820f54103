"""What operators see and say of the inbox and of versions, and the jobs of both."""

from __future__ import annotations

import pytest

from mqlayer import Versions
from mqlayer.domain.message import Identity
from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.idempotency import InboxEntry, record_effect
from mqlayer.logs import event_of
from mqlayer.receiving.pop_message import PopMessage, Token
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.workers.tasks import TASKS
from tests.fixtures.commands import Commands
from tests.fixtures.kept_connections import kept_session
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

pytestmark = pytest.mark.world(by_commands=True, tasks=True)


@pytest.fixture
def group_id(world: World) -> int:
    routes = RouteCache(world.database)
    settings = GroupSettings()
    group = ensure_group(
        runtime_of(world.database, world.key_prefix), routes, topic="orders", name="mailer", settings=settings
    )
    routes.close()
    return group.group_id


def bring(world: World, version: int) -> None:
    message = PopMessage(None, b"x" * 10, {}, Identity(3, 512, version), 1, Token(1, 1, 1, 1), 0)
    with kept_session(world.dsn) as connection:
        Versions("sink").take(connection, message, entity="order 7", version=version)


def test_the_inbox_says_what_it_has_of_whom(world: World, run: Commands, group_id: int) -> None:
    assert run.text("inbox", "stats") == "the inbox is empty\n"
    with kept_session(world.dsn) as connection:
        for seq in (17, 18):
            record_effect(connection, InboxEntry(group_id, "mailer", "orders", Identity(3, 512, seq)))
        record_effect(connection, InboxEntry(group_id, "mailer", "orders", Identity(3, 512, 18), "order-7"))
        record_effect(connection, InboxEntry(99, "gone", "orders", Identity(3, 512, 18)))
    first, other = run.lines("inbox", "stats")
    assert (first["topic"], first["group"], first["messages"]) == ("orders", "mailer", 3)
    assert (other["group_id"], other["group"]) == (99, "")
    (found,) = run.lines("inbox", "show", "orders", "mailer", "3:512:17")
    assert (found["source"], found["lp"], found["seq"]) == (3, 512, 17)
    assert "=order-7" in run.text("inbox", "show", "orders", "mailer", "--name", "order-7")
    assert "has no effect" in run.text("inbox", "show", "orders", "mailer", "3:512:19")
    assert "either" in run.failure("inbox", "show", "orders", "mailer")
    assert "unknown group" in run.failure("inbox", "show", "orders", "nobody", "3:512:17")


def test_gaps_are_listed_and_passed_over(world: World, run: Commands) -> None:
    assert run.text("versions", "gaps") == "no version is missing\n"
    for version in (3, 4, 9):
        bring(world, version)
    (gap,) = run.lines("versions", "gaps", "sink")
    assert (gap["entity"], gap["missing"], gap["first_held"], gap["held"]) == ("order 7", 1, 3, 3)
    assert "waiting" in run.text("versions", "gaps")
    assert run.lines("versions", "gaps", "other") == []
    assert [row["version"] for row in run.lines("versions", "held", "sink", "order 7")] == [3, 4, 9]
    said = run.text("versions", "set", "sink", "order 7", "2", "--reason", "never published", "--yes")
    assert said == "order 7 goes on with 3; 0 held events dropped\n"
    assert "released" in run.text("versions", "gaps")
    said = run.text("versions", "set", "sink", "order 7", "8", "--reason", "lost as well", "--drop-held", "--yes")
    assert said == "order 7 goes on with 9; 3 held events dropped\n"
    assert run.text("versions", "held", "sink", "order 7") == "no event of it is held\n"
    assert run.text("versions", "forget", "sink", "order 7", "--reason", "again", "--yes") == (
        "order 7 is forgotten; 0 held events dropped\n"
    )
    rows = world.rows("SELECT facts->>'reason' FROM mqlayer.audit WHERE act = 'versions set' ORDER BY audit_id")
    assert rows == [("never published",), ("lost as well",), ("again",)]


def test_the_jobs_forget_and_raise_alarms(world: World, group_id: int, caplog: pytest.LogCaptureFixture) -> None:
    """Cases 77 and 78."""
    with kept_session(world.dsn) as connection:
        for seq in (1, 2):
            record_effect(connection, InboxEntry(group_id, "mailer", "orders", Identity(3, 512, seq)))
        connection.execute("UPDATE mqlayer_app.inbox SET kept_at = kept_at - interval '8 days' WHERE seq = 1")
    bring(world, 2)
    world.rows("UPDATE mqlayer_app.entity_version SET alarm_at = now()")
    TASKS["clean_inbox"]()
    TASKS["watch_versions"]()
    assert world.rows("SELECT seq FROM mqlayer_app.inbox") == [(2,)]
    assert [event_of(record) for record in caplog.records if event_of(record) == "version_gap"] == ["version_gap"]
    assert {name for (name,) in world.rows("SELECT name FROM mqlayer.job")} == {"clean_inbox", "watch_versions"}
