"""Consume partitions in order per key: the application object, the member runtime, the fence."""

from mqlayer.consuming.api.app import App, Consumer
from mqlayer.consuming.api.batch_messages import BatchMessage
from mqlayer.consuming.api.batches import Batch, BatchOf
from mqlayer.consuming.api.context import Context
from mqlayer.consuming.api.dependencies import Depends
from mqlayer.consuming.engine.options import MemberOptions, MemberStats

__all__ = ["App", "Batch", "BatchMessage", "BatchOf", "Consumer", "Context", "Depends", "MemberOptions", "MemberStats"]
