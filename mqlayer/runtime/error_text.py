"""Texts of exceptions, for logs, events and Postgres."""

from __future__ import annotations

import site
import sysconfig
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from mqlayer.errors import BodyMismatch, HandlerControl, HandlerFault, redact

TEXT_LIMIT: Final = 1_000
WHOLE_LIMIT: Final = 8_000
"""Below the tables' limits: a refused row would be sent endlessly."""
HIDDEN: Final = "(its message is not shown)"
KNOWN_FAILURES: Final = 1_000

Describe = Callable[[BaseException], str]

_OURS: Final = __name__.partition(".")[0]
_PYTHON: Final = tuple({sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"], "<frozen"})
_LIBRARIES: Final = tuple({*site.getsitepackages(), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})


class ErrorTexts:
    """How an application's exceptions are told: in logs, in events, and with their messages in Postgres.

    `shown`: whether the exceptions' messages are; `describe`: what stands for a message, such as one without names.
    """

    def __init__(self, *, shown: bool = True, describe: Describe | None = None) -> None:
        self._shown, self._describe = shown, describe or str
        self._known: OrderedDict[str, None] = OrderedDict()

    def text(self, error: BaseException) -> str:
        """Return type, message and the innermost line of the application's own code."""
        if isinstance(error, HandlerControl | BodyMismatch):
            return self._message(error)
        # Where the handler was when its time was up is the application's line too.
        said = self._message(error)
        if not isinstance(error, HandlerFault):
            said = f"{type(error).__name__}: {said}".removesuffix(": ")
        place = own_place(error, also_ours=not isinstance(error, HandlerFault))
        return (f"{said} ({place})" if place else said)[:WHOLE_LIMIT]

    def trace_if_new(self, error: BaseException) -> str | None:
        """Return a failure's traceback, once per type and line; None for handlers' decisions."""
        if isinstance(error, HandlerControl | HandlerFault):
            return None
        name = f"{type(error).__qualname__} {own_place(error)}"
        known = name in self._known
        self._known[name] = None
        self._known.move_to_end(name)
        # Threads may do so at once: one traceback more is no harm.
        while len(self._known) > KNOWN_FAILURES:
            self._known.popitem(last=False)
        return None if known else self.trace(error)

    def trace(self, error: BaseException) -> str:
        """Return the traceback, that of causes first."""
        parts = []
        for one in _with_causes(error):
            frames = "".join(traceback.format_list(traceback.extract_tb(one.__traceback__)))
            parts.append(f"{frames}{type(one).__name__}: {self._message(one)}".removesuffix(": "))
        return "\nfollowed by\n".join(parts)[:WHOLE_LIMIT]

    def _message(self, error: BaseException) -> str:
        if isinstance(error, HandlerControl | HandlerFault):
            return _storable(redact(str(error)))[:TEXT_LIMIT]
        if not self._shown:
            return HIDDEN
        try:
            said = self._describe(error)
        except Exception as fault:  # noqa: BLE001 - a fault of the application's rule must not hide the failure
            said = f"(its message can't be told: {type(fault).__name__} at {own_place(fault)})"
        return _storable(redact(said))[:TEXT_LIMIT]


def own_place(error: BaseException, *, also_ours: bool = True) -> str:
    """Return `file:line in function` of the innermost line of the application's own code; without one, of a library's,
    or also of mqlayer's.

    Its own code is the package of the handler, the first that mqlayer called, and all that is installed nowhere.
    """
    calls = [
        (frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    others = [call for call in calls if call[0] != _OURS and not _is_python(call[1].co_filename)]
    own = [call for call in others if call[0] == others[0][0] or not call[1].co_filename.startswith(_LIBRARIES)]
    for _, code, line in (own or others or (calls if also_ours else []))[-1:]:
        return f"{code.co_filename}:{line} in {code.co_name}"
    return ""


def where(error: BaseException) -> str:
    """Return type and innermost line, without the message, which may hold message data."""
    if isinstance(error, BodyMismatch):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _is_python(filename: str) -> bool:
    return filename.startswith(_PYTHON) and not filename.startswith(_LIBRARIES)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    chain, one = [error], error
    while (cause := one.__cause__ or (None if one.__suppress_context__ else one.__context__)) and cause not in chain:
        chain.append(cause)
        one = cause
    return reversed(chain)


def _storable(text: str) -> str:
    return text.replace("\x00", " ").encode("utf-8", "replace").decode()
