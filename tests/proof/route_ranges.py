"""Which range of a route an LP is in."""

from __future__ import annotations

from mqlayer.domain.routing import LpRange, Route


def range_of(route: Route, lp: int) -> LpRange:
    """Return an LP's range."""
    (found,) = (one for one in route.ranges if one.lp_from <= lp < one.lp_to)
    return found
