"""Runs of a node's Redis: what makes one, and which of them is an old primary that came back to life.

A run is one process of a server for as long as it stays primary. A process that became a replica took over another
one's data, so when it is promoted again it is another run: the id of the primary that it followed then is part of the
run's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

NO_ID: Final = "0"
SHOWN_ID: Final = 12


def run_of(info: Mapping[str, str]) -> str:
    """Return the run by what a server's INFO says: its run id, and whom it followed if it was promoted."""
    followed = info.get("master_replid2", "")
    return info["run_id"] if not followed.strip(NO_ID) else f"{info['run_id']}/{followed[:SHOWN_ID]}"


def is_former(run: str, *, armed: str | None, former: Collection[str]) -> bool:
    """Say whether a run was armed and replaced since: an old primary that lives on, and must not serve again.

    Its process may only come back by a promotion. What it followed before is forgotten by a primary that has been
    without replicas for an hour, so a process that was replaced and names nobody is the old one too.
    """
    process, _, followed = run.partition("/")
    if armed is not None and armed.partition("/")[0] == process:
        return False
    return run in former or (not followed and any(one.partition("/")[0] == process for one in former))
