"""`mqlayer size`: needs computed by hand, figures that are the code's and the page's, and values that are refused."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from bench.memory_table import BENCHES as MEMORY_BENCHES
from bench.memory_table import TEXTS, size, table
from bench.recording import RESULTS, all_of
from mqlayer.consuming.api.app import CONNECTIONS, CONNECTIONS_OF_A_MEMBER
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
from mqlayer.producing import ProducerOptions
from mqlayer.relay.relay import MOST_CONNECTIONS as OF_A_RELAY
from mqlayer.settings import Settings
from mqlayer.workers.connections import MOST_CONNECTIONS as OF_A_WORKER
from tests.fixtures.commands import Commands

PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "size.md"
EXAMPLE: Final = re.compile(r"```bash\nmqlayer (size .*)\n```\n\n```text\n(.*?)```", re.DOTALL)
RECORD: Final = re.compile(r"^\| node \| record of ([\d,]+) bytes \| ([\d,]+) B \|", re.MULTILINE)
COUNTED: Final = re.compile(
    r"^\| (relay|one consumer|three consumers|direct producer) \| \d+ \| \d+ \| (\d+) \|$", re.MULTILINE
)
LOAD: Final = PlannedLoad(rate=500)


def needs(load: PlannedLoad) -> dict[str, int]:
    return {one.name: one.value for one in requirements(load)}


def test_the_figures_are_those_of_the_code() -> None:
    assert Figures.of_relay == 2 * OF_A_RELAY + 2
    assert Figures.of_worker == 2 * OF_A_WORKER
    assert (Figures.of_consumer_process, Figures.of_consumer) == (7 + CONNECTIONS, CONNECTIONS_OF_A_MEMBER)
    assert MemberOptions().prefetch_bytes == Figures.prefetch_bytes
    assert ProducerOptions().max_pending_messages == Figures.pending_messages
    assert ProducerOptions().max_pending_bytes == Figures.pending_bytes
    assert Settings.model_fields["inbox_horizon_s"].default == WEEK_S


def test_a_nodes_connections_are_those_that_the_page_counted() -> None:
    one, more = Figures.node_of_consumer_process, Figures.node_of_consumer
    assert {kind: int(count) for kind, count in COUNTED.findall(page())} == {
        "relay": Figures.node_of_relay,
        "one consumer": one + more,
        "three consumers": one + 3 * more,
        "direct producer": Figures.node_of_producer,
    }


def test_the_pages_table_is_made_from_the_record() -> None:
    """Where this fails, run `python -m bench.memory_table` and put its lines into the page."""
    assert table(all_of(RESULTS)) in page()


def test_measured_bytes_are_near_the_figures_that_are_computed_with() -> None:
    """Where this fails, a release takes other amounts of memory: change `Figures`. The page says the rest."""
    known = {name for lines in TEXTS.values() for name in lines}
    runs = [line for run in all_of(RESULTS) for line in run.lines if line.bench in MEMORY_BENCHES]
    last = {line.name: line.median() for line in runs}
    assert set(last) == known
    apart = {name for name, line in last.items() if not 0.7 <= (line.ratio or 0) <= 1.1}
    # An outbox row takes 150 to 210 bytes, a partition its first block of records.
    assert apart <= {"node_memory[partition without records]"}


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
    assert needs(load)["postgres_connections"] == 52 + 40 + 17 + 8
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


def test_processes_that_publish_take_the_memory_computed_by_hand() -> None:
    found = needs(replace(LOAD, relays=3, producers=2, partitions=10))
    assert found["relay_memory_bytes"] == 3 * (78_000_000 + 10 * 1_900) + 1_024 * 470
    assert found["producer_memory_bytes"] == 2 * (72_000_000 + 10 * 1_000 + 1_024 * 1_800 + 100_000 * 2_256)
    large = replace(LOAD, body_bytes=10_000, producers=1, partitions=10)
    assert needs(large)["producer_memory_bytes"] - 72_000_000 - 10_000 - 1_843_200 == 200_000_000 + 64_000_000
    assert not {"relay_memory_bytes", "producer_memory_bytes"} & needs(replace(LOAD, relays=0)).keys()
    one, two = (needs(replace(LOAD, groups=2, consumers_per_process=each)) for each in (1, 2))
    assert one["consumer_memory_bytes"] - two["consumer_memory_bytes"] == 72_000_000 - 340_000


def test_sizes_are_shown_in_bytes_and_megabytes() -> None:
    assert [size(one) for one in (59.4, 13_481, 72_622_080)] == ["59 B", "13,481 B", "72.6 MB"]


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
