"""What is wrong, since when, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mqlayer.console.page import Action, Page, Visit, part
from mqlayer.runtime.route_cache import load_nodes


def _load(visit: Visit) -> Mapping[str, Any]:
    return {"nodes": part(lambda: load_nodes(visit.runtime.control))}


PAGES: Final = (Page("/", "Overview", "overview.html", _load, menu="Overview"),)
ACTIONS: Final[tuple[Action, ...]] = ()
