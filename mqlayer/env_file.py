"""The variables `MQLAYER_*` of the environment and of `.env` in the working directory; the environment wins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mqlayer.errors import InvalidInput

PREFIX: Final = "MQLAYER_"
ENV_FILE: Final = ".env"


def env_file() -> dict[str, str]:
    """Return the file's variables; {} without a file. Raises InvalidInput for one that can't be read."""
    path = Path(ENV_FILE)
    if not path.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        found = dotenv_values(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"can't read {ENV_FILE} in the working directory: {error}") from error
    return {name: value for name, value in found.items() if name.startswith(PREFIX) and value is not None}


def variable(name: str) -> str | None:
    """Return a variable's value, None without one."""
    found = os.environ.get(name)
    return env_file().get(name) if found is None else found


def export_env_file() -> None:
    """Put the file's variables into the environment, also for processes that this one starts."""
    for name, value in env_file().items():
        os.environ.setdefault(name, value)
