"""Curves that this process read within the last seconds: samples come once a minute, live pages every two seconds."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from mqlayer.inspect import Curve, curves
from mqlayer.inspect.curves import CurveKind
from mqlayer.postgres.database import Database

KEPT_S: Final = 10.0
KEPT: Final = 256

Name = tuple[int, CurveKind, str, str | None, timedelta]


@dataclass(slots=True)
class RecentCurves:
    """Curves by name, read again after KEPT_S; safe for threads."""

    _known: OrderedDict[Name, tuple[float, Database, Sequence[Curve]]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(
        self, database: Database, kind: CurveKind, name: str, *, topic: str | None = None, last: timedelta
    ) -> Sequence[Curve]:
        """Return `curves`. Raises as it does."""
        key = id(database), kind, name, topic, last
        with self._lock:
            at, _, found = self._known.get(key, (0.0, database, ()))
        if found and time.monotonic() - at < KEPT_S:
            return found
        fresh = curves(database, kind, name, topic=topic, last=last)
        with self._lock:
            # The database stays referred to, so that no other one gets its id.
            self._known[key] = time.monotonic(), database, fresh
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return fresh


RECENT: Final = RecentCurves()
