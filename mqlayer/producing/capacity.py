"""How much may be unsettled."""

from __future__ import annotations


class Capacity:
    """Counts unsettled messages and bytes, within bounds."""

    __slots__ = ("count", "freed", "max_bytes", "max_count", "size")

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count, self.max_bytes = max_count, max_bytes
        self.count = self.size = 0
        self.freed = False
        """Something was settled since the reader cleared this."""

    def has_room(self, count: int, size: int) -> bool:
        """Whether this much fits; always if nothing is pending."""
        return not self.count or (self.count + count <= self.max_count and self.size + size <= self.max_bytes)

    def take(self, count: int, size: int) -> None:
        """Add unsettled messages."""
        self.count += count
        self.size += size

    def free(self, count: int, size: int) -> None:
        """Remove settled ones."""
        self.count -= count
        self.size -= size
        self.freed = True
