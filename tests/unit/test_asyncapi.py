"""The AsyncAPI document of an application, held against the rules of AsyncAPI 3.0 that it uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

import mqlayer
from mqlayer.asyncapi import asyncapi_document
from mqlayer.domain.routing import NodeId
from mqlayer.redis.node_connection import Node
from tests.fixtures.commands import Commands


class Line(msgspec.Struct):
    price: int


class Placed(msgspec.Struct, tag=True):
    """An order."""

    lines: list[Line]
    place: tuple[int, str]


class Cancelled(msgspec.Struct, tag=True):
    reason: str


class Mail(pydantic.BaseModel):
    to: str


said = mqlayer.CloudEvents(source="/shop", type="placed", extensions={"tenant": "eu"})
events: Any = Placed | Cancelled
orders: mqlayer.Topic[Any] = mqlayer.Topic("orders", body=events, cloudevents=said)
raw = mqlayer.Topic("raw.bytes", body=bytes)
app = mqlayer.App(mqlayer.Settings(dsn=pydantic.SecretStr("postgresql://shop:s3cret@db:5433/shop")))


@app.consumer(orders, group="ledger")
def book(order: Any) -> None:
    """Book an order.

    And more.
    """


@app.consumer("mails", group="sender")
def send(mail: Mail) -> None: ...


NODE = Node(NodeId(1), "node-1", "rediss://cache:6380/0?ssl_ca_certs=/ca.pem", None)
FIELDS = {
    "": ({"asyncapi", "info"}, {"defaultContentType", "servers", "channels", "operations", "components"}),
    "servers": ({"host", "protocol"}, {"pathname", "description"}),
    "channels": (set(), {"address", "messages"}),
    "operations": ({"action", "channel"}, {"messages", "title", "summary", "x-group"}),
    "components": (set(), {"messages", "schemas"}),
    "messages": (set(), {"name", "contentType", "payload", "headers"}),
}
"""What an object of AsyncAPI must and may have, of what is used here."""
COMPONENT = re.compile(r"[\w.-]+")


def document() -> dict[str, Any]:
    return asyncapi_document(app, title="shop", version="1.2.0", topics=[orders, raw], nodes=[NODE])


def parts(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of the document that has fields of its own, with its kind."""
    yield "", found
    for kind in ("servers", "channels", "operations"):
        yield from ((kind, one) for one in found[kind].values())
    yield "components", found["components"]
    yield from (("messages", one) for one in found["components"]["messages"].values())


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def at(found: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def test_each_object_has_the_fields_of_its_kind_and_each_reference_leads_somewhere() -> None:
    found = document()
    json.dumps(found, allow_nan=False)
    for kind, one in parts(found):
        needed, allowed = FIELDS[kind]
        assert needed <= one.keys() <= needed | allowed, (kind, one)
    for kind in ("messages", "schemas"):
        assert all(map(COMPONENT.fullmatch, found["components"][kind]))
    assert all(at(found, one) is not None for one in references(found))
    assert {one["action"] for one in found["operations"].values()} == {"send", "receive"}
    for one in found["operations"].values():
        # An operation names messages of its channel, not those of the components.
        assert all(ref["$ref"].startswith(f"{one['channel']['$ref']}/messages/") for ref in one["messages"])


def test_what_is_consumed_and_published_is_there() -> None:
    found = document()
    assert found["channels"].keys() == {"orders", "raw.bytes", "mails"}
    ledger = found["operations"]["receive-orders-ledger"]
    assert (ledger["summary"], ledger["x-group"]) == ("Book an order.", "ledger")
    assert found["operations"].keys() == {
        "receive-orders-ledger", "receive-mails-sender", "send-orders.Placed_or_Cancelled", "send-raw.bytes.bytes",
    }  # fmt: skip
    messages = found["components"]["messages"]
    assert "payload" not in messages["raw.bytes.bytes"]
    assert messages["mails.Mail"]["payload"]["properties"].keys() == {"to"}
    headers = messages["orders.Placed_or_Cancelled"]["headers"]
    assert headers["properties"]["ce_tenant"] == {"const": "eu"}
    place = found["components"]["schemas"]["Placed"]["properties"]["place"]
    assert (place["items"], place["additionalItems"]) == ([{"type": "integer"}, {"type": "string"}], False)


def test_servers_are_named_without_credentials() -> None:
    found = document()
    assert found["servers"]["postgres"]["host"] == "db:5433"
    assert found["servers"]["postgres"]["pathname"] == "/shop"
    assert found["servers"]["node-1"]["host"] == "cache:6380"
    assert "s3cret" not in str(found)
    bare = asyncapi_document(mqlayer.App(mqlayer.Settings()), title="shop", version="1")
    assert bare == {"asyncapi": "3.0.0", "info": {"title": "shop", "version": "1"},
                    "defaultContentType": "application/json"}  # fmt: skip


def test_two_definitions_of_one_name_are_two_schemas() -> None:
    class Other:
        class Line(msgspec.Struct):
            weight: int

    one = mqlayer.Topic("one", body=list[Line])
    other = mqlayer.Topic("other", body=list[Other.Line])
    found = asyncapi_document(mqlayer.App(mqlayer.Settings()), title="t", version="1", topics=[one, other, one])
    assert found["components"]["schemas"].keys() == {"Line", "Line-2"}
    assert len(found["operations"]) == 2


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MQLAYER_DSN", "")
    path = "tests.unit.test_asyncapi:app"
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    printed = json.loads(Commands().text("asyncapi", path, "--title", "shop", "--app-version", "2"))
    assert printed["info"] == {"title": "shop", "version": "2"}
    assert "send-raw.bytes.bytes" in printed["operations"]
    said = Commands().text("asyncapi", path, "--output", "shop.json")
    assert said == "shop.json has 3 channels, 4 operations\n"
    assert json.loads((tmp_path / "shop.json").read_text())["info"]["title"] == path
    assert "can't be written" in Commands().failure("asyncapi", path, "--output", "gone/shop.json")
