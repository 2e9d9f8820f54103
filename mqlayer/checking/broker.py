"""Celery's broker: it only triggers, but a full or lost one must not be a node's Redis."""

from __future__ import annotations

from collections.abc import Sequence

from mqlayer.checking.findings import Finding, Verdict
from mqlayer.checking.nodes import AskedNode
from mqlayer.errors import MqlayerError
from mqlayer.redis.access import NodeAccess
from mqlayer.redis.addresses import shown_broker_url
from mqlayer.redis.asking import ServerAnswers, ask_server


def ask_broker(url: str, *, timeout_s: float, access: NodeAccess | None = None) -> tuple[ServerAnswers | None, Finding]:
    """Ask the broker whether it is there; only a Redis can be asked."""
    subject = broker_subject(url)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        fix = "see it with its own tools; only a Redis is asked here"
        return None, Finding("reachable", subject, Verdict.UNKNOWN, "not a Redis", fix)
    try:
        answers = ask_server(url, timeout_s=timeout_s, access=access or NodeAccess())
    except MqlayerError as error:
        fix = "start it, or set MQLAYER_BROKER_* as the workers have it: periodic work stands still, messages don't"
        return None, Finding("reachable", subject, Verdict.BROKEN, str(error), fix)
    return answers, Finding("reachable", subject, Verdict.OK, f"answers in {answers.round_trip_s * 1000:.1f} ms")


def check_apart(url: str, broker: ServerAnswers, nodes: Sequence[AskedNode]) -> Finding:
    """The broker should be a Redis of its own."""
    shared = [asked.node.name for asked in nodes if asked.answers.run_id == broker.run_id]
    subject = broker_subject(url)
    if not shared:
        return Finding("broker apart", subject, Verdict.OK, "no node is on its Redis")
    fix = "give Celery a Redis of its own (MQLAYER_BROKER_URL): a full broker would stop the node's partitions"
    return Finding("broker apart", subject, Verdict.WARNING, f"the same Redis as node {', '.join(shared)}", fix)


def broker_subject(url: str) -> str:
    """Return how a finding names the broker."""
    return f"broker ({shown_broker_url(url)})"
