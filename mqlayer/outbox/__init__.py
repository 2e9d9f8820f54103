"""The outbox: messages written in the application's own transaction.

from mqlayer import outbox

with Session.begin() as session:
    session.add(order)
    outbox.publish(session, "orders", key=order.account, body={"id": order.id})
"""

from mqlayer.outbox.dedup_cleanup import clean_dedup
from mqlayer.outbox.delayed import (
    Delayed,
    acancel_delayed,
    apublish_delayed,
    cancel_delayed,
    list_delayed,
    publish_delayed,
    release_delayed,
)
from mqlayer.outbox.identity import adopt, renew
from mqlayer.outbox.publisher import Published, apublish, apublish_once, publish, publish_once
from mqlayer.outbox.quarantine import (
    QuarantinedRow,
    audit_quarantine,
    discard_quarantined,
    list_quarantined,
    retry_quarantined,
)
from mqlayer.outbox.rotation import rotate
from mqlayer.outbox.transaction_buffer import OutboxTransaction, atransaction, transaction

__all__ = [
    "Delayed",
    "OutboxTransaction",
    "Published",
    "QuarantinedRow",
    "acancel_delayed",
    "adopt",
    "apublish",
    "apublish_delayed",
    "apublish_once",
    "atransaction",
    "audit_quarantine",
    "cancel_delayed",
    "clean_dedup",
    "discard_quarantined",
    "list_delayed",
    "list_quarantined",
    "publish",
    "publish_delayed",
    "publish_once",
    "release_delayed",
    "renew",
    "retry_quarantined",
    "rotate",
    "transaction",
]
