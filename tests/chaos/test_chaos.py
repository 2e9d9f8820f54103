"""Cases 5, 12 to 24, 34, 35, 72, 73, 75, 77, 79, 81 to 83: the whole system under all faults that there are.

Publishers, relays, consumers of two groups, drivers of route changes, and workers run as real processes on three nodes
and a Postgres; a nemesis with a seed kills and stops them wherever they stand, breaks lines and servers, turns clocks,
cuts power and fails over to a replica that lags. Then everything is let go, the backlog drains through all generations
of partitions until both groups are at the topic's route version; and the histories, the stores, the archive and what
is left on the nodes are judged.

The short form runs with the suite; `--long` makes it last: 10^5 messages of 500 keys. MQLAYER_CHAOS_SECONDS says how
long, MQLAYER_CHAOS_SEED repeats a choice of faults, MQLAYER_CHAOS_REPORT names a file for the report as JSON.
`python -m tests.chaos` does the same without the suite, and without Spark's order audit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.harness.cluster_run import CLUSTER_KINDS, ClusterRun
from tests.chaos.harness.nemesis import KINDS
from tests.chaos.harness.run import SHORT, SUITE, Length, run, shown
from tests.chaos.harness.scene import Scene

LONG_S, LONG_PAUSE_S = 600.0, 0.04


def length_of(config: pytest.Config) -> Length:
    """Return the short form, the long one, or as many seconds as are asked for."""
    long = bool(config.getoption("--long", default=False))
    seconds = float(os.environ.get("MQLAYER_CHAOS_SECONDS", LONG_S if long else 0))
    if not long:
        return replace(SUITE, seconds=seconds)
    return replace(SHORT, seconds=seconds, changes=20, messages=100_000, pause_s=LONG_PAUSE_S)


# The audit's session is the one of Spark's other tests: another would take as long as the faults.
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(0)
def test_whatever_breaks_every_key_is_handled_in_commit_order_and_once(
    request: pytest.FixtureRequest, order_audit: Callable[[Scene], Iterator[str]]
) -> None:
    """Nothing is lost, reversed, or has its effect twice or by a stale owner, over all generations of partitions.

    Case 82 is the kind `clock`: a consumer's clock is set off by a minute, in either direction. Case 83 is `fail_over`.
    """
    seed = int(os.environ.get("MQLAYER_CHAOS_SEED", "0")) or random.randrange(1, 10**6)
    print(f"MQLAYER_CHAOS_SEED={seed}")  # noqa: T201
    length = length_of(request.config)
    report = shown(run(seed, length, audits=[order_audit]))
    told = json.dumps(report)
    print(told)  # noqa: T201
    if path := os.environ.get("MQLAYER_CHAOS_REPORT"):
        Path(path).write_text(told, "utf-8")
    assert report["clean"], told
    # Without a compiler no power is cut: see tests/fixtures/power.py.
    possible = set(KINDS) if shutil.which(os.environ.get("CC", "cc")) else set(KINDS) - {"power_cut"}
    assert possible <= set(report["faults_by_kind"]), told
    assert report["faults"] >= length.faults, told
    assert sum(report["route_changes"].values()) >= length.changes, "too few changes came into force to prove anything"
    # The short form ends by its time on a machine that others keep busy.
    enough = length.messages if length.seconds else length.messages / 2
    assert report["messages"] >= enough, "too little was published to prove anything"


@pytest.mark.full
@pytest.mark.timeout(0)
def test_whatever_breaks_a_cluster_keeps_the_same(request: pytest.FixtureRequest) -> None:
    """The same on a Redis Cluster: shards fail over with what their replicas have, and slots move under load."""
    seed = int(os.environ.get("MQLAYER_CHAOS_SEED", "0")) or random.randrange(1, 10**6)
    print(f"MQLAYER_CHAOS_SEED={seed}")  # noqa: T201
    report = shown(run(seed, length_of(request.config), form=ClusterRun))
    told = json.dumps(report)
    assert report["clean"], told
    assert set(CLUSTER_KINDS) <= set(report["faults_by_kind"]), told
