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
    yield from beside(stage, "publish_batch", our_batches, lambda system, _: raw_batches(system), target=1.3)


@bench("publish_one")
def publish_one(stage: Stage) -> Iterator[Line]:
    """`send`, one message after the other, against XADD."""
    yield from beside(
        stage, "publish_one", our_singles, lambda system, _: raw_singles(system), messages=FEW, rounds=2 * ROUNDS,
        target=0.7,
    )  # fmt: skip


@bench("send_async")
def send_async(stage: Stage) -> Iterator[Line]:
    """`send_async`, a future per message, against `send_many` of the same messages."""
    yield from beside(stage, "send_async", our_futures, lambda _, producer: our_batches(producer), target=0.7)


def beside(
    stage: Stage,
    name: str,
    ours: Callable[[Producer], None],
    baseline: Callable[[System, Producer], None],
    *,
    target: float,
    messages: int = MANY,
    rounds: int = ROUNDS,
) -> Iterator[Line]:
    """Measure a way to send against a baseline, with either fsync."""
    for fsync in FSYNCS:
        system = stage.system(fsync=fsync)
        with Producer(system.settings, name="bench") as producer:
            contestants = {
                "baseline": partial(rate, system, messages, partial(baseline, system, producer)),
                "ours": partial(rate, system, messages, partial(ours, producer)),
            }
            figures = in_turn(rounds, contestants)
        yield compared(line_name(name, fsync), figures["ours"], figures["baseline"], unit="msg/s", target=target)


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
