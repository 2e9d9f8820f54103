"""Nodes and topics: register, create, arm."""

from mqlayer.topics.durability import refuse_class, set_durability, set_node_replicas
from mqlayer.topics.node_draining import begin_drain, remove_node, set_node_zone, stop_drain
from mqlayer.topics.nodes import find_node, list_nodes, rearm_node, register_node, set_node_address
from mqlayer.topics.retention import set_stream_retention
from mqlayer.topics.schemas import TopicSchemas, load_schemas, set_schema_mode, store_schema
from mqlayer.topics.topics import (
    TopicSummary,
    attach_topics,
    create_topic,
    list_topics,
    set_archived,
    set_home_zone,
    set_limits,
)

__all__ = [
    "TopicSchemas",
    "TopicSummary",
    "attach_topics",
    "begin_drain",
    "create_topic",
    "find_node",
    "list_nodes",
    "list_topics",
    "load_schemas",
    "rearm_node",
    "refuse_class",
    "register_node",
    "remove_node",
    "set_archived",
    "set_durability",
    "set_home_zone",
    "set_limits",
    "set_node_address",
    "set_node_replicas",
    "set_node_zone",
    "set_schema_mode",
    "set_stream_retention",
    "stop_drain",
    "store_schema",
]
