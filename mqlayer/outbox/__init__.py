"""The outbox: messages written in the application's own transaction.

from mqlayer import outbox

with Session.begin() as session:
    session.add(order)
    outbox.publish(session, "orders", key=order.account, body={"id": order.id})
"""

from mqlayer.outbox.aside import AsideRow, discard_aside, list_aside, retry_aside
from mqlayer.outbox.collecting import Collector, atransaction, transaction
from mqlayer.outbox.delayed import (
    Delayed,
    acancel_delayed,
    apublish_delayed,
    cancel_delayed,
    list_delayed,
    publish_delayed,
    release_delayed,
)
from mqlayer.outbox.forgetting import clean_dedup
from mqlayer.outbox.identity import adopt, renew
from mqlayer.outbox.publishing import Published, apublish, apublish_once, publish, publish_once
from mqlayer.outbox.rotation import rotate

__all__ = [
    "AsideRow",
    "Collector",
    "Delayed",
    "Published",
    "acancel_delayed",
    "adopt",
    "apublish",
    "apublish_delayed",
    "apublish_once",
    "atransaction",
    "cancel_delayed",
    "clean_dedup",
    "discard_aside",
    "list_aside",
    "list_delayed",
    "publish",
    "publish_delayed",
    "publish_once",
    "release_delayed",
    "renew",
    "retry_aside",
    "rotate",
    "transaction",
]
