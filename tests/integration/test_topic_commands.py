"""`topic show`."""

from __future__ import annotations

import pytest

from mqlayer.archive import set_retention
from mqlayer.domain.names import DEFAULT_BODY_LIMIT
from tests.fixtures.commands import Commands, facts_of
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of


@pytest.fixture
def run(stage: Stage, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    return Commands()


def test_a_topic_is_shown_with_its_partitions_and_groups(stage: Stage, run: Commands) -> None:
    stage.send_numbers(20, 5)
    stage.consume(Recorder(), group="done")
    wait_until(lambda: run.lines("topic", "show", "orders")[0]["groups"][0]["lag"] == 0, what="all is settled")
    set_retention(runtime_of(stage.database), "orders", days=30)
    (found,) = run.lines("topic", "show", "orders")
    assert (found["topic"], found["version"], found["retention_days"], found["body_limit"]) == (
        "orders", 1, 30, DEFAULT_BODY_LIMIT,
    )  # fmt: skip
    assert sum(one["published"] for one in found["partitions"]) == 100
    assert all(one["bytes"] > 0 and one["node"] == "node-1" for one in found["partitions"])
    ((group),) = found["groups"]
    assert (group["group"], group["lag"]) == ("done", 0)
    shown = facts_of(run.text("topic", "show", "orders"))
    assert (shown["body limit"], shown["archived"], shown["route"]) == ("262 kB", "no", "version 1")
    assert "unknown topic 'mails'" in run.failure("topic", "show", "mails")
