"""Consume partitions in order per key: the application object, the member runtime, the fence."""

from mqlayer.consuming.app import App, Consumer
from mqlayer.consuming.batches import Batch, BatchMessage, BatchOf
from mqlayer.consuming.context import Context
from mqlayer.consuming.member import Member, MemberOptions, MemberStats

__all__ = ["App", "Batch", "BatchMessage", "BatchOf", "Consumer", "Context", "Member", "MemberOptions", "MemberStats"]
