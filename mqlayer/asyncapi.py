"""An AsyncAPI 3.0 document of an application: its topics, groups and bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from mqlayer.consuming import App
from mqlayer.consuming.api.app import Consumer
from mqlayer.domain.body_schemas import map_schemas, schema_of
from mqlayer.domain.cloud_events import CloudEvents
from mqlayer.domain.codecs import content_type_of, type_name
from mqlayer.postgres.dsn import address_of
from mqlayer.redis.node_connection import Node
from mqlayer.typed_topic import Topic

VERSION: Final = "3.0.0"
_DEFINED: Final = "#/$defs/"

AsyncApi = dict[str, Any]


def asyncapi_document(
    app: App, *, title: str, version: str, topics: Iterable[Topic[Any]] = (), nodes: Iterable[Node] = ()
) -> AsyncApi:
    """Return the document of an application's consumers, and of the typed topics that it may publish to.

    It has no credentials, and asks no server. `nodes`: those to name as servers beside Postgres. Raises InvalidInput.
    """
    made = _Builder()
    for topic in topics:
        made.add_sender(topic)
    for consumer in app.consumers:
        made.add_receiver(consumer)
    servers = _postgres_servers(app.settings.dsn.get_secret_value()) | {node.name: _node_server(node) for node in nodes}
    info = {"title": title, "version": version}
    parts = {"servers": servers, "channels": made.channels, "operations": made.operations}
    found = {"asyncapi": VERSION, "info": info, "defaultContentType": "application/json"}
    return found | {name: part for name, part in parts.items() if part} | made.components()


class _Builder:
    """Collects channels and operations, with each message and schema once."""

    def __init__(self) -> None:
        self.channels: AsyncApi = {}
        self.operations: AsyncApi = {}
        self._messages: AsyncApi = {}
        self._schemas: AsyncApi = {}
        # What the names of schemas stand for, before references are rewritten.
        self._sources: AsyncApi = {}

    def components(self) -> AsyncApi:
        """Return the messages and schemas that the others name."""
        parts = {"messages": self._messages, "schemas": self._schemas}
        found = {name: part for name, part in parts.items() if part}
        return {"components": found} if found else {}

    def add_sender(self, topic: Topic[Any]) -> None:
        """Add a topic that the application publishes to."""
        message = self._message_of_topic(topic)
        self._operate(f"send-{message}", "send", topic.name, message, {"title": f"publish to {topic.name}"})

    def add_receiver(self, consumer: Consumer) -> None:
        """Add a group that the application consumes for."""
        typed = consumer.typed
        if isinstance(typed, Topic):
            message = self._message_of_topic(typed)
        else:
            body = consumer.body_type
            message = self._message(consumer.topic, body, content_type_of(body), schema_of(body), None)
        facts = {"title": f"group {consumer.group}", "x-group": consumer.group}
        if consumer.handler.__doc__:
            facts["summary"] = consumer.handler.__doc__.strip().splitlines()[0]
        self._operate(f"receive-{consumer.topic}-{consumer.group}", "receive", consumer.topic, message, facts)

    def _operate(self, name: str, action: str, topic: str, message: str, facts: AsyncApi) -> None:
        channel = self.channels.setdefault(topic, {"address": topic, "messages": {}})
        channel["messages"][message] = {"$ref": f"#/components/messages/{message}"}
        refers = {"$ref": f"#/channels/{topic}"}, [{"$ref": f"#/channels/{topic}/messages/{message}"}]
        self.operations[name] = {"action": action, "channel": refers[0], "messages": refers[1]} | facts

    def _message_of_topic(self, topic: Topic[Any]) -> str:
        schema = topic.described_schema()
        return self._message(topic.name, topic.body, topic.content_type, schema, topic.cloudevents)

    def _message(self, topic: str, body: Any, content: str, schema: AsyncApi | None, events: CloudEvents | None) -> str:
        kind = _component_name(" or ".join(map(type_name, get_args(body) if _is_union(body) else (body,))))
        facts: AsyncApi = {"name": kind, "contentType": content}
        if schema is not None:
            facts["payload"] = self._payload(schema)
        if events is not None:
            facts["headers"] = _event_headers(events, content)
        return _put(self._messages, f"{topic}.{kind}", facts)

    def _payload(self, schema: AsyncApi) -> AsyncApi:
        definitions = schema.get("$defs", {})
        names = {name: _put(self._sources, _component_name(name), one) for name, one in definitions.items()}
        for name, one in definitions.items():
            self._schemas[names[name]] = _rewritten(one, names)
        root = {key: value for key, value in schema.items() if key != "$defs"}
        payload: AsyncApi = _rewritten(root, names)
        return payload


def _put(where: AsyncApi, name: str, value: Any) -> str:
    """Store a value under a name, or one with a number where another value has it; return that name."""
    found, number = name, 1
    while where.setdefault(found, value) != value:
        number += 1
        found = f"{name}-{number}"
    return found


def _is_union(body: Any) -> bool:
    return get_origin(body) in (Union, UnionType)


def _component_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_") or "body"


def _rewritten(schema: Any, names: Mapping[str, str]) -> Any:
    """Return a schema in the draft of AsyncAPI's own, with references to components."""
    if not isinstance(schema, dict):
        return schema
    found = map_schemas(schema, lambda one: _rewritten(one, names))
    if "$ref" in found:
        found["$ref"] = f"#/components/schemas/{names[found['$ref'].removeprefix(_DEFINED)]}"
    # There it is the name of a field only.
    if "discriminator" in found:
        found["discriminator"] = found["discriminator"]["propertyName"]
    if "prefixItems" in found:
        first = found.pop("prefixItems")
        if "items" in found:
            found["additionalItems"] = found.pop("items")
        found["items"] = first
    return found


def _event_headers(events: CloudEvents, content: str) -> AsyncApi:
    text = {"type": "string"}
    known: AsyncApi = {"ce_specversion": {"const": "1.0"}, "ce_source": {"const": events.source}, "ce_id": text}
    known["ce_type"] = {"const": events.type} if isinstance(events.type, str) else text
    known["ce_time"] = {"type": "string", "format": "date-time"}
    known["content-type"] = {"const": events.content_type or content}
    extensions = {f"ce_{name}": {"const": value} for name, value in events.extensions.items()}
    others: AsyncApi = {"ce_subject": {"type": "string", "description": "The message key."}}
    if events.dataschema:
        others["ce_dataschema"] = {"const": events.dataschema}
    return {"type": "object", "properties": known | others | extensions, "required": sorted(known)}


def _postgres_servers(dsn: str) -> AsyncApi:
    # A DSN's host, port and database, without credentials; sockets are no servers to others.
    host, _, database = address_of(dsn).removeprefix("postgres at ").rpartition("/") if dsn else ("", "", "")
    if not host or host.startswith("/") or " " in host:
        return {}
    server = {"host": host, "protocol": "postgresql", "description": "It has the outbox and the groups."}
    return {"postgres": server | ({"pathname": f"/{database}"} if database else {})}


def _node_server(node: Node) -> AsyncApi:
    protocol, _, place = node.address.partition("://")
    host = place.partition("/")[0]
    return {"host": host, "protocol": protocol, "description": "A node: it has partitions of topics."}
