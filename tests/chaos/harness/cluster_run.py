"""A run on a Redis Cluster beside a single node: shards fail over, restart, are emptied, and pass slots on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Final

import redis

from tests.chaos.harness.nemesis import KINDS, Nemesis
from tests.chaos.harness.run import Run
from tests.chaos.harness.sites import NodeSite, Site
from tests.fixtures.clusters import Cluster, cluster_in, slot_of
from tests.fixtures.kept_connections import ask_postgres
from tests.proof.node_client import client_at
from tests.proof.proxy import TcpProxy

TIMEOUT_MS: Final = 3_000
"""On a busy machine a primary answers late, and must not lose its place without a note."""
OF_SERVERS: Final = ("node", "memory", "fail_over", "power_cut", "wipe")
CLUSTER_KINDS: Final = {
    **{kind: weight for kind, weight in KINDS.items() if kind not in OF_SERVERS},
    "shard_fail_over": 6, "shard_restart": 3, "shard_wipe": 2, "slot_move": 10, "shard_network": 10,
}  # fmt: skip
PLACED: Final = """
SELECT p.partition_id FROM mqlayer.partition AS p JOIN mqlayer.node AS n USING (node_id)
WHERE n.name = 'n0' AND p.state <> 'deleted' ORDER BY 1
"""


class ShardLines(Site):
    """The lines to one server of a cluster."""

    def __init__(self, port: int, cleanup: ExitStack) -> None:
        self.name = f":{port}"
        self.proxy = cleanup.enter_context(TcpProxy("127.0.0.1", port))


class ClusterSite(NodeSite):
    """A cluster of three shards with a replica each, and a proxy in front of each server, whose port it gives out.

    One proxy more leads to the first server, which others ask for the slots.
    """

    def __init__(self, directory: Path, name: str, cleanup: ExitStack) -> None:
        self.name, self.lines = name, dict[int, ShardLines]()

        def door(port: int) -> int:
            self.lines[port] = ShardLines(port, cleanup)
            return self.lines[port].proxy.port

        self.cluster: Cluster = cleanup.enter_context(cluster_in(directory / name, timeout_ms=TIMEOUT_MS, door=door))
        self.server = self.cluster.servers[0]
        self.proxy = cleanup.enter_context(TcpProxy("127.0.0.1", self.server.port))

    @property
    def url(self) -> str:
        """The address for everybody."""
        seeds = [self.proxy.port, *(server.port for server in self.cluster.servers)]
        return f"cluster://{','.join(f'127.0.0.1:{port}' for port in seeds)}"

    def client(self) -> redis.Redis:
        """Return a client by the lines to the shards, which are well but for one fault at a time."""
        return client_at(self.cluster.url)


class ClusterNemesis(Nemesis):
    """Breaks shards too, one after the other: each time the cluster is well before and after."""

    def _cluster_site(self) -> ClusterSite:
        return next(site for site in self._nodes if isinstance(site, ClusterSite))

    def _shard_fail_over(self) -> str:
        site = self._cluster_site()
        cluster = site.cluster
        primary = self._rng.choice(cluster.primaries())
        # What is settled from here on may come again.
        self._fell_back(site)
        if lags := self._rng.random() < 0.7:
            cluster.hold_back(primary)
            self.let_pass(self._rng.uniform(0.0, 0.5))
        self._fell_back(site)
        cluster.kill(primary)
        self._fell_back(site)
        self.let_pass(self._rng.uniform(0.0, 1.0))
        primary.start()
        cluster.wait_ok()
        self._fell_back(site)
        return f"{site.name} :{primary.port}{' that lags' if lags else ''}"

    def _shard_restart(self) -> str:
        site = self._cluster_site()
        primary = self._rng.choice(site.cluster.primaries())
        self._fell_back(site)
        primary.kill()
        primary.start()
        site.cluster.wait_ok()
        self._fell_back(site)
        return f"{site.name} :{primary.port}"

    def _shard_wipe(self) -> str:
        site = self._cluster_site()
        primary = self._rng.choice(site.cluster.primaries())
        self._fell_back(site)
        site.cluster.ask(primary, "FLUSHALL")
        self._fell_back(site)
        return f"{site.name} :{primary.port}"

    def _shard_network(self) -> str:
        site = self._cluster_site()
        lines = site.lines[self._rng.choice(site.cluster.primaries()).port]
        return f"{self._break_lines(lines)} of {site.name}"

    def _slot_move(self) -> str:
        site = self._cluster_site()
        partitions = [row[0] for row in ask_postgres(self._database.direct_dsn, PLACED)]
        if not partitions:
            return ""
        slot = slot_of(self._rng.choice(partitions))
        primaries = site.cluster.primaries()
        target = self._rng.choice([one for one in primaries if slot not in site.cluster.slots(one)])
        site.cluster.move_slot(slot, target)
        site.cluster.wait_ok()
        return f"{site.name} slot {slot} to :{target.port}"


class ClusterRun(Run):
    """A run whose first node is a cluster."""

    partitions = 6
    kinds: ClassVar = CLUSTER_KINDS
    _nemesis_class = ClusterNemesis

    def _make_nodes(self, directory: Path, cleanup: ExitStack) -> list[NodeSite]:
        return [ClusterSite(directory, "n0", cleanup), NodeSite(directory, "n1", cleanup)]
