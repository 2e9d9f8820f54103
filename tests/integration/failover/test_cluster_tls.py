"""A cluster that speaks TLS only with who has a certificate, and gives out addresses or names of its servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mqlayer.errors import AccessDenied, StoreUnavailable
from mqlayer.inspect.node_status import node_statuses
from mqlayer.postgres.database import Database
from mqlayer.topics import find_node, register_node
from tests.fixtures.certificates import Authority, authority
from tests.fixtures.cluster_load import await_more, move_each_slot, publishing
from tests.fixtures.clusters import NAMED, Cluster, StartCluster, over_tls
from tests.fixtures.consumers import Recorder, StartStage
from tests.fixtures.receivers import OpenReceiver
from tests.fixtures.servers import redis_7_program
from tests.fixtures.shared_members import share
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(180),
    # Python itself leaves a socket to be collected where its server ends between connect and handshake.
    pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning"),
]

StartOverTls = Callable[..., Cluster]


@pytest.fixture
def known(server_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """An authority that processes know, and their certificate."""
    home = server_directory / f"cluster-tls-{os.urandom(4).hex()}"
    found = authority(home)
    certificate, key = found.sign("client", "client")
    monkeypatch.setenv("MQLAYER_REDIS_CA_FILE", str(found.certificate))
    monkeypatch.setenv("MQLAYER_REDIS_CERT_FILE", str(certificate))
    monkeypatch.setenv("MQLAYER_REDIS_KEY_FILE", str(key))
    return found


@pytest.fixture
def start_over_tls(start_cluster: StartCluster, known: Authority) -> StartOverTls:
    """Start a cluster whose certificate has this host."""

    def start(host: str, *, replicas: int = 0, **options: str) -> Cluster:
        return start_cluster(replicas=replicas, program=redis_7_program(), options={**over_tls(known, host), **options})

    return start


@pytest.mark.parametrize(("host", "names"), [("127.0.0.1", {}), ("localhost", NAMED)], ids=["addresses", "names"])
def test_all_work_goes_on_over_tls_while_a_slot_moves_and_a_shard_fails_over(
    start_over_tls: StartOverTls,
    start_stage: StartStage,
    receiver_of: OpenReceiver,
    host: str,
    names: dict[str, str],
) -> None:
    """The certificate has no address where names are given out: none could be reached by another way."""
    cluster = start_over_tls(host, replicas=1, **names)
    assert cluster.url.startswith(f"clusters://{host}:")
    stage = start_stage(cluster.url, partitions=3)
    armed = find_node(stage.database, "node-1").armed_run_id
    ordered, shared = Recorder(), Recorder()
    stage.consume(ordered)
    share(stage, shared, group="s")
    with publishing(stage) as sent:
        move_each_slot(cluster, stage.partitions, ordered, cluster.move_slot)
        await_more(ordered, 20)
    wait_until(lambda: ordered.count() == shared.count() == len(sent), timeout_s=30, what="all handled")
    ordered.assert_in_order()
    assert find_node(stage.database, "node-1").armed_run_id == armed
    (found,) = node_statuses(stage.runtime)
    assert found.state == "serving"
    popped = receiver_of(stage, group="p").receive(20, wait_s=20)
    assert popped

    world = stage.world
    with world.relay():
        world.publish(60)
        cluster.kill(cluster.owner(stage.partitions[0]))
        world.publish(60, tag="after")
        wait_until(lambda: whole(ordered), timeout_s=60, what="what came through the outbox handled")
    assert find_node(stage.database, "node-1").armed_run_id not in (None, armed)


def whole(recorder: Recorder) -> bool:
    """Whether each key's messages of the outbox were handled in order."""
    wanted = [f"{tag}-{number}".encode() for tag in ("m", "after") for number in range(60)]
    return all(
        list(dict.fromkeys(body for body in recorder.bodies(f"key-{key}") if b"-" in body)) == wanted[key::20]
        for key in range(20)
    )


def test_servers_that_give_out_addresses_need_them_in_their_certificates(
    start_over_tls: StartOverTls, database_dsn: str
) -> None:
    """The seeds' names don't help: shards are reached as the cluster says."""
    cluster = start_over_tls("localhost")
    url = cluster.url.replace("127.0.0.1", "localhost")
    with Database(database_dsn) as database, pytest.raises(AccessDenied, match="cluster-announce-hostname"):
        register_node(runtime_of(database), name="n1", url=url)


def test_servers_that_are_to_give_out_names_and_have_none_say_so(
    start_over_tls: StartOverTls, database_dsn: str
) -> None:
    cluster = start_over_tls("127.0.0.1", **{"cluster-preferred-endpoint-type": "hostname"})
    with Database(database_dsn) as database, pytest.raises(StoreUnavailable, match="cluster-announce-hostname"):
        register_node(runtime_of(database), name="n1", url=cluster.url)


def test_a_shard_outside_of_the_allowed_hosts_gets_no_login(
    start_over_tls: StartOverTls, database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cluster gives out counts, too."""
    cluster = start_over_tls("localhost", **NAMED)
    seed = cluster.url.partition("://")[2].partition(",")[0]
    monkeypatch.setenv("MQLAYER_REDIS_HOSTS", seed)
    with Database(database_dsn) as database:
        with pytest.raises(AccessDenied, match="not among MQLAYER_REDIS_HOSTS"):
            register_node(runtime_of(database), name="n1", url=f"clusters://{seed}")
        monkeypatch.setenv("MQLAYER_REDIS_HOSTS", "localhost")
        assert register_node(runtime_of(database), name="n1", url=f"clusters://{seed}").armed_run_id
