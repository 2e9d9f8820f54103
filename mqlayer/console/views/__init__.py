"""All pages and actions, in the order of the menu."""

from typing import Final

from mqlayer.console.page import Action, Page
from mqlayer.console.views import (
    audit,
    bulk,
    changes,
    doctor,
    glossary,
    groups,
    keys,
    messages,
    nodes,
    outbox,
    overview,
    parked,
    schedules,
    topics,
)

_VIEWS: Final = (
    overview,
    topics,
    groups,
    keys,
    messages,
    parked,
    bulk,
    changes,
    outbox,
    nodes,
    schedules,
    doctor,
    audit,
    glossary,
)

PAGES: Final[tuple[Page, ...]] = tuple(page for view in _VIEWS for page in view.PAGES)
ACTIONS: Final[tuple[Action, ...]] = tuple(action for view in _VIEWS for action in view.ACTIONS)
