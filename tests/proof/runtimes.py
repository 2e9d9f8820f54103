"""The runtime of a test."""

from __future__ import annotations

from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings


def runtime_of(
    control: Database,
    prefix: str = "mq",
    *,
    settings: Settings | None = None,
    application: Database | None = None,
    actor: str = "api",
    unsafe: bool = False,
) -> Runtime:
    """Return a runtime on a test's databases, with these settings or the default ones and a key prefix."""
    default = Settings().model_copy(update={"key_prefix": prefix, "allow_unsafe_redis": unsafe})
    return Runtime(control, settings or default, application, actor)
