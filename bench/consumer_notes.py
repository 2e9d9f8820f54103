"""How processes of `bench.consumer_process` note a message."""

from __future__ import annotations

import struct
from typing import Final

NOTE: Final = struct.Struct("<iq")
"""Its partition, and when it was handled: a time of CLOCK_MONOTONIC in ns, which all processes of a machine share."""
