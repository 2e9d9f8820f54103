"""Nodes and topics: register, create, arm."""

from mqlayer.topics.nodes import find_node, list_nodes, rearm_node, register_node, set_node_address
from mqlayer.topics.topics import TopicSummary, attach_topics, create_topic, list_topics, set_archived, set_limits

__all__ = [
    "TopicSummary",
    "attach_topics",
    "create_topic",
    "find_node",
    "list_nodes",
    "list_topics",
    "rearm_node",
    "register_node",
    "set_archived",
    "set_limits",
    "set_node_address",
]
