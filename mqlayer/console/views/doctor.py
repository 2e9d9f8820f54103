"""The doctor, on demand."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from mqlayer.console.page import Action, Page, Visit
from mqlayer.doctor import CheckStatus, diagnose
from mqlayer.errors import Conflict
from mqlayer.settings import options_of

KINDS: Final = {
    CheckStatus.BROKEN: "bad",
    CheckStatus.WARNING: "warn",
    CheckStatus.UNKNOWN: "warn",
    CheckStatus.OK: "good",
}
_running: Final = threading.Lock()


def _load(visit: Visit) -> Mapping[str, Any]:
    if not visit.text("run"):
        return {"found": None, "fine": [], "at": None, "kinds": KINDS}
    # It asks every server some thirty questions.
    if not _running.acquire(blocking=False):
        raise Conflict("the doctor runs for somebody else", "load the page again in a few seconds")
    try:
        found = diagnose(visit.runtime.settings, role=options_of(visit.runtime.control.dsn).role)
    finally:
        _running.release()
    order = list(KINDS)
    ill = sorted((one for one in found if one.verdict is not CheckStatus.OK), key=lambda one: order.index(one.verdict))
    fine = [one for one in found if one.verdict is CheckStatus.OK]
    return {"found": ill, "fine": fine, "at": datetime.now(UTC), "kinds": KINDS}


PAGES: Final = (Page("/doctor", "Doctor", "doctor.html", _load, menu="Doctor", live=False),)
ACTIONS: Final[tuple[Action, ...]] = ()
