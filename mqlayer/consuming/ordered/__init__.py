"""Ordered consumption: partitions owned under an epoch, queues per key, parked keys."""
