"""Keys and the LPs that they have for ever, computed by another program."""

from __future__ import annotations

# Computed with coreutils: printf KEY | sha256sum, the first two bytes mod 1024.
GOLDEN_LPS = {"": 944, "a": 663, "order-7": 908, "Ωμέγα": 435, "注文-42": 771, "\U0001f600": 68}
