"""The zip of mqlayer for Spark's planning processes."""

# They run beside the driver, in the workers' Python; for a stream, Spark leaves `--py-files` out there.

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

import mqlayer

VARIABLE: Final = "PYTHONPATH"


def share_package(spark: SparkSession) -> None:
    """Add the driver's zip to the Python workers' path."""
    # Tasks take their executor's copy first.
    package = Path(mqlayer.__file__).parents[1]
    if package.is_file():
        environment = spark.sparkContext.environment
        known = [one for one in environment.get(VARIABLE, "").split(os.pathsep) if one]
        if str(package) not in known:
            environment[VARIABLE] = os.pathsep.join([*known, str(package)])
