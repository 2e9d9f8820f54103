"""Which servers a command works on."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import SecretStr

from mqlayer.settings import Settings
from mqlayer.stack import Stack


def settings_here(directory: Path | None = None) -> Settings:
    """Return the process's settings; addresses that MQLAYER_* doesn't give are those of the stack here."""
    settings = Settings()
    if settings.control_dsn():
        return settings
    addresses = (Stack() if directory is None else Stack(directory)).addresses()
    if addresses is None:
        return settings
    found = {"dsn": SecretStr(addresses.dsn), "broker_url": SecretStr(addresses.broker_url)}
    missing = {name: address for name, address in found.items() if name not in settings.model_fields_set}
    return settings.model_copy(update=missing)


def use_stack_here() -> None:
    """Let the rest of this process, and what it starts, find the stack here; addresses given already stay."""
    if Settings().control_dsn():
        return
    addresses = Stack().addresses()
    if addresses is not None:
        for name, value in addresses.environment().items():
            os.environ.setdefault(name, value)
