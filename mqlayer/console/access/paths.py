"""Paths within the console to go to after a login."""

from __future__ import annotations

import re
from typing import Final

_PATH: Final = re.compile(r"/(?!/)[!-\[\]-~]{0,2000}")
"""Printable ASCII without a backslash, which browsers take for a slash."""
_OWN: Final = ("/login", "/logout", "/live", "/static/")


def safe_path(path: str) -> str:
    """Return a path within the console, with its query; the overview for another site's, or no page's."""
    return path if _PATH.fullmatch(path) and not path.startswith(_OWN) else "/"
