"""A topic's policy: how far the autopilot may go."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, get_args

from mqlayer.autopilot.loads import DEFAULT_CAPACITY_PER_S
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import InvalidInput

AutoMode = Literal["off", "report", "on"]
DAY_MINUTES: Final = 24 * 60


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """A topic's bounds and budgets.

    `capacity_per_s`: messages per second of a partition, None: measured; `quiet`: two minutes of the day (UTC).
    """

    mode: AutoMode = "off"
    min_partitions: int = 1
    max_partitions: int = 64
    capacity_per_s: float | None = None
    changes_per_hour: int = 20
    cool_down_s: float = 60.0
    """Between two changes of the topic."""
    rest_s: float = 1_800.0
    """Before a partition moves again."""
    quiet: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the autopilot notes beside a policy."""

    measured_per_s: float | None = None
    failed: int = 0
    unhelpful: int = 0
    stopped_at: datetime | None = None
    stopped_because: str | None = None


def capacity_of(policy: RoutePolicy, state: PolicyState) -> tuple[float, str]:
    """Return messages per second of a partition, and where the figure is from."""
    if policy.capacity_per_s is not None:
        return policy.capacity_per_s, "as set"
    if state.measured_per_s is not None:
        return state.measured_per_s, "measured while a group had a backlog"
    return DEFAULT_CAPACITY_PER_S, "the default, as no group had a backlog yet"


def check_policy(policy: RoutePolicy) -> RoutePolicy:
    """Return the policy. Raises InvalidInput."""
    if policy.mode not in get_args(AutoMode):
        raise InvalidInput(f"automatic routes are off, report or on, not {policy.mode!r}")
    if not 1 <= policy.min_partitions <= policy.max_partitions <= LP_COUNT:
        raise InvalidInput(
            f"a topic has 1 to {LP_COUNT} partitions, so the bounds are two of these in order, not "
            f"{policy.min_partitions} and {policy.max_partitions}"
        )
    _check_range("the capacity of a partition", policy.capacity_per_s, 1, 1e9, "messages/s")
    _check_range("the budget", policy.changes_per_hour, 1, 720, "changes per hour")
    _check_range("the cool-down", policy.cool_down_s, 5, 3_600, "s")
    _check_range("the rest of a partition", policy.rest_s, 5, 86_400, "s")
    if policy.quiet is not None and policy.quiet[0] == policy.quiet[1]:
        raise InvalidInput("quiet hours begin and end at different minutes; --report changes nothing at any time")
    return policy


def _check_range(name: str, value: float | None, least: float, most: float, unit: str) -> None:
    if value is not None and not least <= value <= most:
        raise InvalidInput(f"{name} is {least:g} to {most:g} {unit}, not {value:g}")


def parse_quiet(text: str) -> tuple[int, int] | None:
    """Return the minutes of `HH:MM-HH:MM` (UTC), None for `none`. Raises InvalidInput."""
    if text == "none":
        return None
    try:
        first, second = (datetime.strptime(part, "%H:%M").time() for part in text.split("-"))  # noqa: DTZ007
    except ValueError:
        raise InvalidInput(f"{text!r} are no quiet hours: say 22:00-06:00 (UTC), or none") from None
    return first.hour * 60 + first.minute, second.hour * 60 + second.minute


def format_quiet(quiet: tuple[int, int] | None) -> str:
    """Return quiet hours as `parse_quiet` takes them."""
    return "none" if quiet is None else "-".join(f"{at // 60:02}:{at % 60:02}" for at in quiet)


def is_quiet(quiet: tuple[int, int] | None, minute: int) -> bool:
    """Whether a minute of the day lies in the quiet hours."""
    if quiet is None:
        return False
    first, past = quiet
    return (minute - first) % DAY_MINUTES < (past - first) % DAY_MINUTES
