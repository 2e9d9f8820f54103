"""Runs of a node's Redis: `docs/design/arming-nodes.md`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

NO_ID: Final = "0"
SHOWN_ID: Final = 12
DIVIDER: Final = " "
"""Between the shards of a cluster's run."""
MEMBER_LENGTH: Final = 10
"""Of a shard's name in runs."""
MAX_SHARDS: Final = 20
"""Of a cluster: its run is a text of a kilobyte at most."""


def run_of(info: Mapping[str, str]) -> str:
    """Return the run that INFO shows."""
    followed = info.get("master_replid2", "")
    return info["run_id"] if not followed.strip(NO_ID) else f"{info['run_id']}/{followed[:SHOWN_ID]}"


class ShardRun(NamedTuple):
    """A cluster's shard: its primary's run and name in the cluster, and a digest of its slots."""

    run: str
    member: str
    slots_digest: str


def cluster_run(shards: Iterable[ShardRun]) -> str:
    """Return the run of a cluster: all shards' runs, `<process>/<followed>@<member>.<slots>` each."""
    entries = []
    for shard in shards:
        process, _, followed = shard.run.partition("/")
        entries.append(f"{process[:16]}/{followed}@{shard.member[:MEMBER_LENGTH]}.{shard.slots_digest[:6]}")
    return DIVIDER.join(sorted(entries))


def is_cluster_run(run: str | None) -> bool:
    """Whether a run is a cluster's."""
    return run is not None and "@" in run


def is_same_run(found: str, armed: str | None) -> bool:
    """Whether a run is the armed one. A cluster may have moved slots between armed shards."""
    if not is_cluster_run(armed) or armed is None:
        return found == armed
    return _without_slots(found) == _without_slots(armed)


def is_unchanged(shard: ShardRun, armed: str | None) -> bool:
    """Whether a shard is armed, with the slots that it had then."""
    return armed is not None and cluster_run([shard]) in armed.split(DIVIDER)


def is_armed_shard(shard: ShardRun, armed: str | None) -> bool:
    """Whether a shard is armed, with any slots."""
    return armed is not None and _without_slots(cluster_run([shard])) <= _without_slots(armed)


def members_of(run: str | None) -> frozenset[str]:
    """Return shards' names, as runs have them."""
    return frozenset(one.partition("@")[2].partition(".")[0] for one in (run or "").split(DIVIDER)) - {""}


def is_member(member: str, names: Collection[str]) -> bool:
    """Whether `members_of` has a server."""
    return member[:MEMBER_LENGTH] in names


def short_run(run: str | None) -> str:
    """Return a run's name for people."""
    if run is None:
        return ""
    return ",".join(one[:8] for one in run.split(DIVIDER))


def _without_slots(run: str) -> set[str]:
    return {one.rpartition(".")[0] for one in run.split(DIVIDER)}


def is_former(run: str, *, armed: str | None, former: Collection[str]) -> bool:
    """Whether a run was armed and replaced, so must not serve; of a cluster, whether any shard's was.

    A replaced process that names none is former too: after an hour without replicas it forgets.
    """
    serving = {_name(one).partition("/")[0] for one in (armed or "").split(DIVIDER)}
    replaced = {_name(one) for one in former}
    for one in map(_name, run.split(DIVIDER)):
        process, _, followed = one.partition("/")
        if process in serving:
            continue
        if one in replaced or (not followed and any(other.partition("/")[0] == process for other in replaced)):
            return True
    return False


def _name(run: str) -> str:
    return run.partition("@")[0].removesuffix("/")
