"""Direct publishing: straight to partitions, without an outbox."""

from mqlayer.producing.ledger import ProducerStats
from mqlayer.producing.messages import Message, Receipts
from mqlayer.producing.parcels import Receipt
from mqlayer.producing.producer import Producer

__all__ = ["Message", "Producer", "ProducerStats", "Receipt", "Receipts"]
