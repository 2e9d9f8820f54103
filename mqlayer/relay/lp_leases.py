"""Which LP sets a relay works on: leases in Postgres, shared fairly among those that live.

For sharing the work only. A relay that goes on after its lease ran out is a second one on the same LPs, which the
chain makes harmless.
"""

from __future__ import annotations

from typing import NamedTuple

from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query

LP_SETS = 16


class LeaseChange(NamedTuple):
    """What a beat changed."""

    gained: list[int]
    lost: list[int]


class LpSets:
    """The LP sets of one relay. A helper takes what nobody holds and does not count as a relay to share with."""

    def __init__(self, relay_id: str, *, lease_s: float, helper: bool = False) -> None:
        self.relay_id, self._lease_s, self.helper = relay_id, lease_s, helper
        self.owned: list[int] = []

    def heartbeat(self, connection: Connection) -> LeaseChange:
        """Extend the leases, take what is free and due to us, give back what is over our share."""
        before = set(self.owned)
        me = {"relay_id": self.relay_id, "lease_s": self._lease_s}
        share = self._share(connection, me)
        kept = sorted(row[0] for row in connection.execute(query("lp_set_keep"), me).fetchall())
        if len(kept) > share:
            self._release(connection, kept[share:])
            kept = kept[:share]
        elif len(kept) < share:
            wanted = me | {"count": share - len(kept)}
            kept += [row[0] for row in connection.execute(query("lp_set_take"), wanted).fetchall()]
            failpoint("relay.after_claim")
        self.owned = sorted(kept)
        return LeaseChange(sorted(set(self.owned) - before), sorted(before - set(self.owned)))

    def leave(self, connection: Connection) -> None:
        """Give everything back."""
        failpoint("relay.before_release")
        self._release(connection, self.owned)
        connection.execute(query("relay_leave"), {"relay_id": self.relay_id})
        self.owned = []

    def _share(self, connection: Connection, me: dict[str, object]) -> int:
        if self.helper:
            return LP_SETS
        row = connection.execute(query("relay_beat"), me).fetchone()
        live = row[0] if row is not None else 1
        return -(-LP_SETS // int(live))

    def _release(self, connection: Connection, lp_sets: list[int]) -> None:
        connection.execute(query("lp_set_release"), {"relay_id": self.relay_id, "lp_sets": lp_sets})
