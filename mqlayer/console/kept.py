"""Values that take longer to make than a page may: made beside the pages, and shown with their age."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime

Made = TypeVar("Made")

EVERY_S: Final = 2.0
REST: Final = 10.0
"""The least time from one to the next, as a multiple of the time that making takes."""
LONGEST_REST_S: Final = 4.0
PATIENCE_S: Final = 0.1
"""A page waits so long for a newer value."""
FIRST_S: Final = 3.0
OLD_S: Final = 5.0
"""An older value would mislead: pages wait for the next as for the first."""


class KeptValue(Generic[Made]):
    """One value, made again while pages ask for it. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value: Made | None = None
        self._error: MqlayerError | None = None
        self._made_at = self._due_at = float("-inf")
        self._making = False

    def get(self, make: Callable[[], Made]) -> Made:
        """Return the value; start `make` in a thread where it is due. Raises the error of the last run."""
        with self._changed:
            begun = time.monotonic()
            if begun >= self._due_at and not self._making:
                self._making = True
                threading.Thread(target=self._make, args=(make,), name="console-kept", daemon=True).start()
            patience_s = FIRST_S if begun - self._made_at > OLD_S else PATIENCE_S
            self._changed.wait_for(lambda: not self._making or self._made_at >= begun, patience_s)
            if self._error is not None:
                raise self._error
            if self._value is None:
                raise MqlayerError("still being looked at: load the page again")
            return self._value

    def _make(self, make: Callable[[], Made]) -> None:
        began = time.monotonic()
        value, error = None, None
        try:
            value = make()
        except MqlayerError as fault:
            error = fault
        except BaseException:
            error = MqlayerError("it failed: the console's log has the error")
            raise
        finally:
            with self._changed:
                ended = time.monotonic()
                self._value, self._error, self._made_at, self._making = value, error, ended, False
                self._due_at = ended + min(LONGEST_REST_S, max(EVERY_S / 2, REST * (ended - began)))
                self._changed.notify_all()


class KeptValues(Generic[Made]):
    """A value for each pool of connections: users of one level share it."""

    def __init__(self, make: Callable[[Runtime], Made]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._values: WeakKeyDictionary[Database, KeptValue[Made]] = WeakKeyDictionary()

    def get(self, runtime: Runtime) -> Made:
        """Return the value of a runtime's databases. Raises as its maker."""
        with self._lock:
            kept = self._values.setdefault(runtime.control, KeptValue())
        return kept.get(lambda: self._make(runtime))
