"""`mqlayer size`: needs computed by hand, figures that are the code's and the page's, and values that are refused."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from mqlayer.consuming.api.app import CONNECTIONS_OF_A_MEMBER
from mqlayer.consuming.engine.options import MemberOptions
from mqlayer.domain.names import BODY_LIMIT
from mqlayer.domain.sizing import (
    WEEK_S,
    Figures,
    PlannedLoad,
    node_memory,
    partitions_at_least,
    process_count,
    record_bytes,
    requirements,
)
from mqlayer.errors import InvalidInput
from mqlayer.relay.relay import MOST_CONNECTIONS as OF_A_RELAY
from mqlayer.settings import Settings
from mqlayer.workers.connections import MOST_CONNECTIONS as OF_A_WORKER
from tests.fixtures.commands import Commands

PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "size.md"
EXAMPLE: Final = re.compile(r"```bash\nmqlayer (size .*)\n```\n\n```text\n(.*?)```", re.DOTALL)
RECORD: Final = re.compile(r"^\| record of ([\d,]+) bytes \| ([\d,]+) B \|", re.MULTILINE)
LOAD: Final = PlannedLoad(rate=500)


def needs(load: PlannedLoad) -> dict[str, int]:
    return {one.name: one.value for one in requirements(load)}


def test_the_figures_are_those_of_the_code() -> None:
    assert Figures.of_relay == 2 * OF_A_RELAY + 2
    assert Figures.of_worker == 2 * OF_A_WORKER
    assert Figures.of_consumer == CONNECTIONS_OF_A_MEMBER
    assert MemberOptions().prefetch_bytes == Figures.prefetch_bytes
    assert Settings.model_fields["inbox_horizon_s"].default == WEEK_S


def test_the_page_and_the_command_have_the_same_sizes_of_records() -> None:
    shown = {int(body.replace(",", "")): int(size.replace(",", "")) for body, size in RECORD.findall(page())}
    assert set(shown) == {0, 256, 1_024, 5_000}
    assert {body: round(record_bytes(body)) for body in shown} == pytest.approx(shown, rel=0.15)


def test_the_pages_example_prints_what_the_page_shows(monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    [(words, shown)] = EXAMPLE.findall(page())
    assert Commands().text(*shlex.split(words)) == shown


def test_connections_disk_and_processes_are_those_computed_by_hand() -> None:
    load = replace(LOAD, handler_ms=144, groups=1, relays=2, workers=2, archive_days=2, keys_per_week=1_000)
    found = needs(load)
    # 8 handlers of 144 ms, nine tenths of the time, are 50 messages/s of a process.
    assert (found["consumer_processes"], found["partitions"]) == (10, 20)
    assert found["postgres_connections"] == 52 + 40 + 190
    assert found["outbox_bytes"] == 500 * 1_800 * (256 + Figures.outbox_row)
    assert found["archive_bytes"] == 500 * 2 * 86_400 * (256 + Figures.archived_record)
    assert found["fence_bytes"] == 1_000 * Figures.fenced_key
    assert found["postgres_bytes"] == sum(found[f"{kind}_bytes"] for kind in ("outbox", "archive", "fence"))
    assert "inbox_bytes" not in found


def test_groups_share_processes_with_several_consumers() -> None:
    load = replace(LOAD, rate=100, groups=4, consumers_per_process=4, handler_ms=72)
    # 32 handlers of 72 ms are 400 messages/s: all that four groups get.
    assert process_count(load) == 1
    assert needs(load)["postgres_connections"] == 52 + 40 + 7 + 48
    assert process_count(replace(load, consumers_per_process=1)) == 4


@pytest.mark.parametrize(
    ("more", "grown"),
    [
        ({"stop_s": 28_800.0}, {"node_memory_bytes", "node_disk_bytes"}),
        ({"producers": 10}, {"node_memory_bytes", "postgres_connections"}),
        ({"groups": 2}, {"consumer_processes", "postgres_connections", "consumer_memory_bytes"}),
        ({"failing_messages": 1_000_000}, {"node_memory_bytes"}),
        ({"parked_messages": 5}, {"parked_bytes", "postgres_bytes"}),
        ({"inbox": True}, {"inbox_bytes", "postgres_bytes"}),
        ({"rate": 50_000.0}, {"nodes", "nodes_by_rate", "consumer_processes", "partitions"}),
        ({"node_bytes": 1_000_000_000}, {"nodes", "nodes_by_memory"}),
        ({"node_rate": 100.0}, {"nodes", "nodes_by_rate"}),
        ({"process_rate": 100.0}, {"consumer_processes", "partitions"}),
    ],
)
def test_each_wish_raises_its_needs(more: dict[str, Any], grown: set[str]) -> None:
    before, after = needs(LOAD), needs(replace(LOAD, **more))
    assert grown <= {name for name, value in after.items() if value > before.get(name, 0)}


def test_a_load_without_an_outbox_has_no_rows_of_it() -> None:
    found = needs(replace(LOAD, relays=0, producers=1))
    assert "outbox_bytes" not in found
    assert found["postgres_bytes"] == 0


def test_memory_of_all_nodes_grows_by_kind() -> None:
    few, many = node_memory(replace(LOAD, partitions=1)), node_memory(replace(LOAD, partitions=101))
    assert many["partitions"] - few["partitions"] == 100 * Figures.partition
    assert many["groups"] - few["groups"] == 100 * Figures.group
    assert (few["marks"], many["marks"]) == (1_024 * Figures.mark, 1_024 * Figures.packed_mark)


def test_more_consumers_than_a_topic_has_partitions_are_refused(logging_as_before: None) -> None:
    with pytest.raises(InvalidInput, match="several topics"):
        partitions_at_least(replace(LOAD, rate=1e6, handler_ms=1_000))
    assert "several topics" in Commands().failure("size", "--rate", "1000000", "--handler-ms", "1000")


@pytest.mark.parametrize("words", [("--rate", "0"), ("--rate", "1", "--body", str(BODY_LIMIT + 1)), ()])
def test_values_out_of_bounds_are_refused(words: tuple[str, ...], logging_as_before: None) -> None:
    assert Commands()("size", *words).exit_code == 2


def test_json_has_bytes_as_numbers(logging_as_before: None) -> None:
    found = {line["name"]: line for line in Commands().lines("size", "--rate", "500")}
    assert found.keys() == needs(LOAD).keys()
    assert found["node_memory_bytes"]["value"] == sum(node_memory(LOAD).values())
    assert all(line["computed"] and line["figures"] for line in found.values())


def page() -> str:
    return PAGE.read_text("utf-8")
