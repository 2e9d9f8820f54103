"""Where records belong, by Spark."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  Spark's own documents call it so

from mqlayer.domain.routing import LP_COUNT


def lp_of_key(key: Column) -> Column:
    """Return a key's LP: first two bytes, big-endian, of the SHA-256 of its UTF-8, mod 1024; null of null.

    Independent of `mqlayer.domain.routing`, so each checks the other.
    """
    return F.conv(F.substring(F.sha2(key, 256), 1, 4), 16, 10).cast("int") % LP_COUNT
