"""The systems that there are, in the order of the table."""

from __future__ import annotations

from typing import Final

from bench.peers.bullmq_jobs import BullmqJobs
from bench.peers.celery_tasks import CeleryTasks
from bench.peers.dramatiq_actors import DramatiqActors
from bench.peers.kafka_protocol import KafkaProtocol
from bench.peers.mqlayer_paths import MqlayerDirect, MqlayerOutbox
from bench.peers.nats_jetstream import NatsJetstream
from bench.peers.peer import Peer
from bench.peers.pgmq_groups import PgmqGroups
from bench.peers.procrastinate_jobs import ProcrastinateJobs
from bench.peers.rabbitmq_quorum import RabbitmqQuorum
from bench.peers.raw_streams import RawStreams
from bench.peers.skip_locked import SkipLocked

PEERS: Final[tuple[Peer, ...]] = (
    MqlayerDirect(),
    MqlayerOutbox(),
    RawStreams(),
    NatsJetstream(),
    RabbitmqQuorum(),
    KafkaProtocol(),
    CeleryTasks(),
    DramatiqActors(),
    BullmqJobs(),
    ProcrastinateJobs(),
    PgmqGroups(),
    SkipLocked(),
)


def peer_named(name: str) -> Peer:
    """Return the system of that name. Raises KeyError."""
    return {peer.name: peer for peer in PEERS}[name]
