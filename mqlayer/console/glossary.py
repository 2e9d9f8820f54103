"""Words of the pages, each in a sentence; `docs/glossary.md` has all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

GLOSSARY: Final[Mapping[str, str]] = {
    "armed run": "A run is one process of a node's Redis. It serves once Postgres has recorded (armed) it, so that a "
    "node that came back empty or old serves nothing by mistake.",
    "cluster": "A panel with this tag shows the whole system, as Postgres and the nodes tell.",
    "dead message": "A message that left its group without an effect. It is kept with its reason, and can be redriven.",
    "drained": "A group has drained an ended partition when it has settled all messages there.",
    "epoch": "A number that grows with every new owner of a partition: acts of an earlier owner are refused by it.",
    "fenced effect": "A change of the application's data in one transaction with the check that the member still owns "
    "the partition, and that the message was not applied before: so it happens once.",
    "group": "Consumers that share a topic, with a position of their own.",
    "heat": "A partition's share of the topic's messages, beside the fair one: that of its LPs, or an equal one if "
    "that is more. Hot: about twice the fair share or more, and at least 5 messages a second.",
    "lag": "A group's messages that are not settled yet, and the age of the oldest.",
    "LP": "Logical partition: one of 1,024 buckets of a topic's keys, by a hash. A key stays in its LP for ever; a "
    "partition has a range of LPs.",
    "LP set": "A share of all LPs; there are 16. Relays divide them: one relay at a time moves the rows of a set.",
    "member": "One running consumer of a group.",
    "node": "One registered Redis.",
    "outbox": "A table that stores messages in the application's own transaction. A relay moves them to partitions.",
    "outbox slot": "One of four tables that the outbox fills in turn. A slot is emptied as a whole, once its rows are "
    "relayed and no open transaction can add any.",
    "parked key": "A key whose message failed too often or waits for its next attempt: it waits in Postgres with its "
    "later messages, in order, and other keys go on.",
    "partition": "One Redis stream, with a range of LPs.",
    "relay": "The process that moves committed rows of the outbox to partitions.",
    "route": "The map from LPs to partitions, in numbered versions. A split, merge or move makes the next one.",
    "seal": "To close a partition for a route change: nothing is stored there any more.",
    "settle": "To record that a group is done with a message.",
    "source": "A party that numbers messages: an outbox, or a direct producer.",
    "this process": "A panel with this tag shows what this console itself measured or holds; another one may differ.",
}


def anchor(term: str) -> str:
    """Return a term's name in an address."""
    return re.sub(r"[^a-z]+", "-", term.lower())
