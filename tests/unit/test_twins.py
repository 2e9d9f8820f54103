"""What has a sync and an async form takes the same arguments in both."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqlayer
from mqlayer import outbox
from mqlayer.outbox import OutboxTransaction
from mqlayer.testing import RealApp, TestApp, transactions

OWNERS = (outbox, OutboxTransaction, mqlayer.Context, mqlayer.Batch, mqlayer.Versions, RealApp, TestApp, transactions)


def pairs() -> Iterator[tuple[Any, Any]]:
    for owner in OWNERS:
        names = [name for name in dir(owner) if not name.startswith("_")]
        yield from ((getattr(owner, name), getattr(owner, f"a{name}")) for name in names if f"a{name}" in names)
    for name in ("open", "close", "receive", "ack", "nack", "extend", "fence", "inbox", "__init__"):
        yield getattr(mqlayer.Receiver, name), getattr(mqlayer.AsyncReceiver, name)


COMPLETE_ALONE = {
    "outbox_publish_once", "delayed_publish", "delayed_cancel", "outbox_trace", "outbox_traces", "outbox_here",
    "outbox_uncommitted", "version_set",
}  # fmt: skip
"""Statements on a caller's connection that may commit alone."""


def test_statements_that_record_an_effect_are_refused_without_its_transaction() -> None:
    """One that commits alone would lose the effect behind it."""
    statements = re.compile(r'Statement\(query\("(\w+)"\).*?(in_transaction=True)?\)\n')
    found = {
        (name, bool(refused))
        for path in Path(mqlayer.__file__).parent.rglob("*.py")
        for name, refused in statements.findall(path.read_text())
    }
    assert found == {(name, False) for name in COMPLETE_ALONE} | {
        (name, True)
        for name in (
            "fence",
            "fence_many",
            "inbox_put",
            "large_body_put",
            "large_body_scope",
            "version_take",
            "version_released",
        )
    }


@pytest.mark.parametrize(("sync", "asynchronous"), list(pairs()), ids=lambda one: one.__qualname__)
def test_both_forms_take_the_same_arguments(sync: Any, asynchronous: Any) -> None:
    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(function).parameters.values()
        return [(one.name, one.kind, one.default) for one in found]

    assert arguments(sync) == arguments(asynchronous)


def test_the_pairs_are_found() -> None:
    assert len(list(pairs())) >= 18
    kinds = (mqlayer.Receiver, mqlayer.AsyncReceiver)
    sync, asynchronous = ({name for name in dir(kind) if not name.startswith("_")} for kind in kinds)
    assert sync == asynchronous
