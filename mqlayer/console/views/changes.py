"""Route changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mqlayer.console.page import Action, Page, Visit


def _load(_: Visit) -> Mapping[str, Any]:
    return {}


PAGES: Final = (Page("/changes", "Route changes", "changes.html", _load, menu="Route changes"),)
ACTIONS: Final[tuple[Action, ...]] = ()
