"""Checks of the S3 API that has large bodies."""

from __future__ import annotations

import time

from mqlayer.doctor.findings import CheckStatus, Finding
from mqlayer.errors import MqlayerError
from mqlayer.large_bodies import LargeBodyOptions
from mqlayer.large_bodies.object_store import object_store
from mqlayer.settings import Settings

FIX = "correct MQLAYER_S3_*; credentials come from boto3's chain, and workers need the right to list the bucket"


def body_store_subject(settings: Settings) -> str:
    """Return the store's name in findings."""
    return f"body store (bucket {settings.s3_bucket or 'not named'} of S3 at {settings.s3_endpoint or 'AWS'})"


def check_body_store(settings: Settings) -> Finding:
    """Check settings, and that the bucket can be listed, as the job does."""
    subject, began = body_store_subject(settings), time.monotonic()
    try:
        options = LargeBodyOptions.of(settings)
        object_store(options).check(options.bucket)
    except MqlayerError as error:
        return Finding("reachable", subject, CheckStatus.BROKEN, str(error), FIX)
    return Finding("reachable", subject, CheckStatus.OK, f"answers in {(time.monotonic() - began) * 1000:.1f} ms")
