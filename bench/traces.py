"""The cost of traces: consuming, publishing and relaying with traces on, against the same messages without, in one run.

Three shares of messages have a sampled trace: none, 1 % and all. Spans are encoded as for a collector, and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import set_tracer_provider

from bench.consume import MESSAGES, ours
from bench.fill import FACTS, fill
from bench.publish import MANY, our_batches, rate
from bench.registry import Line, compared, in_turn
from bench.relay import PARTITIONS, run_relay
from bench.stage import Stage, System
from mqlayer.domain.message import encode_facts
from mqlayer.producing import Producer
from mqlayer.traces import TRACEPARENT, follow_links

ROUNDS = 3
SHARES = {"none": 0, "1%": 100, "all": 1}
"""Every how many-th message is sampled; 0: none is."""
TARGETS = {"none": 0.97, "1%": 0.97, "all": None}


class ShareSampler(Sampler):
    """Samples roots in the present share."""

    ratio: Sampler = TraceIdRatioBased(0.0)

    def should_sample(self, *facts: Any, **more: Any) -> SamplingResult:
        """Ask the ratio."""
        return self.ratio.should_sample(*facts, **more)

    def get_description(self) -> str:
        """Return its name."""
        return "ShareSampler"


class EncodingExporter(SpanExporter):
    """Does the work of an exporter but for the network."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode spans."""
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def traces(stage: Stage) -> Iterator[Line]:
    """Messages per second, with durable appends."""
    for share, every in SHARES.items():
        system = stage.system(fsync="always")
        # A span takes as long as 25 messages.
        count = MESSAGES if every != 1 else MESSAGES // 10
        fill(system, count, facts=partial(facts_of, every))
        off, on = partial(ours, system, count), partial(ours, traced(system), count)
        yield both_ways("traces_consume", share, off, on)
        yield publishing(stage.system(fsync="always"), share, 1 / every if every else 0.0)
        system = stage.system(fsync="always", partitions=PARTITIONS)
        headers = partial(headers_of, every)
        off, on = partial(run_relay, system, headers), partial(run_relay, traced(system), headers)
        yield both_ways("traces_relay", share, off, on)


def publishing(system: System, share: str, ratio: float) -> Line:
    """Publish in batches: one span per call."""
    sampler = sampling()
    sampler.ratio = TraceIdRatioBased(ratio)
    with Producer(system.settings, name="off") as off, Producer(traced(system).settings, name="on") as on:
        runs = [partial(rate, system, MANY, partial(our_batches, producer)) for producer in (off, on)]
        line = both_ways("traces_publish_batch", share, *runs)
    # No span for what fills an outbox.
    sampler.ratio = TraceIdRatioBased(0.0)
    return line


def both_ways(name: str, share: str, off: Any, on: Any) -> Line:
    """Compare in both orders."""
    figures = in_turn(ROUNDS, {"off": off, "on": on, "on, first": on, "off, second": off})
    value, baseline = (figures["on"] + figures["on, first"]) / 2, (figures["off"] + figures["off, second"]) / 2
    return compared(f"{name}[{share}]", value, baseline, unit="msg/s", target=TARGETS[share])


@cache
def sampling() -> ShareSampler:
    """Set this process's provider; return its sampler."""
    sampler, provider = ShareSampler(), TracerProvider(shutdown_on_exit=False)
    provider.sampler = follow_links(sampler)
    provider.add_span_processor(BatchSpanProcessor(EncodingExporter()))
    set_tracer_provider(provider)
    return sampler


def traced(system: System) -> System:
    """Return the same system, for parts that make spans."""
    sampling()
    settings = system.settings.model_copy(update={"traces": True})
    return replace(system, runtime=replace(system.runtime, settings=settings))


def headers_of(every: int, number: int) -> Mapping[str, str] | None:
    """Return a sampled message's headers."""
    return {TRACEPARENT: f"00-{number + 1:032x}-{number + 1:016x}-01"} if every and not number % every else None


def facts_of(every: int, number: int) -> bytes:
    """Return a record's facts."""
    headers = headers_of(every, number)
    return FACTS if headers is None else encode_facts(0, headers)
