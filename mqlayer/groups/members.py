"""Join, heartbeat, release, leave: a member's calls to Postgres (docs/design/ownership.md)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mqlayer.domain.deployments import MAIN
from mqlayer.domain.names import check_deployment, check_name, check_zone
from mqlayer.domain.protocol import ServedProtocols
from mqlayer.domain.rates import RateLimit
from mqlayer.domain.retry_rules import RULES_COUNT, RetryRules
from mqlayer.domain.routing import NodeId, PartitionId
from mqlayer.domain.tags import NO_FILTER
from mqlayer.domain.time_to_live import NO_END, TimeToLive
from mqlayer.errors import Conflict, GroupRetired, InstanceTaken, NotFound, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.groups.breaker import CLOSED, BreakerReply
from mqlayer.groups.rebalance import change_group, rebalance
from mqlayer.groups.wakeups import wakeups
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.protocol import InForce, code_facts
from mqlayer.postgres.queries import query
from mqlayer.randomness import RNG
from mqlayer.runtime.heartbeat_sender import HeartbeatSender

OF_BREAKER: Final = 7
OF_GROUP: Final = 10 + OF_BREAKER + RULES_COUNT
"""Columns of `member_assignments` about the group."""
GROUP_HEARTBEATS: Final = 250
"""A group's heartbeats per second, as far as a third of the lease allows."""
LOOKS: Final = 3
"""Looks at a group per second, by chance."""


@dataclass(frozen=True, slots=True)
class MemberSession:
    """One joining of a member id; a later one replaces it."""

    group_id: int
    member_id: str
    session: int
    acts_on: int = field(default=0, compare=False)
    """The protocol version in force as it joined."""


Joining = Callable[[MemberSession], None]
"""Gets a session before it begins."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A partition that a member may consume. `release`: give it up.

    `cut`: it holds messages beyond its sealed marks, as do its successors (see `seal_marks`). `seek`: number of the
    last seek; earlier positions are void, `start` counts. `replay`: that number if fenced effects repeat, otherwise 0.
    `waits_for_replay`: handle parked messages only.
    """

    partition: PartitionId
    node: NodeId
    lp_from: int
    lp_to: int
    epoch: int
    start: int
    release: bool
    cut: bool = False
    seek: int = 0
    replay: int = 0
    waits_for_replay: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """`known`: False if the lease ran out or the session was replaced.

    `parking_version` counts acts on parked keys. `archived`: outcomes go to an archiver. `now_ms`: Postgres's time,
    at the latest.
    """

    known: bool
    replaced: bool
    allocation: int = 0
    rules: RetryRules | None = None
    parking_version: int = 0
    tag_filter: str = NO_FILTER
    archived: bool = False
    time_to_live: TimeToLive = NO_END
    now_ms: int = 0
    rate: RateLimit | None = None
    assignments: tuple[Assignment, ...] = ()
    breaker: BreakerReply = CLOSED
    class_rate: RateLimit | None = None
    served: ServedProtocols = field(default=ServedProtocols(0, 0, 0), compare=False)
    nodes: str = field(default="", compare=False)
    """For `RouteCache.follow_nodes`."""


@dataclass(slots=True)
class HeardGroup:
    """A session's last reply, so that the next heartbeat reads less. `members`: living ones."""

    state: str = ""
    reply: HeartbeatReply = HeartbeatReply(known=True, replaced=False)
    members: int = 0
    wants_all: bool = True
    urgent: bool = True
    """Whether the next heartbeat waits for no others."""

    def looks(self, chance: float) -> bool:
        """Say whether to look at the whole group, by a random number below 1."""
        return chance * min(self.members, GROUP_HEARTBEATS) < LOOKS

    def is_current(self, state: str) -> bool:
        """Say whether the reply still holds."""
        return not self.wants_all and state == self.state

    def note(self, state: str, reply: HeartbeatReply, members: int) -> None:
        """Note a reply."""
        self.state, self.reply, self.members, self.wants_all = state, reply, members, False
        self.urgent = False


class MemberReplaced(Conflict):
    """Another process took the member's id, or an operator evicted it."""


def next_session(database: Database) -> int:
    """Return a new session number."""
    with database.connection() as connection:
        row = connection.execute(query("member_session_next")).fetchone()
    return int(row[0]) if row else 0


