"""Keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mqlayer.console.page import Action, Page, Visit


def _load(_: Visit) -> Mapping[str, Any]:
    return {}


PAGES: Final = (Page("/keys", "Keys", "keys.html", _load, menu="Keys"),)
ACTIONS: Final[tuple[Action, ...]] = ()
