"""The databases of a worker's process, opened at first use there: pools don't survive a fork."""

from __future__ import annotations

import os
from functools import cache

from mqlayer.postgres.database import Database
from mqlayer.settings import Settings


def settings() -> Settings:
    """Return the settings of this process."""
    return _settings()


def control() -> Database:
    """Return this process's pool on the control database."""
    return _database(settings().control_dsn(), os.getpid())


def application() -> Database:
    """Return this process's pool on the application database."""
    return _database(settings().application_dsn(), os.getpid())


@cache
def _settings() -> Settings:
    return Settings()


@cache
def _database(dsn: str, _pid: int) -> Database:
    return Database(dsn, application="mqlayer worker", max_size=2)
