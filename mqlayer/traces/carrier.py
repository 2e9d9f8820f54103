"""W3C trace context in headers, and in a record's bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from mqlayer.errors import InvalidInput

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
TRACE_MARK: Final = b'"traceparent":'
"""Stands in the facts of a record that has the header; never within another one's value, where quotes are escaped."""
# Postgres writes a space behind the colon.
_IN_FACTS: Final = re.compile(rb'"traceparent": ?"(?!ff)[0-9a-f]{2}-([0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})[-"]')
_IN_HEADER: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})(-.*)?")
_STATE: Final = re.compile(rb'"tracestate": ?"([^"\\]*)"')


def sampled_parent(facts: bytes) -> SpanContext | None:
    """Return the sampled span that a record's facts name, or None."""
    found = _IN_FACTS.search(facts)
    if found is None:
        return None
    state = _STATE.search(facts)
    return _parent(found[1].decode(), "" if state is None else state[1].decode())


def sampled_parent_of(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the sampled span that headers name, or None."""
    parent = _named(headers)
    return parent if parent is not None and parent.trace_flags.sampled else None


def headers_of(span: Span) -> dict[str, str]:
    """Return a span's headers."""
    context = span.get_span_context()
    headers = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        headers[TRACESTATE] = context.trace_state.to_header()
    return headers


def trace_context(headers: Mapping[str, str]) -> Context:
    """Return OpenTelemetry's context of a message: for a span's parent, or `attach`. Empty without a trace.

    Raises InvalidInput without OpenTelemetry.
    """
    if find_spec("opentelemetry") is None:
        raise InvalidInput("a trace's context needs more packages: pip install 'mqlayer[otel]'")
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    parent = _named(headers)
    return Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())


def _named(headers: Mapping[str, str]) -> SpanContext | None:
    found = _IN_HEADER.fullmatch(headers.get(TRACEPARENT, ""))
    return None if found is None else _span_context(found[1], headers.get(TRACESTATE, ""))


def _parent(ids: str, state: str) -> SpanContext | None:
    # The last hex digit's lowest bit.
    return _span_context(ids, state) if ids[-1] in "13579bdf" else None


@lru_cache(maxsize=256)
def _span_context(ids: str, state: str) -> SpanContext | None:
    """A batch of messages often has one context."""
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    trace_id, span_id, flags = ids.split("-")
    context = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([state]) if state else None,
    )
    return context if context.is_valid else None
