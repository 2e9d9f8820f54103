"""`verify`: whether Postgres, the nodes and the archive say the same of a topic. Reads only."""

from mqlayer.doctor.verify.run import verify

__all__ = ["verify"]
