"""The runtime of a test."""

from __future__ import annotations

import os
from functools import cache

from mqlayer.env_file import PREFIX
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
    if settings is None:
        variables = frozenset((name, value) for name, value in os.environ.items() if name.startswith(PREFIX))
        settings = _settings_by(variables).model_copy(update={"key_prefix": prefix, "allow_unsafe_redis": unsafe})
    return Runtime(control, settings, application, actor)


@cache
def _settings_by(variables: frozenset[tuple[str, str]]) -> Settings:
    """Return the settings under some variables: to read all of these takes longer than most that is done with them."""
    return Settings()
