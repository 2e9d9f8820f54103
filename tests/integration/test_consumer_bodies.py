"""What a handler is given: its body's type and its context; and what becomes of a body that does not fit."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import msgspec
import pydantic
import pytest

from mqlayer import App, Context
from mqlayer.errors import Conflict, InvalidInput, InvalidName, NotFound
from tests.fixtures.consumers import Stage, member_of
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

SECRET = "what-only-this-body-says"


class Struct(msgspec.Struct, frozen=True):
    number: int


@dataclasses.dataclass(frozen=True)
class Data:
    number: int


class Model(pydantic.BaseModel, frozen=True):
    number: int


@pytest.mark.parametrize(
    ("body_type", "body", "expected"),
    some_of(
        [
            (Struct, b'{"number":1}', Struct(1)),
            (Data, b'{"number":1}', Data(1)),
            (Model, b'{"number":1}', Model(number=1)),
            (bytes, b"\x00\xff", b"\x00\xff"),
            (str, "grün".encode(), "grün"),
            (dict, b'{"number":1}', {"number": 1}),
        ],
        3,
    ),
    ids=["struct", "dataclass", "pydantic", "bytes", "str", "dict"],
)
def test_a_handler_gets_the_type_that_it_names(stage: Stage, body_type: Any, body: bytes, expected: object) -> None:
    by_annotation: list[object] = []
    by_argument: list[object] = []

    def annotated(order: Any) -> None:
        by_annotation.append(order)

    annotated.__annotations__["order"] = body_type
    stage.send([("k", body)])
    stage.consume(annotated, group="g")
    stage.consume(by_argument.append, group="h", body=body_type)
    stage.wait_settled("g")
    stage.wait_settled("h")
    assert by_annotation == by_argument == [expected]


def test_the_context_tells_where_a_message_comes_from(stage: Stage) -> None:
    seen: list[Context] = []

    def handle(_body: bytes, ctx: Context) -> None:
        seen.append(ctx)

    stage.send([("kö", b"body"), (None, b"body")])
    app = stage.consume(handle)
    stage.wait_settled()
    keyed, unkeyed = sorted(seen, key=lambda ctx: ctx.key is None)
    assert (keyed.key, unkeyed.key) == ("kö", None)
    assert (keyed.topic, keyed.group, keyed.body, keyed.attempt) == ("orders", "g", b"body", 1)
    assert keyed.identity[0] == 1
    assert keyed.identity.seq == 1
    assert keyed.headers == {}
    assert keyed.at_ms > 1_600_000_000_000
    assert keyed.offset == 1
    assert member_of(app).owned()[keyed.partition] == (keyed.epoch, "open")


def test_a_body_that_does_not_fit_is_a_failed_attempt_and_its_content_is_told_to_nobody(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[Struct] = []

    def handle(order: Struct) -> None:
        handled.append(order)

    stage.send([("bad", b'{"number":"%b"}' % SECRET.encode()), ("bad", b'{"number":2}'), ("good", b'{"number":3}')])
    with caplog.at_level(logging.DEBUG):
        app = stage.consume(handle)
        wait_until(lambda: handled == [Struct(3)] and member_of(app).stats.parked >= 2, what="its key to be parked")
    assert member_of(app).stats.failed == 1, "it will not fit later either"
    told = [record.__dict__ for record in caplog.records]
    assert "body does not fit Struct: Expected `int` at `$.number`" in str(told)
    assert SECRET not in str(told)


@pytest.mark.parametrize("shown", [True, False])
def test_what_a_handler_says_in_its_exception_is_told_unless_a_setting_hides_it(
    stage: Stage, caplog: pytest.LogCaptureFixture, shown: bool
) -> None:
    """It may hold what the message holds."""

    def handle(body: str) -> None:
        raise ValueError(body)

    stage.send([(SECRET, SECRET.encode())])
    with caplog.at_level(logging.DEBUG):
        app = stage.consume(handle, settings=stage.settings(error_messages=shown))
        wait_until(lambda: member_of(app).stats.failed >= 2, what="two attempts")
    told = str([record.__dict__ for record in caplog.records]) + caplog.text
    assert f"{__file__}:" in told
    assert "ValueError: " in told
    assert (SECRET in told) == shown


def test_bad_names_and_unknown_topics_are_refused_with_a_clear_error(stage: Stage) -> None:
    app = stage.app()
    with pytest.raises(InvalidName):
        app.consumer("Orders!", group="g")
    with pytest.raises(InvalidName):
        app.consumer("orders", group="{g}")
    with pytest.raises(InvalidInput, match="no consumers"):
        app.start()
    app.consumer("nothing", group="g")(lambda body: None)
    with pytest.raises(NotFound, match="unknown topic 'nothing': create it"):
        app.start()
    assert app.members == []


def test_one_group_of_a_topic_has_one_handler(stage: Stage) -> None:
    app = stage.app()
    app.consumer("orders", group="g")(list[bytes]().append)
    with pytest.raises(Conflict):
        app.consumer("orders", group="g")


@pytest.mark.parametrize(
    "handler", [lambda: None, lambda body, ctx, more: None, lambda *bodies: None], ids=["0", "3", "*"]
)
def test_a_handler_takes_a_body_and_perhaps_a_context(stage: Stage, handler: Any) -> None:
    with pytest.raises(InvalidInput, match="must take the body"):
        stage.app().consumer("orders", group="g")(handler)


def test_a_retired_group_lets_nobody_in(stage: Stage) -> None:
    """Trimming does not wait for it: its members would miss messages and not know."""
    stage.consume(lambda body: None).stop()
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.consumer_group SET state = 'retired'")
    with pytest.raises(Conflict, match="retired"):
        stage.consume(lambda body: None)


def test_an_application_consumes_several_groups_side_by_side(stage: Stage) -> None:
    handled: dict[str, list[bytes]] = {"g": [], "h": []}
    app: App = stage.app()
    app.consumer("orders", group="g")(handled["g"].append)
    app.consumer("orders", group="h")(handled["h"].append)
    app.start()
    stage.send_numbers(keys=5, each=10)
    stage.wait_settled("g")
    stage.wait_settled("h")
    assert app.stop()
    assert (len(handled["g"]), len(handled["h"])) == (50, 50)
