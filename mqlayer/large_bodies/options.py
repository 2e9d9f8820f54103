"""Where a process stores large bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mqlayer.domain.large_bodies import SMALLEST_THRESHOLD
from mqlayer.errors import InvalidInput
from mqlayer.settings import Settings


@dataclass(frozen=True, slots=True)
class LargeBodyOptions:
    """The settings. `threshold`, `limit`: bytes."""

    store: str = "off"
    threshold: int = 0
    limit: int = 0
    bucket: str = ""
    prefix: str = ""
    endpoint: str = ""
    region: str = ""

    @classmethod
    def of(cls, settings: Settings) -> LargeBodyOptions:
        """Return a process's options. Raises InvalidInput for settings of S3 that don't fit."""
        if settings.large_bodies == "s3":
            _check_s3(settings)
        return cls(
            settings.large_bodies,
            settings.large_body_threshold,
            settings.large_body_limit,
            settings.s3_bucket,
            settings.s3_prefix,
            settings.s3_endpoint,
            settings.s3_region,
        )

    @property
    def on(self) -> bool:
        """Whether large bodies are stored."""
        return self.store != "off"


def _check_s3(settings: Settings) -> None:
    if not settings.s3_bucket:
        raise InvalidInput("large bodies go to S3, but no bucket is given: set MQLAYER_S3_BUCKET")
    if settings.s3_prefix and not settings.s3_prefix.endswith("/"):
        raise InvalidInput(f"MQLAYER_S3_PREFIX is {settings.s3_prefix!r}: end it with /, as in 'mqlayer/'")
    # Its text is in errors and logs.
    if "@" in settings.s3_endpoint:
        raise InvalidInput("MQLAYER_S3_ENDPOINT has a user: give credentials by boto3's chain, as AWS_ACCESS_KEY_ID")
    if settings.s3_endpoint and not settings.s3_endpoint.startswith(("http://", "https://")):
        raise InvalidInput(f"MQLAYER_S3_ENDPOINT is {settings.s3_endpoint!r}: begin it with https:// or http://")


_known: Final[list[LargeBodyOptions]] = []


def process_options() -> LargeBodyOptions:
    """Return the options of outbox calls, which have no Settings; read once. Raises InvalidInput."""
    if not _known:
        _known.append(LargeBodyOptions.of(Settings()))
    return _known[0]


def forget_options() -> None:
    """Read them anew, as tests do."""
    _known.clear()


def limit_of(size: int, plain: int) -> int:
    """Return the limit for an outbox body of this size; `plain`: without the feature."""
    if size <= max(plain, SMALLEST_THRESHOLD):
        return plain
    options = process_options()
    return options.limit if options.on else plain
