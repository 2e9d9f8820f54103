"""Pages of the console where a group has a million parked keys and a million dead messages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

import psycopg

from bench.console import browser_here
from bench.long_lists import ROWS, fill_group
from bench.rebalance import new_group
from bench.registry import Line, bench, note
from bench.stage import Stage
from mqlayer.redelivery import BULK_LIMIT, dead_messages, parked_keys, plan_bulk
from mqlayer.redelivery.filters import ParkedFilter

ROUNDS: Final = 20
LIMIT_MS: Final = 300.0
OUTBOX_ROWS: Final = 1_000_000
FILL_OUTBOX: Final = """
INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, body)
SELECT 10000000 + n, c.topic_id, c.lp, 0, c.seq + 1 + n / 1024, now(), 'key', 'body'
FROM generate_series(0, %(rows)s - 1) AS n JOIN mqlayer_app.counter c ON c.lp = n % 1024 AND c.topic = %(topic)s;
UPDATE mqlayer_app.counter SET seq = seq + (%(rows)s + 1023 - lp) / 1024 WHERE topic = %(topic)s;
"""


@bench("console_lists")
def console_lists(stage: Stage) -> Iterator[Line]:
    """The 95th percentile of a page in ms after its first load, with a million parked keys and a million dead messages
    of one group, and a million rows in the outbox. There is nothing to compare with; the target is in ms."""
    system = stage.system(partitions=1)
    group = new_group(system)
    fill_group(system, group, ROWS)
    where: dict[str, Any] = {"topic": group.topic, "group": group.name}
    key = parked_keys(system.database, ParkedFilter(**where), limit=1)[0]
    (dead,) = dead_messages(system.database, **where, limit=1)
    planned = plan_bulk(system.runtime, "release", group.topic, group.name, ParkedFilter(), first=True)
    assert planned.size == BULK_LIMIT
    middle = parked_keys(system.database, ParkedFilter(**where), limit=1_000).next
    old = dead_messages(system.database, **where, limit=1_000).next
    of_group = f"topic={group.topic}&group={group.name}"
    fill_outbox(system.dsn, group.topic, OUTBOX_ROWS)
    pages = {
        "overview": "/",
        "outbox": "/outbox",
        "parked": "/parked",
        "parked of a group": f"/parked?{of_group}",
        "parked, a later page": f"/parked?{of_group}&after={middle}",
        "parked by error": f"/parked?{of_group}&error=keyerror",
        "parked by an error that none has": f"/parked?{of_group}&error=nowhere",
        "parked by key": "/parked?key=key-777777",
        "parked by age": f"/parked?{of_group}&older=604800",
        "a parked key": f"/parked/{group.topic}/{group.name}?key={key.key}",
        "dead": "/parked?show=dead",
        "dead of a group": f"/parked?show=dead&{of_group}",
        "dead, a later page": f"/parked?show=dead&{of_group}&after={old}",
        "dead by error": f"/parked?show=dead&{of_group}&error=keyerror",
        "dead by an error that none has": f"/parked?show=dead&{of_group}&error=nowhere",
        "dead by key": f"/parked?show=dead&{of_group}&key=key-7777",
        "dead by age": f"/parked?show=dead&{of_group}&older=604800",
        "a dead message": f"/dead/{dead.dead_id}",
        "a key": f"/keys?topic={group.topic}&key={key.key}",
        "a bulk action": f"/bulk/{planned.bulk_id}",
        "its plan": f"/actions/bulk-plan?{of_group}&act=release",
    }
    with browser_here(system.settings) as browser:
        for name, path in pages.items():
            figure = _percentile_ms(browser, path)
            note(f"  {name}: {figure:.1f} ms")
            yield Line(name=f"console_lists[{name}]", value=round(figure, 1), unit="ms", baseline=None, ratio=None,
                       target=LIMIT_MS)  # fmt: skip


def fill_outbox(dsn: str, topic: str, rows: int) -> None:
    """Have so many rows of a topic wait, spread over all LPs."""
    with psycopg.connect(dsn, cursor_factory=psycopg.ClientCursor, autocommit=True) as connection:
        connection.execute(FILL_OUTBOX.replace("n % 1024", "n %% 1024").encode(), {"rows": rows, "topic": topic})
        connection.execute("ANALYZE")


def _percentile_ms(browser: Any, path: str) -> float:
    browser.get(path)
    figures = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        answer = browser.get(path)
        figures.append((time.perf_counter() - began) * 1_000)
        assert answer.status_code == 200, answer.text
        assert "Not to be shown now" not in answer.text, answer.text
    return statistics.quantiles(figures, n=20)[-1]
