"""Groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mqlayer.console.page import Action, Page, Visit


def _load(_: Visit) -> Mapping[str, Any]:
    return {}


PAGES: Final = (Page("/groups", "Groups", "groups.html", _load, menu="Groups"),)
ACTIONS: Final[tuple[Action, ...]] = ()
