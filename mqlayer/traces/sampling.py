"""The tracer provider of processes that have set none, and the sampling of linked spans."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from mqlayer.errors import InvalidInput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler

MORE_PACKAGES: Final = "traces need more packages: pip install 'mqlayer[otel]'"
_EXPORTERS: Final = "opentelemetry_traces_exporter"


def ensure_provider() -> None:
    """Set a provider by the variables OTEL_* unless the program has set one. Raises InvalidInput without the SDK."""
    if find_spec("opentelemetry") is None:
        raise InvalidInput(MORE_PACKAGES)
    from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider, set_tracer_provider

    if not isinstance(get_tracer_provider(), ProxyTracerProvider):
        return
    if find_spec("opentelemetry.sdk") is None:
        raise InvalidInput(MORE_PACKAGES)
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.sampler = follow_links(provider.sampler)
    for exporter in _exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    set_tracer_provider(provider)


def follow_links(sampler: Sampler) -> Sampler:
    """Return a sampler that keeps each root span with a link to a sampled message, and asks `sampler` else.

    A ratio of roots would else drop most spans of handlers: they are roots, with links. For a program's own provider.
    """
    from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
    from opentelemetry.trace import get_current_span

    class LinkSampler(Sampler):
        def should_sample(
            self,
            parent_context: Any,
            trace_id: int,
            name: str,
            kind: Any = None,
            attributes: Any = None,
            links: Sequence[Any] | None = None,
            trace_state: Any = None,
        ) -> SamplingResult:
            linked = links and any(link.context.trace_flags.sampled for link in links)
            if linked and not get_current_span(parent_context).get_span_context().is_valid:
                return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)
            return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

        def get_description(self) -> str:
            return f"LinkSampler{{{sampler.get_description()}}}"

    return LinkSampler()


def _exporters() -> list[SpanExporter]:
    names = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    return [_exporter(name.strip()) for name in names if name.strip() not in ("", "none")]


def _exporter(name: str) -> SpanExporter:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    entry = {"otlp": "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"}.get(name, name)
    found = list(entry_points(group=_EXPORTERS, name=entry))
    if not found:
        raise InvalidInput(
            f"no package exports traces as {entry!r}: install it, such as pip install 'mqlayer[otel]', or set "
            "OTEL_TRACES_EXPORTER to otlp, console or none"
        )
    exporter: SpanExporter = found[0].load()()
    return exporter
