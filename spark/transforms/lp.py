"""Where records belong, computed by Spark itself."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812  Spark's own documents call it so

from mqlayer.domain.routing import LP_COUNT


def lp_of_key(key: Column) -> Column:
    """Return the LP of a key: the first two bytes, big-endian, of the SHA-256 of its UTF-8, mod 1024; null of null.

    Nothing of `mqlayer.domain.routing` computes it, so each is a check of the other.
    """
    return F.conv(F.substring(F.sha2(key, 256), 1, 4), 16, 10).cast("int") % LP_COUNT
