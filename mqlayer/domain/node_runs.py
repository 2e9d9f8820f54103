"""Runs of a node's Redis: `docs/design/arming-nodes.md`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

NO_ID: Final = "0"
SHOWN_ID: Final = 12


def run_of(info: Mapping[str, str]) -> str:
    """Return the run that INFO shows."""
    followed = info.get("master_replid2", "")
    return info["run_id"] if not followed.strip(NO_ID) else f"{info['run_id']}/{followed[:SHOWN_ID]}"


def is_former(run: str, *, armed: str | None, former: Collection[str]) -> bool:
    """Whether a run was armed and replaced, so must not serve.

    A replaced process that names none is former too: after an hour without replicas it forgets.
    """
    process, _, followed = run.partition("/")
    if armed is not None and armed.partition("/")[0] == process:
        return False
    return run in former or (not followed and any(one.partition("/")[0] == process for one in former))
