"""The Spark side of mqlayer: jobs on archive snapshots, never on the running system."""

if __name__ != "mqlayer.spark":
    raise ImportError("import this package as mqlayer.spark", name=__name__)

try:
    from mqlayer.spark.batch_publisher import publish_batches
    from mqlayer.spark.body_decoding import decode_bodies
    from mqlayer.spark.session import session
    from mqlayer.spark.snapshot_reader import read_export, read_snapshot, register
except ModuleNotFoundError as error:
    raise ImportError("Spark needs more packages: pip install 'mqlayer[spark]'", name=error.name) from error

__all__ = ["decode_bodies", "publish_batches", "read_export", "read_snapshot", "register", "session"]
