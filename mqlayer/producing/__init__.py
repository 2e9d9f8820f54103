"""Direct publishing: straight to partitions, without an outbox."""

from mqlayer.producing.in_flight import ProducerStats
from mqlayer.producing.message import Message, Receipts
from mqlayer.producing.pending_send import Receipt
from mqlayer.producing.producer import Producer

__all__ = ["Message", "Producer", "ProducerStats", "Receipt", "Receipts"]
