"""Traces from a request to the last delivery, as OpenTelemetry has them, and as a collector receives them."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode, get_current_span
from psycopg_pool import ConnectionPool
from starlette.types import Receive, Scope, Send

import mqlayer
from mqlayer import outbox
from mqlayer.archive import archive_pass
from mqlayer.errors import NotFound, Reject, RetryLater
from mqlayer.integrations.fastapi import transaction
from mqlayer.logs import event_of, fields_of
from mqlayer.redelivery import (
    DeadFilter,
    ReplayFilter,
    new_worker,
    release_parked,
    start_redrive,
    start_replay,
    work_on,
    work_on_replay,
)
from mqlayer.relay import relay_once
from mqlayer.topics import set_archived
from mqlayer.traces import TRACEPARENT
from mqlayer.traces.tracing import key_hash
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.traces import Spans, ids, kept_spans, linked
from tests.fixtures.wait import wait_until
from tests.proof.world import QUICK, World

pytestmark = pytest.mark.world(partitions=1)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01"
GIVEN_IDS = (int(TRACE, 16), 0x00F067AA0BA902B7)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    with kept_spans(monkeypatch) as kept:
        yield kept


@pytest.fixture
def app(world: World) -> Iterator[mqlayer.App]:
    """An application with traces, which the test starts."""
    app = mqlayer.App(world.settings(traces=True, lease_s=10.0))
    yield app
    app.stop(5.0)


def publish(world: World, key: str | None = "ann", body: bytes = b"x", **facts: Any) -> None:
    with kept_session(world.dsn) as connection, connection.transaction():
        outbox.publish(connection, "orders", key=key, body=body, **facts)


def relay(world: World) -> None:
    relay_once(world.settings(traces=True), limits=QUICK)


def settled(app: mqlayer.App, count: int) -> None:
    wait_until(lambda: all(member.stats.settled == count for member in app.members), what=f"{count} are settled")


def post_order(world: World, spans: Spans) -> tuple[int, int]:
    """Publish in a request, with a span around it as an instrumentation has; return the span that was current.

    The span is in the request's own task: the context of the test's thread is the whole process's.
    """
    current: list[tuple[int, int]] = []
    pool = ConnectionPool(world.dsn, open=False, min_size=1, max_size=1)
    web = FastAPI()

    def place(session: Any) -> None:
        current.append(ids(get_current_span().get_span_context()))
        outbox.publish(session, "orders", key="ann", body=b"secret")

    place.__annotations__["session"] = Annotated[Any, transaction(pool)]
    web.post("/orders")(place)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with spans.tracer.start_as_current_span(f"{scope['method']} {scope['path']}"):
            await web(scope, receive, send)

    with pool:
        assert TestClient(answer).post("/orders").status_code == 200
    return current[0]


def test_a_request_is_followed_through_outbox_relay_and_every_kind_of_handler(
    world: World, app: mqlayer.App, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    """A publish in a request's span; libraries of a handler find its span current, in threads and in tasks."""

    def query(group: str) -> None:
        with spans.tracer.start_as_current_span(f"query of {group}"):
            logging.getLogger("shop").warning("handled", extra={"of": group})

    @app.consumer("orders", group="plain")
    def plain(_body: bytes) -> None:
        query("plain")

    @app.consumer("orders", group="async")
    async def on_loop(_body: bytes) -> None:
        await asyncio.create_task(asyncio.to_thread(query, "async"))

    @app.consumer("orders", group="shared", mode="shared", time_limit_s=60.0)
    def shared(_body: bytes) -> None:
        query("shared")

    @app.consumer("orders", group="batch", batch=mqlayer.BatchOf("key"))
    async def batch(_bodies: list[bytes]) -> None:
        query("batch")

    current = post_order(world, spans)
    relay(world)
    app.start()
    settled(app, 1)

    create = spans.one("create orders", messaging__operation__type="create", mqlayer__key_hash=key_hash(b"ann"))
    assert create.kind == SpanKind.PRODUCER
    assert current == ids(spans.one("POST /orders"))
    assert ids(create.parent) == current
    send = spans.one("send orders", messaging__batch__message_count=1)
    assert (send.kind, linked(send)) == (SpanKind.CLIENT, [ids(create)])
    ((partition, message_id),) = [(str(record.partition), f"{record.source}:{record.lp}:{record.seq}")
                                  for record in world.records()]  # fmt: skip
    for group in ("plain", "async", "shared", "batch"):
        process = spans.one("process orders", messaging__consumer__group__name=group)
        facts = dict(process.attributes or {})
        assert (process.kind, process.parent, linked(process)) == (SpanKind.CONSUMER, None, [ids(create)])
        assert facts["messaging.system"] == "mqlayer"
        assert facts["messaging.destination.name"] == "orders"
        assert facts["messaging.destination.partition.id"] == partition
        assert facts["mqlayer.key_hash"] == key_hash(b"ann")
        if group == "batch":
            assert facts["messaging.batch.message_count"] == 1
        else:
            assert [facts[f"mqlayer.{name}"] for name in ("offset", "attempt")] == [1, 1]
            assert facts["messaging.message.id"] == message_id
        inner = spans.one(f"query of {group}")
        assert ids(inner.parent) == ids(process)
        # The settlement's span follows its count.
        name = {"messaging__consumer__group__name": group}
        wait_until(lambda name=name: spans.named("settle orders", **name), what="the call's span")  # type: ignore[misc]
        settle = spans.one("settle orders", **name)
        assert (settle.kind, linked(settle)) == (SpanKind.CLIENT, [ids(process)])
    told = json.dumps([json.loads(span.to_json()) for span in spans.all()])
    assert "secret" not in told
    assert '"ann"' not in told
    assert {record.of for record in caplog.records if record.name == "shop"} == {"plain", "async", "shared", "batch"}  # type: ignore[attr-defined]


