"""Trace context in headers and bytes, the sampler that follows links, the limit of links, ids in log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, ParentBased
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, get_current_span, set_span_in_context

import mqlayer.logs
from mqlayer.domain.message import encode_facts, mark_reordered
from mqlayer.domain.names import HEADER_COUNT_LIMIT, with_headers
from mqlayer.errors import InvalidInput
from mqlayer.logs import configure_logging, event_logger
from mqlayer.settings import switched_on
from mqlayer.traces import (
    LINK_LIMIT,
    TRACEPARENT,
    Tracing,
    follow_links,
    sampled_parent,
    sampled_parent_of,
    trace_context,
)
from mqlayer.traces.carrier import headers_of
from mqlayer.traces.sampling import ensure_provider
from mqlayer.traces.tracing import _current_ids

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
NOT_SAMPLED = f"00-{TRACE}-{SPAN}-00"


@pytest.mark.parametrize(
    ("headers", "sampled"),
    [
        ({TRACEPARENT: SAMPLED}, True),
        ({"a": "b", TRACEPARENT: f"00-{TRACE}-{SPAN}-03"}, True),
        ({TRACEPARENT: f"01-{TRACE}-{SPAN}-01-more"}, True),
        ({TRACEPARENT: NOT_SAMPLED}, False),
        ({TRACEPARENT: f"00-{TRACE}-{SPAN}-0a"}, False),
        ({TRACEPARENT: f"ff-{TRACE}-{SPAN}-01"}, False),
        ({TRACEPARENT: f"00-{'0' * 32}-{SPAN}-01"}, False),
        ({TRACEPARENT: SAMPLED.upper()}, False),
        ({TRACEPARENT: "00"}, False),
        ({"said": f'"traceparent":"{SAMPLED}"'}, False),
        ({"x-traceparent": SAMPLED}, False),
        ({}, False),
    ],
)
def test_a_sampled_trace_is_told_by_headers_and_by_a_records_bytes_alike(
    headers: dict[str, str], sampled: bool
) -> None:
    """As direct producers write them, and as Postgres does, with spaces."""
    of_postgres = b"17:" + json.dumps(headers).encode()
    found = [sampled_parent(encode_facts(17, headers)), sampled_parent(of_postgres), sampled_parent_of(headers)]
    assert [parent is not None for parent in found] == [sampled] * 3
    if sampled:
        assert {f"{parent.trace_id:032x}-{parent.span_id:016x}" for parent in found if parent} == {f"{TRACE}-{SPAN}"}
        assert sampled_parent(mark_reordered(encode_facts(17, headers))) == found[0]


def test_a_context_goes_through_headers_with_its_state() -> None:
    headers = {TRACEPARENT: NOT_SAMPLED, "tracestate": "vendor=1,other=2"}
    span = get_current_span(trace_context(headers))
    assert headers_of(span) == headers
    assert trace_context({}) == trace_context({TRACEPARENT: "junk"}) == Context()


def test_a_trace_that_finds_no_room_among_headers_is_left_out() -> None:
    full = {f"h{number}": "v" for number in range(HEADER_COUNT_LIMIT)}
    assert with_headers(full, {TRACEPARENT: SAMPLED}) == full
    assert with_headers({"a": "b"}, {TRACEPARENT: SAMPLED}) == {"a": "b", TRACEPARENT: SAMPLED}


def parent(flags: int) -> SpanContext:
    return SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=True, trace_flags=TraceFlags(flags))


def test_a_root_with_a_link_to_a_sampled_message_is_kept_and_others_are_left_to_the_sampler() -> None:
    sampler = follow_links(ParentBased(ALWAYS_OFF))
    under = set_span_in_context(NonRecordingSpan(parent(0)), Context())

    def kept(*links: Link, context: Context | None = None) -> bool:
        result = sampler.should_sample(context or Context(), 1, "process orders", links=links)
        return result.decision is Decision.RECORD_AND_SAMPLE

    assert kept(Link(parent(0)), Link(parent(1)))
    assert not kept(Link(parent(0)))
    assert not kept()
    assert not kept(Link(parent(1)), context=under)
    assert sampler.get_description().startswith("LinkSampler{ParentBased")


def test_a_span_has_128_links_at_most_and_one_per_span() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    tracing = Tracing(provider.get_tracer("test"))
    contexts = [SpanContext(1, number, is_remote=True) for number in range(1, 300)]
    links = tracing.links([contexts[0], *contexts])
    assert [link.context.span_id for link in links] == list(range(1, LINK_LIMIT + 1))


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lines with ids, and logging as before at the end."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    monkeypatch.setattr(mqlayer.logs, "_trace_ids", [_current_ids])
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.usefixtures("carried")
def test_lines_carry_the_ids_of_the_current_span_those_of_other_loggers_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("INFO", style="json")
    ours, theirs = event_logger("mqlayer.test_traces"), logging.getLogger("test_traces.shop")
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("request") as span:
        context = span.get_span_context()
        ours.warning("said", extra={"n": 1})
        theirs.warning("plain")
        configure_logging("INFO", style="text")
        ours.warning("said", extra={"n": 1})
    ours.warning("outside")
    first, second, third, fourth = capsys.readouterr().err.splitlines()
    ids = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
    for line, event in ((first, "said"), (second, "plain")):
        found = json.loads(line)
        assert (found["event"], {name: found[name] for name in ids}) == (event, ids)
    assert f"trace_id={ids['trace_id']} span_id={ids['span_id']}" in third
    assert "n=1" in third
    assert "trace_id" not in fourth


def test_a_switch_is_read_alone_and_an_unknown_exporter_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_TRACES", "yes")
    monkeypatch.setenv("MQLAYER_MISSPELT", "1")
    assert switched_on("traces") is True
    assert switched_on("trace_all") is False
    monkeypatch.setenv("MQLAYER_TRACES", "perhaps")
    with pytest.raises(InvalidInput, match="MQLAYER_TRACES is true or false, not 'perhaps'"):
        switched_on("traces")
    # Of a process that has made spans already, the provider is there.
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    with pytest.raises(InvalidInput, match=r"no package exports traces as 'jaeger'.*mqlayer\[otel\]"):
        ensure_provider()
