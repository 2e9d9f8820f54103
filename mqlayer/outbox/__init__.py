"""The outbox: messages written in the application's own transaction.

from mqlayer import outbox

with Session.begin() as session:
    session.add(order)
    outbox.publish(session, "orders", key=order.account, body={"id": order.id})
"""

from mqlayer.outbox.aside import AsideRow, list_aside, retry_aside
from mqlayer.outbox.collecting import Collector, atransaction, transaction
from mqlayer.outbox.identity import adopt, renew
from mqlayer.outbox.publishing import apublish, publish
from mqlayer.outbox.rotation import rotate

__all__ = [
    "AsideRow",
    "Collector",
    "adopt",
    "apublish",
    "atransaction",
    "list_aside",
    "publish",
    "renew",
    "retry_aside",
    "rotate",
    "transaction",
]
