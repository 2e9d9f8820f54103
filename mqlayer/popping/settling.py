"""Say what became of messages of an ordered pop: handled, given back, or to be withheld for longer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mqlayer.domain.routing import NodeId
from mqlayer.errors import InvalidInput, NodeNotArmed, StaleToken, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.membership.groups import Group
from mqlayer.popping.lines import Lines, call_scripts
from mqlayer.popping.listing import Listing
from mqlayer.popping.messages import Token
from mqlayer.redis.nodes import NodeConnection
from mqlayer.redis.outcomes import told_by
from mqlayer.redis.partitions import Refused
from mqlayer.redis.popping import BATCH_LIMIT, Place, Settled, SettleWord, pop_settle_command, pop_settle_reply
from mqlayer.routes.cache import RouteCache


@dataclass(slots=True)
class _Word:
    """What is to be said, and of which messages it was not taken."""

    word: SettleWord
    ms: int
    told: bytes
    stale: list[Token] = field(default_factory=list)
    unknown: list[Token] = field(default_factory=list)


Calls = Sequence[tuple[Place, Sequence[Token]]]


class Settler:
    """Tells nodes, on connections of its own. Safe to use from many threads, one at a time is served."""

    def __init__(
        self, group: Group, listing: Listing, lines: Lines, routes: RouteCache, *, prefix: str, name: str
    ) -> None:
        self._group, self._listing, self._lines, self._routes, self._prefix = group, listing, lines, routes, prefix
        self._name, self._lock = name, threading.Lock()

    def settle(self, word: SettleWord, tokens: Sequence[Token], *, ms: int = 0, handled: bool = True) -> None:
        """Say a word of messages: one call per partition, epoch and 500 messages, one write per node.

        `handled`: False where they are settled here and handled elsewhere, so that nothing is told of them. Raises
        InvalidInput for offsets that nobody has, StaleToken for messages that others have: the rest is done.
        """
        # Whether the topic is archived may have changed; whoever only settles has no other reason to look.
        self._listing.refresh()
        told = told_by(self._name) if handled and word == "ack" and self._listing.archived else b""
        said = _Word(word, ms, told)
        by_place: dict[tuple[int, int], list[Token]] = {}
        for token in tokens:
            by_place.setdefault((token.partition, token.epoch), []).append(token)
        by_node: dict[NodeId, list[tuple[Place, Sequence[Token]]]] = {}
        for (partition, epoch), of_place in by_place.items():
            node_id = self._listing.node_of(partition)
            if node_id is None:
                said.stale += of_place
                continue
            place = Place(self._prefix, partition, self._group.group_id, self._group.scope or "key", epoch)
            pieces = [of_place[at : at + BATCH_LIMIT] for at in range(0, len(of_place), BATCH_LIMIT)]
            by_node.setdefault(node_id, []).extend((place, piece) for piece in pieces)
        with self._lock:
            for node_id, calls in by_node.items():
                self._tell(node_id, said, calls)
        if said.unknown:
            named = ", ".join(f"{token.partition}/{token.offset}" for token in said.unknown[:5])
            raise InvalidInput(f"no such message was given out: {named}")
        if said.stale:
            stale = [(token.partition, token.offset) for token in said.stale]
            raise StaleToken(self._group.name, self._group.topic, stale)

    def _tell(self, node_id: NodeId, said: _Word, calls: Calls) -> None:
        line = self._lines.to(node_id)
        failpoint("pop.before_settle")
        try:
            replies = self._ask(line, said, calls)
        except NodeNotArmed:
            # Nothing was said. Somebody may have armed it since we asked which run counts.
            self._routes.refresh_nodes()
            line = self._lines.to(node_id)
            replies = self._ask(line, said, calls)
        except StoreUnavailable:
            if said.word == "nack":
                # Said twice, the second one is refused.
                raise
            replies = self._ask(line, said, calls)
        failpoint("pop.after_settle")
        for (_, tokens), reply in zip(calls, replies, strict=True):
            answer = pop_settle_reply(reply, line.node.address)
            if isinstance(answer, Settled):
                said.stale += [tokens[place - 1] for place in answer.stale]
            elif isinstance(answer, Refused) and answer.word == "unknown":
                said.unknown += tokens
            else:
                said.stale += tokens

    def _ask(self, line: NodeConnection, said: _Word, calls: Calls) -> list[Any]:
        commands = [
            pop_settle_command(
                line, place, said.word, [(token.batch, token.offset) for token in tokens], ms=said.ms, told=said.told
            )
            for place, tokens in calls
        ]
        return call_scripts(line, commands)
