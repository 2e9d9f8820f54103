"""RabbitMQ: quorum queues with a single active consumer, confirmed publishing, keys divided by the application."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.peers.load import HANDLERS, CheckedHandler, KeyedBody, part_of
from bench.peers.peer import Peer, PeerMissing, PeerServers, PublishBatch, client_module

if TYPE_CHECKING:
    from bench.peers.ground import Ground

PREFETCH = 500
ARGUMENTS = {"x-queue-type": "quorum", "x-single-active-consumer": True}
DEBIAN = (
    "rabbitmq-server",
    *(f"erlang-{part}" for part in ("base", "asn1", "crypto", "public-key", "mnesia", "runtime-tools", "ssl")),
    *(f"erlang-{part}" for part in ("eldap", "ftp", "tftp", "inets", "snmp", "os-mon", "parsetools")),
    *(f"erlang-{part}" for part in ("syntax-tools", "tools", "xmerl")),
)


class RabbitmqQuorum(Peer):
    """Batches of confirmed publishing; consumers that acknowledge each message."""

    name = "rabbitmq"
    packages = ("aio-pika",)
    stored = "in the synced log of a quorum queue with one member"
    shape = "8 quorum queues, a single active consumer each; keys divided by the application"
    most_messages = 20_000
    sources = (
        "https://www.rabbitmq.com/docs/quorum-queues",
        "https://www.rabbitmq.com/docs/consumers#single-active-consumer",
        "https://www.rabbitmq.com/docs/confirms",
    )

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        root = ground.unpacked(self, DEBIAN)
        home, node = installed(root)
        erl = relocated_erl(root)
        port, distribution, mapper = (ground.free_port() for _ in range(3))
        place = ground.directory("rabbitmq")
        names = {"RABBITMQ_MNESIA_BASE": "data", "RABBITMQ_LOG_BASE": "log", "RABBITMQ_CONF_ENV_FILE": "none"}
        environment = {
            "HOME": str(place),
            "PATH": f"{erl}:{os.environ['PATH']}",
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_PID_FILE": str(place / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq"),
            # Its port mapper is the runner's child too: Erlang's own would outlive the run.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-start_epmd false",
            **{name: str(place / path) for name, path in names.items()},
        }
        with (
            ground.running([erl / "epmd", "-port", str(mapper)], mapper, environment),
            ground.running([node], port, environment) as server,
        ):
            versions = f"RabbitMQ {home.name.rpartition('-')[2]}, {ground.client_version(self, 'aio-pika')}"
            yield PeerServers(f"amqp://guest:guest@127.0.0.1:{port}/", (server.pid,), versions)

    @contextmanager
    def publisher(self, url: str, queue: str) -> Iterator[PublishBatch]:
        aio_pika = client_module("aio_pika")
        with asyncio.Runner() as runner:
            connection = runner.run(aio_pika.connect(url))
            channel = runner.run(confirming_channel(connection))
            runner.run(declared(channel, queue))
            persistent = aio_pika.DeliveryMode.PERSISTENT

            async def publish_all(batch: Sequence[KeyedBody]) -> None:
                send = channel.default_exchange.publish
                messages = [(f"{queue}-{part_of(key)}", aio_pika.Message(body, delivery_mode=persistent))
                            for key, body in batch]  # fmt: skip
                await asyncio.gather(*(send(message, routing_key=part) for part, message in messages))

            yield lambda batch: runner.run(publish_all(batch))
            runner.run(connection.close())

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        asyncio.run(consume_queues(url, queue, handler))


async def confirming_channel(connection: Any) -> Any:
    """Return a channel, which only a running loop can open."""
    return await connection.channel(publisher_confirms=True)


async def declared(channel: Any, queue: str) -> list[Any]:
    """Return the queues of the parts, made where they are not there."""
    names = [f"{queue}-{part}" for part in range(HANDLERS)]
    return [await channel.declare_queue(name, durable=True, arguments=ARGUMENTS) for name in names]


async def consume_queues(url: str, queue: str, handler: CheckedHandler) -> None:
    """Run a consumer for each part, one message after the other."""
    connection = await client_module("aio_pika").connect(url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=PREFETCH)

    async def consume_part(part: Any) -> None:
        async with part.iterator() as messages:
            async for message in messages:
                await handler.handle(message.body)
                await message.ack()

    parts = [asyncio.create_task(consume_part(part)) for part in await declared(channel, queue)]
    await asyncio.to_thread(handler.done.wait)
    for part in parts:
        part.cancel()
    await asyncio.wait(parts)
    await connection.close()


def installed(root: Path) -> tuple[Path, Path]:
    """Return the folder of RabbitMQ and the program that starts it. Raises PeerMissing."""
    for home in root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*"):
        return home, home / "sbin" / "rabbitmq-server"
    raise PeerMissing("Debian's package has no RabbitMQ")


def relocated_erl(root: Path) -> Path:
    """Return a folder with Erlang's programs for where they were unpacked: their scripts name a fixed place."""
    place, programs = root / "usr/lib/erlang", root / "programs"
    if not programs.exists():
        programs.mkdir()
        script = (place / "bin" / "erl").read_text().replace("ROOTDIR=/usr/lib/erlang", f"ROOTDIR={place}")
        (programs / "erl").write_text(script)
        (programs / "erl").chmod(0o755)
        for name in ("epmd", "erlexec"):
            shutil.copy(next(place.glob(f"erts-*/bin/{name}")), programs / name)
    return programs
