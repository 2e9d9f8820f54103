"""Bodies over the threshold, in Postgres or S3 (docs/design/large-bodies.md)."""

from mqlayer.large_bodies.options import LargeBodyOptions, process_options
from mqlayer.large_bodies.reading import BodyReader, Stream
from mqlayer.large_bodies.sources import BodySource, source_of
from mqlayer.large_bodies.writing import StoredBody, stored_body, storing, storing_source

__all__ = [
    "BodyReader",
    "BodySource",
    "LargeBodyOptions",
    "StoredBody",
    "Stream",
    "process_options",
    "source_of",
    "stored_body",
    "storing",
    "storing_source",
]
