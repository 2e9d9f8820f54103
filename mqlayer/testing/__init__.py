"""Test programs that publish and consume; see `docs/how-to/test-with-real-servers.md`."""

from mqlayer.testing.waiting import wait_until

__all__ = ["wait_until"]
