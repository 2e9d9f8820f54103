"""Traces by OpenTelemetry, off without the setting `traces` (docs/design/decisions/0069-traces-by-flag.md)."""

from mqlayer.traces.carrier import TRACE_MARK, TRACEPARENT, sampled_parent, sampled_parent_of, trace_context
from mqlayer.traces.sampling import follow_links
from mqlayer.traces.tracing import (
    LINK_LIMIT,
    OpenSpan,
    Tracing,
    current_parent,
    process_tracing,
    take_failed_ids,
    tracing_of,
)

__all__ = [
    "LINK_LIMIT",
    "TRACEPARENT",
    "TRACE_MARK",
    "OpenSpan",
    "Tracing",
    "current_parent",
    "follow_links",
    "process_tracing",
    "sampled_parent",
    "sampled_parent_of",
    "take_failed_ids",
    "trace_context",
    "tracing_of",
]
