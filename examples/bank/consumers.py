"""The bank's consumers: every message moves one balance of the read model, once and in order, through the fence."""

from __future__ import annotations

import mqlayer
from examples.bank.effects import CONCURRENCY, GROUP, TOPIC, Entry, ReadModel
from mqlayer.errors import FenceError

app = mqlayer.App()
_model = ReadModel(app.settings)


@app.consumer(TOPIC, group=GROUP, options=mqlayer.MemberOptions(concurrency=CONCURRENCY))
def apply(entry: Entry, ctx: mqlayer.Context) -> None:
    """Move the balance of the message's key."""
    try:
        _model.apply(ctx.key, entry, ctx.fence)
    except FenceError as refusal:
        _model.note_refusal(ctx.key, refusal)
        raise
