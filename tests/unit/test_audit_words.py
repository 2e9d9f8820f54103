"""Every act that mqlayer audits is told in words."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import mqlayer
from mqlayer.console.audit_words import WORDS, act_words
from mqlayer.inspect.audit_trail import AuditedAct

LITERAL = re.compile(
    r'"((?:node|topic|group|partition|key|parked|dead|bulk|replay|route|outbox|versions|archive|snapshot) [a-z -]+)"'
)


def audited(act: str, target: str, facts: dict[str, Any]) -> str:
    return act_words(AuditedAct(1, datetime.now(UTC), "ann@console", "ops", act, target, facts))


def test_each_audited_act_has_words() -> None:
    found = set()
    for path in Path(mqlayer.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for call in re.finditer(r"write_audit\((.*?)\{|\bact=(\S+ ?\S*)[,)]|_change_\w+\((.*?\))\n", text, re.DOTALL):
            found |= set(LITERAL.findall(call[0]))
    assert {"node set", "topic pause", "parked discard", "bulk resume", "group seek", "snapshot create"} <= found
    assert found - {"dead message"} <= WORDS.keys()


@pytest.mark.parametrize(
    ("act", "target", "facts", "words"),
    [
        (
            "topic set",
            "orders",
            {"body_limit": 2000, "backlog_limit": 0, "before": {"body_limit": 1000, "backlog_limit": 0}},
            "changed topic orders: body limit 1.0 kB → 2.0 kB",
        ),
        (
            "topic set",
            "orders",
            {"retention_days": None, "before": {"retention_days": 7}},
            "changed topic orders: retention 7 days → for ever",
        ),
        (
            "group set",
            "orders/g",
            {
                "attempt_limit": 5,
                "backoff_s": [1.0, 60.0],
                "if_version": 2,
                "before": {"attempt_limit": 3, "backoff_s": [1.0]},
            },
            "changed group g of topic orders: attempt limit 3 → 5, backoff 1 s → 1, 60 s",
        ),
        ("group pause", "orders/g", {"reason": "x"}, "paused group g of topic orders: running → paused"),
        (
            "partition pause",
            "orders/g",
            {"partitions": [3]},
            "paused partition 3 for group g of topic orders: running → paused",
        ),
        (
            "node set",
            "node-2",
            {"from": "redis://a", "to": "redis://b", "lost": {"1": 2}},
            "changed the address of node node-2: redis://a → redis://b: 2 messages lost",
        ),
        (
            "route move",
            "orders",
            {"version": 4, "parents": [3], "successors": [[0, 512, "m"]], "state": "done"},
            "moved partition 3 of topic orders → LPs 0 to 511 on m: route 3 → 4",
        ),
        (
            "route merge",
            "orders",
            {"version": 4, "parents": [3, 4], "successors": [[0, 512, "m"]], "state": "dropped"},
            (
                "planned to merge partitions 3, 4 of topic orders → LPs 0 to 511 on m: route 3 → 4; it was dropped, "
                "the route stayed"
            ),
        ),
        (
            "route split",
            "orders",
            {"change": 1, "version": 4, "parents": [3], "successors": [[0, 512, "n"], [512, 1024, "m"]]},
            "planned to split partition 3 of topic orders → LPs 0 to 511 on n, LPs 512 to 1023 on m: route 3 → 4",
        ),
        (
            "bulk end",
            "orders/g",
            {"bulk": 7, "act": "release", "done": 2, "skipped": 0, "failed": 1},
            "ended bulk action 7 (release parked keys) in group g of topic orders: 2 done, 0 left alone, 1 failed",
        ),
        (
            "dead discard",
            "8",
            {"before": {"cause": "exhausted", "reason": "KeyError: x"}},
            "ruled that dead message 8 stays dead; it said exhausted: KeyError: x",
        ),
        (
            "group seek",
            "orders/g",
            {"to": "2026-11-26T10:00:00+00:00", "replay": False},
            "sent group g of topic orders to 2026-11-26 10:00:00 UTC",
        ),
        (
            "versions set",
            "stock/42",
            {"version": 3, "drop_held": True},
            "stock: entity 42 → version 3; held events dropped",
        ),
        ("an act of later", "x", {}, "an act of later: x"),
        ("node lost", "node-2", {"moved": "?"}, "node lost: node-2"),
    ],
)
def test_an_act_says_what_on_what_from_and_to(act: str, target: str, facts: dict[str, Any], words: str) -> None:
    assert audited(act, target, facts) == words
