"""Audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mqlayer.console.page import Action, Page, Visit


def _load(_: Visit) -> Mapping[str, Any]:
    return {}


PAGES: Final = (Page("/audit", "Audit", "audit.html", _load, menu="Audit"),)
ACTIONS: Final[tuple[Action, ...]] = ()
