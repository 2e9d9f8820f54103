"""Traces through requests of Django and FastAPI, and through Celery's tasks: their spans are the parents of what they
publish.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import opentelemetry.trace
import pytest
from asgiref.sync import sync_to_async
from celery import Celery, signals
from celery.contrib.testing.worker import start_worker
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import SpanKind

import mqlayer
from mqlayer import outbox
from mqlayer.relay import relay_once
from mqlayer.workers import connections as of_workers
from mqlayer.workers.ordered_tasks import consume_tasks, ordered_task
from tests.fixtures.django_connections import django_connection
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.traces import Spans, ids, kept_spans, linked, no_provider_kept
from tests.fixtures.wait import wait_until
from tests.proof.world import QUICK, World

pytestmark = pytest.mark.world(partitions=1)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    with kept_spans(monkeypatch) as kept:
        yield kept


@pytest.fixture
def producer(world: World) -> Iterator[mqlayer.Producer]:
    with world.producer(traces=True) as producer:
        yield producer


def parent(span: ReadableSpan) -> tuple[int, int]:
    return ids(span.parent)


def middleware(spans: Spans) -> Callable[..., Any]:
    """Return a middleware that has a span around each request, as an instrumentation's has."""

    def around(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
        def answer(request: HttpRequest) -> HttpResponse:
            with spans.tracer.start_as_current_span(f"{request.method} {request.path}"):
                return get_response(request)

        return answer

    return around


def test_a_request_of_django_is_the_parent_of_what_its_transaction_and_its_commit_publish(
    world: World, spans: Spans, producer: mqlayer.Producer
) -> None:
    """In a plain view, and in an async one, which runs the same on a thread."""

    def place(request: HttpRequest) -> HttpResponse:
        with transaction.atomic():
            outbox.publish(connections["default"], "orders", key="ann", body=b"in the transaction")
            transaction.on_commit(lambda: producer.send("orders", key="ann", body=b"behind its commit"))
        return HttpResponse(status=201)

    async def place_async(request: HttpRequest) -> HttpResponse:
        def place_and_close() -> HttpResponse:
            try:
                return place(request)
            finally:
                connections.close_all()

        return await sync_to_async(place_and_close)()

    urls: Any = types.ModuleType("urls_of_traces")
    urls.urlpatterns = [path("plain", place), path("async", place_async)]
    urls.around = middleware(spans)

    async def ask() -> int:
        answer = await AsyncClient().post("/async")
        return int(answer.status_code)

    with pytest.MonkeyPatch.context() as patch, django_connection(world.dsn):
        patch.setitem(sys.modules, urls.__name__, urls)
        of_urls = {"ROOT_URLCONF": urls.__name__, "MIDDLEWARE": [f"{urls.__name__}.around"]}
        with override_settings(**of_urls, ALLOWED_HOSTS=["testserver"]):
            assert Client().post("/plain").status_code == 201
            assert asyncio.run(ask()) == 201
    relay_once(world.settings(traces=True), limits=QUICK)

    requests = [spans.one(f"POST /{name}") for name in ("plain", "async")]
    creates, sends = spans.named("create orders"), spans.named("send orders")
    assert [parent(span) for span in creates] == [ids(request) for request in requests]
    direct = [span for span in sends if span.parent is not None]
    assert [parent(span) for span in direct] == [ids(request) for request in requests]


def test_fastapi_s_own_span_of_a_request_is_the_parent_of_what_it_publishes(world: World, spans: Spans) -> None:
    """Without any instrumentation: FastAPI makes spans where a provider is set."""
    web = FastAPI(telemetry={"tracer_provider": spans.provider})

    @web.post("/orders")
    def place() -> None:
        with kept_session(world.dsn) as connection, connection.transaction():
            outbox.publish(connection, "orders", key="ann", body=b"x")

    assert TestClient(web).post("/orders").status_code == 200
    (request,) = (span for span in spans.all() if span.kind is SpanKind.SERVER)
    by_id = {ids(span): span for span in spans.all()}
    above = parent(spans.one("create orders"))
    while by_id[above].parent is not None:
        above = parent(by_id[above])
    assert above == ids(request)


def test_a_provider_that_a_page_s_example_sets_is_no_other_test_s() -> None:
    before = opentelemetry.trace.get_tracer_provider()
    with no_provider_kept():
        opentelemetry.trace.set_tracer_provider(provider := TracerProvider(shutdown_on_exit=False))
        assert opentelemetry.trace.get_tracer_provider() is provider
    assert opentelemetry.trace.get_tracer_provider() is before


@contextmanager
def traced_tasks(spans: Spans) -> Iterator[None]:
    """Have a span around each task, by Celery's signals, as an instrumentation has."""
    opened: dict[str, Any] = {}

    def begin(task_id: str, task: Any, **_: Any) -> None:
        opened[task_id] = span = spans.tracer.start_as_current_span(f"run {task.name}")
        span.__enter__()

    def end(task_id: str, **_: Any) -> None:
        opened.pop(task_id).__exit__(None, None, None)

    def keep_logging(**_: Any) -> None:
        """Else the worker would set the level of this process's root logger."""

    signals.setup_logging.connect(keep_logging)
    signals.task_prerun.connect(begin)
    signals.task_postrun.connect(end)
    try:
        yield
    finally:
        signals.setup_logging.disconnect(keep_logging)
        signals.task_prerun.disconnect(begin)
        signals.task_postrun.disconnect(end)


@pytest.mark.full
def test_a_task_of_celery_is_the_parent_of_what_it_publishes(
    world: World, spans: Spans, producer: mqlayer.Producer
) -> None:
    """On the worker's own thread, with the outbox and directly."""
    celery = Celery("shop", broker="memory://", set_as_current=False)
    celery.conf.broker_transport_options = {"polling_interval": 0.01}

    @celery.task(shared=False, name="shop.book")  # type: ignore[untyped-decorator]
    def book() -> None:
        with kept_session(world.dsn) as connection, connection.transaction():
            outbox.publish(connection, "orders", key="ann", body=b"x")
        producer.send("orders", key="ann", body=b"y")

    with traced_tasks(spans), start_worker(celery, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        book.delay()
        run = wait_until(lambda: spans.named("run shop.book"), timeout_s=20.0, what="the task")
    assert run is not None
    assert parent(spans.one("create orders")) == parent(spans.one("send orders")) == ids(run[0])


def test_a_call_of_an_ordered_task_is_followed_into_its_body(
    world: World, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the caller's span over the message to the body, whose own publish is under its handler's span."""
    variables = world.environment(MQLAYER_TRACES="1")
    for name in ("MQLAYER_DSN", "MQLAYER_KEY_PREFIX", "MQLAYER_TRACES"):
        monkeypatch.setenv(name, variables[name])
    of_workers.close()
    celery = Celery("shop", broker="memory://", set_as_current=False)
    app = mqlayer.App(world.settings(traces=True, lease_s=10.0))
    consume_tasks(app, celery, topic="orders", group="tasks")

    @ordered_task(celery, shared=False, topic="orders", key="account", ignore_result=True)
    def book(account: str) -> None:
        with kept_session(world.dsn) as connection, connection.transaction():
            outbox.publish(connection, "orders", key=account, body=b"later")

    try:
        with spans.tracer.start_as_current_span("POST /book") as request:
            book.delay("ann")
        app.start()
        process = wait_until(lambda: spans.named("process orders"), timeout_s=20.0, what="the body")
    finally:
        app.stop(5.0)
        of_workers.close()
    assert process is not None
    send = spans.one("send orders")
    assert parent(send) == ids(request.get_span_context())
    assert linked(process[0]) == [ids(send)]
    assert parent(spans.one("create orders")) == ids(process[0])
