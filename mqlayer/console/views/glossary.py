"""The words of the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mqlayer.console.glossary import GLOSSARY, anchor
from mqlayer.console.page import Action, Page, Visit


def _load(_: Visit) -> Mapping[str, Any]:
    return {"terms": [(anchor(term), term, meaning) for term, meaning in GLOSSARY.items()]}


PAGES: Final = (Page("/glossary", "Words of these pages", "glossary.html", _load, live=False),)
ACTIONS: Final[tuple[Action, ...]] = ()
