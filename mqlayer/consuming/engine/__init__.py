"""What ordered and shared consumption have in common: heartbeat, executors, time limits, failure decisions."""
