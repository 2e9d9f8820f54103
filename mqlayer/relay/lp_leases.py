"""Leases on LP sets, shared fairly among living relays.

They only share work: the chain makes a relay past its lease harmless.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from mqlayer.domain.protocol import ServedProtocols
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.protocol import InForce, code_facts
from mqlayer.postgres.queries import query

LP_SETS = 16


class LeaseChange(NamedTuple):
    """LP sets gained and lost."""

    gained: list[int]
    lost: list[int]


class LpSets:
    """One relay's LP sets. A helper takes all unowned sets and has no share."""

    def __init__(self, relay_id: str, *, lease_s: float, helper: bool = False) -> None:
        self.relay_id, self._lease_s, self.helper = relay_id, lease_s, helper
        self.owned: list[int] = []
        self._sent = 0
        self._code = code_facts() | {"host": socket.gethostname(), "pid": os.getpid()}
        self.in_force = InForce()
        # As of the last beat.
        self.served: ServedProtocols | None = None

    def heartbeat(self, connection: Connection, *, sent: int = 0) -> LeaseChange:
        """Extend leases; take or release sets to match the share. `sent`: messages sent so far."""
        before = set(self.owned)
        me = {"relay_id": self.relay_id, "lease_s": self._lease_s, "has_sent": sent > self._sent}
        me |= self._code | {"acts_on": self.in_force.version}
        self._sent = sent
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
        """Release all."""
        failpoint("relay.before_release")
        self._release(connection, self.owned)
        connection.execute(query("relay_leave"), {"relay_id": self.relay_id})
        self.owned = []

    def _share(self, connection: Connection, me: dict[str, object]) -> int:
        if self.helper:
            return LP_SETS
        row = connection.execute(query("relay_beat"), me).fetchone()
        live, *versions = row if row is not None else (1, 0, 0, 0)
        self.served = ServedProtocols(*versions)
        self.in_force.note(self.served.in_force)
        return -(-LP_SETS // int(live))

    def _release(self, connection: Connection, lp_sets: list[int]) -> None:
        connection.execute(query("lp_set_release"), {"relay_id": self.relay_id, "lp_sets": lp_sets})


def end_dead_relay(database: Database, relay_id: str) -> int:
    """End the leases of a relay whose process is certainly dead; return how many LP sets that frees."""
    with database.connection() as connection:
        row = connection.execute(query("relay_end_dead"), {"relay_id": relay_id}).fetchone()
    return int(row[0]) if row is not None else 0
