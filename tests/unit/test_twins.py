"""What has a sync and an async form takes the same arguments in both."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
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
