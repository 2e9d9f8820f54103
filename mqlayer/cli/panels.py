"""The panels of the help; each command is in one."""

from __future__ import annotations

from typing import Final

START: Final = "Start"
LOOK: Final = "Look"
CHANGE: Final = "Change"
REPAIR: Final = "Repair"
PANELS: Final = (START, LOOK, CHANGE, REPAIR)
