"""Direct publishing against plain XADD on the same Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from bench.registry import Line, bench, compared, in_turn
from bench.stage import BATCH, BODY, FSYNCS, KEYS, Stage, System, line_name
from mqlayer.producing import Message, Producer
from mqlayer.redis.keys import partition_keys

MANY = 50_000
FEW = 1_000
ROUNDS = 7
RAW = "raw"


@bench("publish_batch")
def publish_batch(stage: Stage) -> Iterator[Line]:
    """`send_many` against pipelined XADD of the same batches, messages per second of one thread."""
    for fsync in FSYNCS:
        system = stage.system(fsync=fsync)
        with Producer(system.settings, name="bench") as producer:
            contestants = {
                "raw": partial(rate, system, MANY, partial(raw_batches, system)),
                "ours": partial(rate, system, MANY, partial(our_batches, producer)),
            }
            figures = in_turn(ROUNDS, contestants)
        name = line_name("publish_batch", fsync)
        yield compared(name, figures["ours"], figures["raw"], unit="msg/s", target=1.3)


@bench("publish_one")
def publish_one(stage: Stage) -> Iterator[Line]:
    """`send`, one message after the other, against XADD."""
    for fsync in FSYNCS:
        system = stage.system(fsync=fsync)
        with Producer(system.settings, name="bench") as producer:
            contestants = {
                "raw": partial(rate, system, FEW, partial(raw_singles, system)),
                "ours": partial(rate, system, FEW, partial(our_singles, producer)),
            }
            figures = in_turn(2 * ROUNDS, contestants)
        name = line_name("publish_one", fsync)
        yield compared(name, figures["ours"], figures["raw"], unit="msg/s", target=0.7)


@bench("send_async")
def send_async(stage: Stage) -> Iterator[Line]:
    """`send_async`, a future per message, against `send_many` of the same messages."""
    for fsync in FSYNCS:
        system = stage.system(fsync=fsync)
        with Producer(system.settings, name="bench") as producer:
            contestants = {
                "batches": partial(rate, system, MANY, partial(our_batches, producer)),
                "futures": partial(rate, system, MANY, partial(our_futures, producer)),
            }
            figures = in_turn(ROUNDS, contestants)
        name = line_name("send_async", fsync)
        yield compared(name, figures["futures"], figures["batches"], unit="msg/s", target=0.7)


def raw_batches(system: System) -> None:
    """Append by pipelines of 500, as an application without mqlayer would."""
    client = system.client()
    for start in range(0, MANY, BATCH):
        pipeline = client.pipeline(transaction=False)
        for number in range(start, start + BATCH):
            pipeline.xadd(RAW, {"k": KEYS[number % 1_000], "b": BODY})
        pipeline.execute()


def our_batches(producer: Producer) -> None:
    """Publish the same; making the messages counts."""
    producer.send_many("bench", [Message(KEYS[number % 1_000], BODY) for number in range(MANY)])


def our_futures(producer: Producer) -> None:
    """Publish the same by single calls, and take each receipt."""
    futures = [producer.send_async("bench", key=KEYS[number % 1_000], body=BODY) for number in range(MANY)]
    for future in futures:
        future.result()


def raw_singles(system: System) -> None:
    """Append one by one."""
    client = system.client()
    for number in range(FEW):
        client.xadd(RAW, {"k": KEYS[number % 1_000], "b": BODY})


def our_singles(producer: Producer) -> None:
    """Publish one by one."""
    for number in range(FEW):
        producer.send("bench", key=KEYS[number % 1_000], body=BODY)


def rate(system: System, count: int, work: Callable[[], None]) -> float:
    """Return messages per second; what was written is dropped after the time was taken, so that memory stays flat."""
    began = time.perf_counter()
    work()
    elapsed = time.perf_counter() - began
    client = system.client()
    client.xtrim(RAW, maxlen=0, approximate=False)
    for part in system.route.ranges:
        client.xtrim(partition_keys(system.settings.key_prefix, part.partition).log, maxlen=0, approximate=False)
    return count / elapsed