def test_parked_released_dead_redriven_and_replayed_messages_keep_their_trace(
    world: World, app: mqlayer.App, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    """Each attempt has a span with its number; a failed one has the error, and the failure's line its ids."""
    set_archived(world.runtime(), "orders", archived=True)
    ends = [RetryLater(0.01), RetryLater(3_600), Reject("no"), None, None]

    @app.consumer("orders", group="ledger", policy="dead_letter")
    def handle(_body: bytes) -> None:
        if (end := ends.pop(0)) is not None:
            raise end

    publish(world)
    relay(world)
    app.start()
    runtime = world.runtime(actor="a test")

    def left(count: int) -> None:
        wait_until(lambda: len(spans.named("process orders")) == count, what=f"attempt {count} to end")

    left(2)
    wait_until(lambda: _released(runtime), what="the key to be parked")
    left(3)
    dead = "SELECT 1 FROM mqlayer.dead_message"
    wait_until(lambda: world.rows(dead), what="the message to be dead")
    worker = new_worker()
    work_on(runtime.control, start_redrive(runtime, "orders", "ledger", DeadFilter(), worker=worker), worker=worker)
    left(4)
    archive_pass(runtime)
    replay_id = start_replay(runtime, "orders", "ledger", ReplayFilter(), worker=worker)
    work_on_replay(runtime.control, replay_id, worker=worker)
    left(5)

    create = spans.one("create orders")
    processes = spans.named("process orders")
    assert [linked(span) for span in processes] == [[ids(create)]] * 5
    assert [(span.attributes or {})["mqlayer.attempt"] for span in processes] == [1, 2, 1, 1, 1]
    codes = [span.status.status_code for span in processes]
    assert codes == [StatusCode.ERROR] * 3 + [StatusCode.UNSET] * 2
    assert [(span.attributes or {}).get("error.type") for span in processes[1:4]] == ["RetryLater", "Reject", None]
    failures = [fields_of(record) for record in caplog.records if event_of(record) == "handler_failed"]
    assert [line["trace_id"] for line in failures] == [f"{ids(span)[0]:032x}" for span in processes[:3]]


def _released(runtime: Any) -> bool:
    try:
        release_parked(runtime, "orders", "ledger", key="ann")
    except NotFound:
        return False
    return True


def test_a_delayed_message_and_one_with_a_trace_of_its_own_keep_theirs(world: World, spans: Spans) -> None:
    """With `trace_parent`, a handler's span is a child; with `trace_all`, untraced messages have one too."""
    app = mqlayer.App(world.settings(traces=True, trace_parent=True, trace_all=True, lease_s=10.0))

    @app.consumer("orders", group="ledger")
    def handle(_body: bytes, ctx: mqlayer.Context) -> None:
        found = get_current_span(ctx.trace_context()).get_span_context()
        assert not ctx.headers or ids(found) == (int(ctx.headers[TRACEPARENT][3:35], 16), found.span_id)

    with kept_session(world.dsn, autocommit=True) as connection, spans.tracer.start_as_current_span("request"):
        outbox.publish_delayed(connection, "orders", delay_s=0.0, key="late")
    outbox.release_delayed(world.database)
    publish(world, "given", headers={TRACEPARENT: GIVEN})
    world.publish(1, keys=1)
    relay(world)
    app.start()
    settled(app, 3)
    app.stop()

    create = spans.one("create orders")
    late, given, untraced = (
        spans.one("process orders", mqlayer__key_hash=key_hash(key)) for key in (b"late", b"given", b"key-0")
    )
    assert (ids(late.parent), linked(late)) == (ids(create), [ids(create)])
    assert (ids(given.parent), linked(given)) == (GIVEN_IDS, [GIVEN_IDS])
    assert (untraced.parent, linked(untraced)) == (None, [])
    assert sorted(link for send in spans.named("send orders") for link in linked(send)) == sorted(
        [ids(create), GIVEN_IDS]
    )


def test_direct_producers_make_one_span_per_call_that_their_messages_carry(
    world: World, app: mqlayer.App, spans: Spans
) -> None:
    seen: dict[bytes, str] = {}

    @app.consumer("orders", group="ledger")
    def handle(body: bytes, ctx: mqlayer.Context) -> None:
        seen[body] = ctx.headers.get(TRACEPARENT, "")

    async def publish_async() -> None:
        async with mqlayer.AsyncProducer(world.settings(traces=True)) as producer:
            await producer.send("orders", key="b", body=b"awaited")
            await producer.send_many("orders", [mqlayer.Message("b", b"many-3"), mqlayer.Message("b", b"many-4")])

    with world.producer(traces=True) as producer, spans.tracer.start_as_current_span("request") as request:
        receipt = producer.send("orders", key="a", body=b"sent", headers={"h": "v"})
        producer.send_async("orders", key="a", body=b"queued").result(10)
        producer.send_oneway("orders", body=b"oneway")
        given = mqlayer.Message("a", b"many-2", {TRACEPARENT: GIVEN})
        producer.send_many("orders", [mqlayer.Message("a", b"many-1"), given])
        with pytest.raises(NotFound):
            producer.send("absent", body=b"x")
        asyncio.run(publish_async())
    app.start()
    settled(app, 8)

    sent = {span.context.span_id: span for span in spans.named("send orders") if span.context}
    assert {span.parent and span.parent.span_id for span in sent.values()} == {request.get_span_context().span_id}
    assert {span.kind for span in sent.values()} == {SpanKind.PRODUCER}
    of_body = {body: sent.get(int(header[36:52], 16)) for body, header in seen.items()}
    one = of_body[b"sent"]
    assert one is not None
    facts = dict(one.attributes or {})
    assert facts["mqlayer.offset"] == receipt.offset
    assert facts["messaging.message.id"] == str(receipt.identity)
    assert of_body[b"queued"] is not None
    assert of_body[b"awaited"] is not None
    assert seen.pop(b"many-2") == GIVEN
    many = of_body[b"many-1"]
    assert many is not None
    assert ((many.attributes or {})["messaging.batch.message_count"], linked(many)) == (2, [GIVEN_IDS])
    assert of_body[b"many-3"] is of_body[b"many-4"] is not None
    assert len(sent) == 6
    failed = spans.one("send absent", error__type="NotFound")
    assert failed.status.status_code is StatusCode.ERROR


@pytest.fixture
def no_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    with kept_spans(monkeypatch, ParentBased(ALWAYS_OFF)) as kept:
        yield kept


def test_a_trace_that_is_not_sampled_makes_no_span_and_is_still_found_by_its_id(
    world: World, app: mqlayer.App, no_spans: Spans
) -> None:
    """Of a root that is not sampled, nothing is stored: no other span knows it."""
    spans = no_spans
    seen: list[dict[str, str]] = []

    @app.consumer("orders", group="ledger")
    def handle(_body: bytes, ctx: mqlayer.Context) -> None:
        seen.append(dict(ctx.headers))

    publish(world, "a")
    with spans.tracer.start_as_current_span("request") as request:
        publish(world, "a")
    relay(world)
    app.start()
    settled(app, 2)
    assert seen[0] == {}
    trace_id = f"{request.get_span_context().trace_id:032x}"
    assert seen[1][TRACEPARENT][3:35] == trace_id
    assert not int(seen[1][TRACEPARENT][-2:], 16) & 1
    assert spans.all() == []


def test_an_append_and_a_batch_of_several_messages_have_a_link_to_each(world: World, spans: Spans) -> None:
    """A message that is not traced, between them, has none; messages of errors are hidden where the log hides them."""
    failing = [True]
    app = mqlayer.App(world.settings(traces=True, lease_s=10.0, error_messages=False))

    @app.consumer("orders", group="ledger", batch=mqlayer.BatchOf("distinct", linger_s=1.0, limit=3))
    def handle(batch: mqlayer.Batch[bytes]) -> None:
        if failing and failing.pop():
            raise ValueError("secret")

    publish(world, "a")
    world.publish(1, keys=1)
    publish(world, "b")
    relay(world)
    app.start()
    settled(app, 3)
    app.stop()
    creates = [ids(span) for span in spans.named("create orders")]
    send = spans.one("send orders", messaging__batch__message_count=3)
    process = spans.named("process orders", messaging__batch__message_count=3)[0]
    assert sorted(linked(send)) == sorted(linked(process)) == sorted(creates)
    assert process.status.status_code is StatusCode.ERROR
    assert "secret" not in str(process.status.description)


def test_receivers_make_spans_of_calls_and_their_messages_give_the_context(world: World, spans: Spans) -> None:
    publish(world, "a")
    publish(world, "b")
    relay(world)
    creates = [ids(span) for span in spans.named("create orders")]
    settings = world.settings(traces=True)
    with mqlayer.Receiver("orders", group="popped", settings=settings) as receiver:
        messages = receiver.receive(wait_s=20.0)
        with spans.tracer.start_as_current_span("work", context=messages[0].trace_context()) as work:
            receiver.ack(messages[:1])
        receiver.nack(messages[1])

    async def receive() -> None:
        async with mqlayer.AsyncReceiver("orders", group="popped", settings=settings) as receiver:
            (message,) = await receiver.receive(wait_s=20.0)
            with spans.tracer.start_as_current_span("async work"):
                await receiver.ack([message])

    asyncio.run(receive())
    first, second = spans.named("receive orders", messaging__consumer__group__name="popped")
    assert (first.kind, linked(first), linked(second)) == (SpanKind.CLIENT, creates, creates[1:])
    assert ids(spans.one("work").parent) == creates[0]
    acked, nacked, later = spans.named("settle orders")
    assert [linked(span) for span in (acked, nacked, later)] == [creates[:1], creates[1:], creates[1:]]
    assert ids(acked.parent) == ids(work.get_span_context())
    assert ids(later.parent) == ids(spans.one("async work"))


PROGRAM = """
import psycopg, mqlayer
from mqlayer import outbox
from mqlayer.relay import relay_once

settings = mqlayer.Settings()
app = mqlayer.App(settings)

@app.consumer("orders", group="ledger")
def handle(body: bytes) -> None:
    pass

with psycopg.connect(settings.application_dsn()) as connection:
    for number in range(200):
        outbox.publish(connection, "orders", key="ann", body=b"x")
relay_once(settings)
app.start()
while app.members[0].stats.settled < 200:
    app.members[0].wake()
app.stop()
"""


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A receiver of OTLP over HTTP: its address, and its requests."""
    requests: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.slow
def test_a_collector_receives_the_spans_of_a_program_that_set_no_provider(world: World) -> None:
    """By OTEL_* variables alone; of messages without a sampled trace, handlers have no span though roots are kept."""
    with collector() as (address, requests):
        variables = {
            "MQLAYER_TRACES": "true",
            "MQLAYER_LEASE_S": "10",
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            "OTEL_SERVICE_NAME": "shop",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.2",
        }
        done = ask_python("-c", PROGRAM, env=world.environment(**variables))
    assert done.returncode == 0, done.stderr
    found = [span for request in requests for part in request.resource_spans for scope in part.scope_spans
             for span in scope.spans]  # fmt: skip
    services = {
        one.value.string_value
        for request in requests for part in request.resource_spans for one in part.resource.attributes
        if one.key == "service.name"
    }  # fmt: skip
    assert services == {"shop"}
    by_name: dict[str, list[Any]] = {}
    for span in found:
        by_name.setdefault(span.name, []).append(span)
    creates = {span.span_id for span in by_name["create orders"]}
    assert 10 <= len(creates) <= 90
    processes = by_name["process orders"]
    assert {link.span_id for span in processes for link in span.links} == creates
    assert len(processes) == len(creates)
    assert {link.span_id for span in by_name["send orders"] for link in span.links} <= creates
    settles = {link.span_id for span in by_name["settle orders"] for link in span.links}
    assert settles == {span.span_id for span in processes}
