"""The servers that a command uses."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import SecretStr

from mqlayer.redis.access import access_of, use_only
from mqlayer.settings import Settings
from mqlayer.stack import Addresses, DirectoryRefused, Stack


def settings_here(directory: Path | None = None) -> Settings:
    """Return the settings, completed by the local stack."""
    settings = Settings()
    use_only(None)
    addresses = _addresses_here(settings, directory)
    if addresses is None:
        return settings
    found: dict[str, str | SecretStr] = {
        "dsn": SecretStr(addresses.dsn),
        "broker_url": SecretStr(addresses.broker_url),
        "redis_user": addresses.node_login.user,
        "redis_password": SecretStr(addresses.node_login.password),
    }
    missing = {name: value for name, value in found.items() if name not in settings.model_fields_set}
    settings = settings.model_copy(update=missing)
    if addresses.node_login.password:
        use_only(access_of(settings))
    return settings


def settings_of_owner() -> Settings:
    """Return settings for schema, role and right changes."""
    settings = settings_here()
    addresses = _addresses_here(Settings())
    if addresses is None or settings.dsn.get_secret_value() != addresses.dsn:
        return settings
    return settings.model_copy(update={"dsn": SecretStr(Stack().owner_dsn())})


def use_stack_here() -> None:
    """Add the local stack's addresses to the environment."""
    addresses = _addresses_here(Settings())
    if addresses is not None:
        for name, value in addresses.environment().items():
            os.environ.setdefault(name, value)


def _addresses_here(settings: Settings, directory: Path | None = None) -> Addresses | None:
    """Another database has other nodes."""
    given = settings.dsn.get_secret_value()
    try:
        addresses = (Stack() if directory is None else Stack(directory)).addresses()
    except DirectoryRefused:
        if given:
            return None
        raise
    return None if addresses is None or given not in ("", addresses.dsn) else addresses
