"""Checks of Celery's broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mqlayer.doctor.findings import CheckStatus, Finding
from mqlayer.doctor.nodes import CheckedNode
from mqlayer.errors import MqlayerError
from mqlayer.redis.access import NodeAccess
from mqlayer.redis.addresses import display_broker_url
from mqlayer.redis.server_info import ServerInfo, read_server_info


def ask_broker(url: str, *, timeout_s: float, access: NodeAccess | None = None) -> tuple[ServerInfo | None, Finding]:
    """Check that a Redis broker answers; others are UNKNOWN."""
    subject = broker_subject(url)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        fix = "see it with its own tools; only a Redis is asked here"
        return None, Finding("reachable", subject, CheckStatus.UNKNOWN, "not a Redis", fix)
    try:
        answers = read_server_info(url, timeout_s=timeout_s, access=access or NodeAccess())
    except MqlayerError as error:
        fix = "start it, or set MQLAYER_BROKER_* as the workers have it: periodic work has stopped, messages go on"
        return None, Finding("reachable", subject, CheckStatus.BROKEN, str(error), fix)
    return answers, Finding("reachable", subject, CheckStatus.OK, f"answers in {answers.round_trip_s * 1000:.1f} ms")


def check_apart(url: str, broker: ServerInfo, nodes: Sequence[CheckedNode]) -> Finding:
    """Report a broker on a node's Redis, or on a shard of one."""
    shared = [name for checked in nodes for name, run_id in _runs(checked) if run_id == broker.run_id]
    subject = broker_subject(url)
    if not shared:
        return Finding("broker apart", subject, CheckStatus.OK, "no node is on its Redis")
    fix = "give Celery a Redis of its own (MQLAYER_BROKER_URL): a full broker would stop the node's partitions"
    return Finding("broker apart", subject, CheckStatus.WARNING, f"the same Redis as node {', '.join(shared)}", fix)


def _runs(checked: CheckedNode) -> Iterator[tuple[str, str]]:
    """Yield the servers of a node by name, with their runs."""
    name = checked.node.name
    yield name, checked.answers.run_id
    for address, shard in checked.answers.shards.items():
        yield f"{name} shard {address}", shard.run_id


def broker_subject(url: str) -> str:
    """Return the broker's name in findings."""
    return f"broker ({display_broker_url(url)})"
