"""`verify`: compare Postgres, nodes and archive."""

from mqlayer.doctor.verify.run import verify

__all__ = ["verify"]