def join(
    database: Database,
    *,
    group_id: int,
    member_id: str,
    lease_s: float,
    session: int | None = None,
    own: Collection[int] | None = None,
    deployment: str = MAIN,
    zone: str = "",
) -> MemberSession:
    """Join a group under a new session, and rebalance.

    `own`: earlier sessions of this process. After all leases expired together, the first to rejoin gives the others
    half a lease. Raises VersionRefused, GroupRetired, NotFound, InstanceTaken if a broadcast instance has another
    member, MemberReplaced if the newest session is another process's; then nothing changes.
    """
    check_name("member", member_id)
    facts = {
        "group_id": group_id,
        "member_id": member_id,
        "session": next_session(database) if session is None else session,
        "own": None if own is None else list(own),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "deployment": check_deployment(deployment),
        "zone": check_zone(zone),
        "lease_s": lease_s,
        **code_facts(),
    }
    failpoint("member.before_join")

    def work(connection: Connection) -> tuple[bool, MemberSession]:
        _refuse_to_admit(connection, group_id, member_id)
        if own is not None:
            connection.execute(query("members_spare"), facts)
        row = connection.execute(query("member_join"), facts).fetchone()
        if row is None:
            raise MemberReplaced(
                f"member {member_id!r} has a session of somebody else's", "start under another member id"
            )
        # New epochs refuse the acks of an earlier process of this id.
        renewed = connection.execute(query("assignment_renew"), facts).rowcount
        known = own is not None or renewed > 0
        if known:
            rebalance(connection, group_id)
        failpoint("member.before_join_commit")
        return known, MemberSession(group_id, member_id, *row)

    known, joined = change_group(database, group_id, work)
    failpoint("member.after_join_commit")
    if not known:
        _place(database, joined)
    return joined


def _place(database: Database, joined: MemberSession) -> None:
    """Rebalance, unless another's rebalance has placed the member."""

    def work(connection: Connection) -> None:
        if connection.execute(query("member_placed"), _facts(joined)).fetchone() is None:
            rebalance(connection, joined.group_id)

    change_group(database, joined.group_id, work)


def _refuse_to_admit(connection: Connection, group_id: int, member_id: str) -> None:
    row = connection.execute(query("group_admits"), {"group_id": group_id}).fetchone()
    if row is None:
        raise NotFound("group", group_id, "it was retired long ago and is forgotten: start the process again")
    topic, group, state, is_instance = row
    # An instance that is being revived has no start yet.
    if state == "retired" or (is_instance and state == "creating"):
        raise GroupRetired(topic, group)
    if is_instance:
        # Two members would each get a part of the messages.
        connection.execute(query("member_expire"), {"group_id": group_id})
        for other, leaving, *_ in connection.execute(query("member_live"), {"group_id": group_id}).fetchall():
            if other != member_id:
                raise InstanceTaken(topic, group, other, "leaving" if leaving else "running")


def send_heartbeat(
    database: Database,
    session: MemberSession,
    *,
    lease_s: float,
    own: Collection[int] = (),
    in_force: InForce | None = None,
    heard: HeardGroup | None = None,
    sender: HeartbeatSender | None = None,
) -> HeartbeatReply:
    """Extend the lease, rebalance if needed, return the member's partitions.

    `own`: this process's other sessions, from unanswered joins. `in_force`: the version that it acts on, until the
    reply names another. `heard`: by this session before. `sender`: shared by members of a process.
    """
    in_force, heard = in_force or InForce(), heard or HeardGroup()
    facts = _facts(session) | {"lease_s": lease_s, "acts_on": in_force.version}
    row = database.first_row(query("member_beat"), facts) if sender is None else sender.send(facts, urgent=heard.urgent)
    known, *versions, allocation, now_ms, nodes, state = row or (0, 0, 0, 0, 0, 0, "", "")
    served = ServedProtocols(*versions)
    in_force.note(served.in_force)
    if not known:
        newest = database.first_row(query("member_session"), facts)
        ours = {session.session, *own}
        # Lower than all of this process's: the database lost our join.
        replaced = newest is not None and newest[0] not in ours and newest[0] > min(ours)
        return HeartbeatReply(known=False, replaced=replaced, served=served)
    turn = nullcontext if sender is None else sender.turn
    unbalanced = False
    if heard.looks(RNG.random()):
        with turn():
            unbalanced = database.first_row(query("group_unbalanced"), facts) == (True,)
    if unbalanced:
        _rebalance_if_free(database, session.group_id, lock_wait_s=lease_s / 8)
    if unbalanced or not heard.is_current(state):
        with turn():
            rows = database.rows(query("member_assignments"), facts)
            (members,) = database.first_row(query("members_counted"), facts) or (0,)
        # What changed between the two statements is read with the next heartbeat: its state is another one.
        heard.note(state, _reply(rows), members)
        allocation = max(allocation, heard.reply.allocation)
    return replace(
        heard.reply,
        allocation=allocation,
        now_ms=max(now_ms, heard.reply.now_ms),
        served=served,
        nodes=nodes,
    )


