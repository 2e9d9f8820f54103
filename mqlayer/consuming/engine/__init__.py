"""Shared by ordered and shared consumption: heartbeat, executors, time limits, failure decisions."""
