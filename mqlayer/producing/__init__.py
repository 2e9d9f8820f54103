"""Direct publishing: straight to partitions, without an outbox."""

from mqlayer.producing.async_producer import AsyncProducer
from mqlayer.producing.in_flight import ProducerStats
from mqlayer.producing.message import Message
from mqlayer.producing.options import ProducerOptions
from mqlayer.producing.producer import Producer
from mqlayer.producing.receipts import Receipt, Receipts

__all__ = ["AsyncProducer", "Message", "Producer", "ProducerOptions", "ProducerStats", "Receipt", "Receipts"]