def _reply(rows: Sequence[Any]) -> HeartbeatReply:
    assigned = tuple(Assignment(*row[:-OF_GROUP]) for row in rows if row[0] is not None)
    facts_of_group: Sequence[Any] = (
        rows[0][-OF_GROUP:] if rows else (False, 0, "settle", 0, None, None, 0, *[None] * OF_BREAKER, NO_FILTER, 0, 0)
    )
    archived, ttl_s, expired, now_ms, per_s, burst, share_count, *more = facts_of_group
    tag_filter, parking_version, allocation, *columns = more[OF_BREAKER:]
    rules = RetryRules.of(columns) if columns else None
    return HeartbeatReply(
        known=True,
        replaced=False,
        allocation=allocation,
        rules=rules,
        parking_version=parking_version,
        tag_filter=tag_filter,
        archived=archived,
        time_to_live=TimeToLive(ttl_s, expired),
        now_ms=now_ms,
        rate=RateLimit.of(per_s, burst, share_count or 0),
        assignments=assigned,
        breaker=_breaker(more[:OF_BREAKER]),
        class_rate=None if rules is None else RateLimit.of(rules.class_rate, None, share_count or 0),
    )


def _breaker(facts: Sequence[Any]) -> BreakerReply:
    # Without a row of it all but the last is null.
    return BreakerReply(suspected=bool(facts[-1])) if facts[0] is None else BreakerReply(*facts)


def release(database: Database, session: MemberSession, *assigned: Assignment) -> None:
    """Release partitions and give them to their next owners, in one transaction."""
    given = {"partitions": [one.partition for one in assigned], "epochs": [one.epoch for one in assigned]}
    facts = _facts(session) | given

    def work(connection: Connection) -> None:
        next_owners = {row[0] for row in connection.execute(query("assignments_pass"), facts).fetchall()}
        if next_owners:
            payloads = wakeups(session.group_id, next_owners)
            connection.execute(query("allocation_raise_for"), facts | {"payloads": payloads})
        if connection.execute(query("assignments_release"), facts).rowcount:
            rebalance(connection, session.group_id)

    change_group(database, session.group_id, work)


def renew(database: Database, session: MemberSession, assigned: Assignment) -> None:
    """Give an owner a new epoch if its node refuses the present one.

    That happens where Postgres lost commits or the node lacks the partition. No effect unless session and epoch are in
    force.
    """
    facts = _facts(session) | {"partition_id": assigned.partition, "epoch": assigned.epoch}
    _change(database, session, "assignment_epoch_renew", facts)


def start_leaving(database: Database, session: MemberSession, *, lock_wait_s: float = 2.0) -> None:
    """Ask to hand over all partitions; the member lives until then.

    Raises TransactionConflict after `lock_wait_s`.
    """
    _change(database, session, "member_leaving", _facts(session), lock_wait_s=lock_wait_s, timeout_s=0)


def leave(database: Database, session: MemberSession) -> None:
    """End the membership; others get its partitions."""
    _change(database, session, "member_leave", _facts(session))


def end_dead(database: Database, session: MemberSession) -> bool:
    """End the session of a process that is certainly dead; others get its partitions. Say whether it had not ended.

    Only who saw the process end may call this: its effects would go on beside the next owner's.
    """
    ended = _change(database, session, "member_dead", _facts(session))
    failpoint("member.after_dead_commit")
    return ended


def _change(database: Database, session: MemberSession, name: str, facts: dict[str, Any], **timeouts: float) -> bool:
    def work(connection: Connection) -> bool:
        changed = connection.execute(query(name), facts).rowcount > 0
        if changed:
            rebalance(connection, session.group_id)
        return changed

    return change_group(database, session.group_id, work, **timeouts)


def _rebalance_if_free(database: Database, group_id: int, *, lock_wait_s: float) -> None:
    """A heartbeat must not wait for the lock for long."""
    try:
        change_group(
            database, group_id, lambda connection: rebalance(connection, group_id), lock_wait_s=lock_wait_s, timeout_s=0
        )
    except TransactionConflict:
        return


def _facts(session: MemberSession) -> dict[str, Any]:
    return {"group_id": session.group_id, "member_id": session.member_id, "session": session.session}
