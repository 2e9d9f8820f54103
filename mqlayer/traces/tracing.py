"""A process's tracer, and the spans that it makes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from mqlayer.logs import carry_trace_ids
from mqlayer.settings import Settings, switched_on
from mqlayer.traces.carrier import headers_of
from mqlayer.traces.sampling import ensure_provider

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer

LINK_LIMIT: Final = 128
"""Most links of a span."""
SYSTEM: Final = "messaging.system"
OPERATION: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
GROUP: Final = "messaging.consumer.group.name"
COUNT: Final = "messaging.batch.message_count"
MESSAGE_ID: Final = "messaging.message.id"
ERROR: Final = "error.type"
KEY_HASH: Final = "mqlayer.key_hash"
OFFSET: Final = "mqlayer.offset"
ATTEMPT: Final = "mqlayer.attempt"

Operation = Literal["create", "send", "receive", "process", "settle"]

_failed_ids: Final[ContextVar[tuple[int, Mapping[str, str]] | None]] = ContextVar("mqlayer_failed_span", default=None)


@cache
def _context_calls() -> tuple[Callable[[Context], Token[Context]], Callable[[Token[Context]], None], Any]:
    """Return attach, detach and set_span_in_context; an import statement costs more, for each message."""
    from opentelemetry.context import attach, detach
    from opentelemetry.trace import set_span_in_context

    return attach, detach, set_span_in_context


class OpenSpan:
    """A span of one operation; as a context manager it ends at the block's end, with the block's error."""

    __slots__ = ("_span", "recording")

    def __init__(self, span: Span) -> None:
        self._span, self.recording = span, span.is_recording()

    @property
    def span(self) -> Span:
        """OpenTelemetry's span."""
        return self._span

    def note(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def fail(self, error: BaseException, text: str = "") -> None:
        """Note an error. `text`: its message, where it may be shown."""
        if self.recording:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute(ERROR, type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, text or None))

    def end(self) -> None:
        """End it."""
        self._span.end()

    def enter(self) -> Token[Context]:
        """Be the current span of this thread or task until `leave`."""
        attach, _, within = _context_calls()
        return attach(within(self._span))

    def leave(self, token: Token[Context]) -> None:
        """End; the former span is current again."""
        _context_calls()[1](token)
        self._span.end()

    def note_failed(self, error: BaseException) -> None:
        """Keep the ids for the log line of an error, which follows in this thread or task."""
        _failed_ids.set((id(error), _ids(self._span.get_span_context())))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
        self._span.end()


class Tracing:
    """The spans of one tracer. Thread-safe."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, SpanKind

        self._tracer, self._root, self._link = tracer, Context(), Link
        self._kinds: dict[str, SpanKind] = {
            "create": SpanKind.PRODUCER,
            "send": SpanKind.CLIENT,
            "receive": SpanKind.CLIENT,
            "process": SpanKind.CONSUMER,
            "settle": SpanKind.CLIENT,
        }
        self._producer = SpanKind.PRODUCER

    def create(self, topic: str, key: str | None) -> Mapping[str, str]:
        """Make the span of a message's insert into an outbox; return the headers to store, if any."""
        span = self._tracer.start_span(f"create {topic}", kind=self._producer, attributes=_facts("create", topic))
        if key is not None and span.is_recording():
            span.set_attribute(KEY_HASH, key_hash(key.encode()))
        span.end()
        return self.carried(span)

    def start_send(self, topic: str) -> OpenSpan:
        """Start the span of a direct publish."""
        facts = _facts("send", topic)
        return OpenSpan(self._tracer.start_span(f"send {topic}", kind=self._producer, attributes=facts))

    def carried(self, span: Span) -> Mapping[str, str]:
        """Return the headers that carry a span; none of an unsampled root, which no other span knows."""
        from opentelemetry.trace import get_current_span

        context = span.get_span_context()
        if not context.is_valid or not (context.trace_flags.sampled or get_current_span().get_span_context().is_valid):
            return {}
        return headers_of(span)

    def start(
        self,
        operation: Operation,
        topic: str,
        attributes: Mapping[str, Any],
        links: Sequence[Link] = (),
        *,
        parent: SpanContext | None = None,
        start_ns: int | None = None,
    ) -> OpenSpan:
        """Start a span, a root without `parent`."""
        span = self._tracer.start_span(
            f"{operation} {topic}",
            self._root if parent is None else self._under(parent),
            self._kinds[operation],
            {**_facts(operation, topic), **attributes},
            links,
            start_ns,
        )
        return OpenSpan(span)

    def _under(self, parent: SpanContext) -> Context:
        from opentelemetry.trace import NonRecordingSpan, set_span_in_context

        return set_span_in_context(NonRecordingSpan(parent), self._root)

    def record(
        self,
        operation: Operation,
        topic: str,
        attributes: Mapping[str, Any],
        links: Sequence[Link],
        *,
        seconds: float,
        error: str = "",
        parent: SpanContext | None = None,
    ) -> None:
        """Make the span of a call that has ended. `error`: class of its error or refusal."""
        start_ns = time.time_ns() - round(seconds * 1e9)
        given = {**attributes, ERROR: error} if error else attributes
        opened = self.start(operation, topic, given, links, parent=parent, start_ns=start_ns)
        if error and opened.recording:
            from opentelemetry.trace import Status, StatusCode

            opened.span.set_status(Status(StatusCode.ERROR))
        opened.end()

    def links(self, parents: Sequence[SpanContext]) -> list[Link]:
        """Return links to different spans, 128 at most."""
        # Contexts have no hash.
        if len(parents) == 1:
            return [self._link(parents[0])]
        different = {(parent.trace_id, parent.span_id): parent for parent in parents}
        return [self._link(parent) for parent in islice(different.values(), LINK_LIMIT)]


def key_hash(key: bytes) -> str:
    """Return the first 16 hex digits of a key's SHA-256."""
    return hashlib.sha256(key).hexdigest()[:16]


def take_failed_ids(error: BaseException) -> Mapping[str, str]:
    """Return the ids of the span that ended with an error, once; none without a span."""
    noted = _failed_ids.get()
    if noted is None:
        return {}
    _failed_ids.set(None)
    return noted[1] if noted[0] == id(error) else {}


def _facts(operation: Operation, topic: str) -> dict[str, Any]:
    return {SYSTEM: "mqlayer", OPERATION: operation, OPERATION_TYPE: operation, DESTINATION: topic}


def _ids(context: SpanContext) -> dict[str, str]:
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def current_parent() -> SpanContext | None:
    """Return the current span's context, None without one."""
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    return context if context.is_valid else None


def _current_ids() -> Mapping[str, str]:
    from opentelemetry.trace import get_current_span

    return _ids(get_current_span().get_span_context())


_making: Final = threading.Lock()
_made: list[Tracing] = []
_looked: list[bool] = []


def tracing_of(settings: Settings) -> Tracing | None:
    """Return this process's tracing; None if off. Raises InvalidInput without the extra."""
    return _process() if settings.traces else None


def process_tracing() -> Tracing | None:
    """Return the tracing of outbox calls, which have no Settings: by the process's own setting, read once."""
    if _made:
        return _made[0]
    if not _looked:
        _looked.append(switched_on("traces"))
    return _process() if _looked[0] else None


def _process() -> Tracing:
    with _making:
        if not _made:
            ensure_provider()
            from opentelemetry.trace import get_tracer

            _made.append(Tracing(get_tracer("mqlayer")))
            carry_trace_ids(_current_ids)
        return _made[0]
