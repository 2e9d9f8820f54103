"""What the services and operations of a process share."""

from mqlayer.runtime.runtime import Runtime, open_runtime

__all__ = ["Runtime", "open_runtime"]
