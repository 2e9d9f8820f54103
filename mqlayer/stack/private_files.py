"""Files and directories closed to other accounts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mqlayer.stack.accounts import Account
from mqlayer.stack.errors import DirectoryRefused

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
PASSED_THROUGH: Final = 0o710
"""The group may enter, not list."""
UMASK: Final = 0o077
OTHERS_WRITE: Final = 0o022


def closed_directory(directory: Path, *, traversed_by: Account | None = None) -> None:
    """Create or close a directory and its files; `traversed_by` may enter."""
    directory.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    _close(directory, traversed_by)
    for path in directory.iterdir():
        if path.is_file() and not path.is_symlink():
            path.chmod(FILE_MODE)


def own_directory(directory: Path, *, traversed_by: Account | None = None) -> None:
    """Create or check a private directory. Raises DirectoryRefused if others may write in it."""
    if not directory.exists():
        directory.mkdir(parents=True, mode=DIRECTORY_MODE)
        _close(directory, traversed_by)
    elif directory.stat().st_mode & OTHERS_WRITE:
        raise DirectoryRefused(directory, f"other accounts may write in it: chmod go-w {directory}")


def closed_tree(directory: Path) -> None:
    """Close a directory and all below."""
    closed_directory(directory)
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            closed_tree(path)


def write_closed(path: Path, content: bytes) -> None:
    """Replace a file atomically, owner only."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.touch(mode=FILE_MODE)
    draft.write_bytes(content)
    draft.replace(path)


def open_closed(path: str, flags: int) -> int:
    """Opener for `open`: new files are private."""
    return os.open(path, flags, FILE_MODE)


def _close(directory: Path, traversed_by: Account | None) -> None:
    if traversed_by is None:
        directory.chmod(DIRECTORY_MODE)
    else:
        os.chown(directory, -1, traversed_by.gid)
        directory.chmod(PASSED_THROUGH)
