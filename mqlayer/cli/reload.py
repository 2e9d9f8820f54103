"""Notice changed source files, for `consume --reload`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from mqlayer.errors import InvalidInput

WAIT_MS: Final = 200
"""Changes within so long are one."""


@contextmanager
def changed_files(folder: Path) -> Iterator[Callable[[], bool]]:
    """Watch the Python files below a folder; lend a function that says whether one changed since its last call.

    Virtual environments and caches don't count. Raises InvalidInput without the extra `reload`.
    """
    if find_spec("watchfiles") is None:
        raise InvalidInput("--reload needs the package watchfiles: pip install 'mqlayer[reload]'")
    from watchfiles import PythonFilter, watch

    changed, over = threading.Event(), threading.Event()

    def look() -> None:
        for _ in watch(folder, watch_filter=PythonFilter(), stop_event=over, step=WAIT_MS, raise_interrupt=False):
            changed.set()

    def take() -> bool:
        found = changed.is_set()
        changed.clear()
        return found

    thread = threading.Thread(target=look, name="mqlayer-reload", daemon=True)
    thread.start()
    try:
        yield take
    finally:
        over.set()
        thread.join()
