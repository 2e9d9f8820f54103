"""Measured costs, each with the bench that it comes from: two shared cores, Redis 7.0 with `appendfsync always`,
Postgres 15, Python 3.11, November 2026. Microseconds are processor time unless the name says otherwise.

Measure on your machine, and put your figures here: `scripts/bench scale path_costs control_plane`."""

from __future__ import annotations

from typing import Final

# Publishing: medians of the steps of `scale` with 16 partitions, one node and 256 bytes; `scale[bodies=65536]`.
PRODUCE_US: Final = 2.9
PRODUCE_BYTE_US: Final = 0.0006
APPEND_US: Final = 4.8
APPEND_BYTE_US: Final = 0.003
# `scale[partitions=1000]`, where an append has ten messages: its cost beyond that of its messages.
PRODUCER_CALL_US: Final = 40.0
NODE_CALL_US: Final = 80.0
APPEND_MOST: Final = 500
PUBLISHED_AT_ONCE: Final = 10_000
"""Messages in one call that publishes, or under way in a relay."""
SYNC_US: Final = 225.0
"""Time, not processor time, of a write to the file with `appendfsync always`: `publish_one` with either
setting."""

# Consuming: as publishing, with one process and one group.
CONSUME_US: Final = 5.3
CONSUME_BYTE_US: Final = 0.0006
READ_US: Final = 1.1
READ_BYTE_US: Final = 0.0008
# `scale[partitions=1000]`: a look at one of a process's partitions, once per pass of 1,000 messages.
CONSUMER_PASS_US: Final = 5.7
NODE_PASS_US: Final = 1.6
PASS: Final = 1_000
READ_MOST: Final = 500
READ_ROOM: Final = 4_000
"""Messages read ahead, over all partitions of a member."""
READ_TURN: Final = 125
WAITING_US: Final = 39.0
"""Per message of a handler that waits, `scale[processes=8, handlers that wait 2 ms]`: wake-ups, small settlements."""
WAITING_READ_US: Final = 6.6
HANDLERS_BUSY: Final = 0.93
"""`scale[processes=1, handlers that wait 2 ms]`: 3,700 of the 4,000 messages that 8 handlers of 2 ms could do."""

# The outbox, `path_costs`.
INSERT_US: Final = 313.0
"""Of Postgres, a transaction with one message."""
INSERT_MANY_US: Final = 26.0
"""A message in a transaction of 500."""
RELAY_US: Final = 4.3
RELAY_POSTGRES_US: Final = 3.0

# Fenced effects: `path_costs`, one by one, and in batches of 100.
FENCE_US: Final = 440.0
FENCE_POSTGRES_US: Final = 412.0
FENCE_MANY_US: Final = 55.0
FENCE_MANY_POSTGRES_US: Final = 56.0

# Members, `control_plane`: 1,000 members in 50 groups send 1,000 heartbeats/s for 0.15 processors, 285 statements/s.
HEARTBEAT_US: Final = 150.0
HEARTBEATS_PER_S: Final = 1.0
CALM_MEMBERS: Final = 250
"""In larger groups, members beat once per third of a lease."""
LEASE_S: Final = 10.0

# Latency at a low rate, `scale[partitions=16]` and `scale[partitions=1000]`.
P50_MS: Final = 1.2
P99_MS: Final = 4.0
PARTITION_P50_MS: Final = 0.010
PARTITION_P99_MS: Final = 0.024
"""Per partition that a process reads."""
OUTBOX_P50_MS: Final = 4.3
OUTBOX_P99_MS: Final = 7.1
"""`latency_outbox` beyond `latency_direct`."""
BATCH_MS: Final = 1.0
"""What waits for one service at a busy part: a batch."""
THREADS_MS: Final = 0.12
"""Of each pair of groups in a process: threads of all wait for one interpreter; `scale[groups=50]`."""
