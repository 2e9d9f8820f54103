"""Places in a topic's archive."""

from __future__ import annotations

from typing import Final

ArchivePlace = tuple[int, int]
"""A batch, and an offset in it."""
BEHIND: Final = 2**62
"""The offset behind every record of a batch."""
