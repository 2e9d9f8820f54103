"""Parked and dead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mqlayer.console.page import Action, Page, Visit


def _load(_: Visit) -> Mapping[str, Any]:
    return {}


PAGES: Final = (Page("/parked", "Parked and dead", "parked.html", _load, menu="Parked and dead"),)
ACTIONS: Final[tuple[Action, ...]] = ()
