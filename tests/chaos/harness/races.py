"""Bugs that need nobody to be killed: small races of real code on real servers, round after round.

Each round says by what the bug shows, or nothing. Without the bug, in the same race, nothing ever shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.parking import ParkingStore
from mqlayer.postgres.queries import query
from tests.chaos.harness import race_rounds as rounds
from tests.chaos.harness.plants import APPLICATION, CONTROL, Plant, plant_this
from tests.chaos.harness.race_servers import Place, place
from tests.proof.planted_bugs import OutboxById, OutboxByTransaction

LIMIT_S: Final = 120.0
"""How long a bug may go unnoticed."""

Round = Callable[[Place, bool], str]


@dataclass(frozen=True, slots=True)
class RacePlant:
    """A bug, and the race that shows it; a round is told whether the bug is there, for what stands beside our code."""

    says: str
    round: Round
    bug: Plant = field(default_factory=lambda: Plant(""))


def race(name: str, *, planted: bool = True, limit_s: float = LIMIT_S, most_rounds: int = 1000) -> dict[str, Any]:
    """Race until the bug is caught, or long enough; it stays in this process. Servers are started before the time."""
    chosen = RACES[name]
    if planted:
        plant_this(chosen.bug)
    with place() as there:
        began, seen = time.monotonic(), ""
        while not seen and time.monotonic() - began < limit_s and there.seed < most_rounds:
            seen = chosen.round(there, planted)
        seconds = round(time.monotonic() - began, 1)
        return {"plant": name, "seconds": seconds, "rounds": there.seed, "caught": bool(seen), "by": seen}


def _retry_statements() -> None:
    """Answer a conflict by saying the statement again, in a transaction of its own."""
    plain = psycopg.Cursor.execute

    def execute(cursor: Any, *arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return plain(cursor, *arguments, **options)
            except psycopg.errors.DeadlockDetected:
                plain(cursor, "ROLLBACK")
                plain(cursor, "BEGIN")

    setattr(psycopg.Cursor, "execute", execute)  # noqa: B010


def _early_gate() -> None:
    OwnedPartition.is_settled = property(lambda held: held.command is not None)  # type: ignore[assignment,method-assign]


def _unpark_unseen() -> None:
    """End a key's being parked once what was handed out of it is handled: nobody looks at what came meanwhile."""
    plain = ParkingStore._next

    def _next(ledger: Any, connection: Any, turn: Any, key: Any, written: Any) -> Any:
        if turn.handled:
            connection.execute(query("parked_key_end"), key)
            return []
        return plain(ledger, connection, turn, key, written)

    setattr(ParkingStore, "_next", _next)  # noqa: B010


NUMBERED_FIRST: Final = """v_seq := nextval('mqlayer_app.outbox_number');
    -- Whatever else a publisher does between the two.
    PERFORM pg_sleep(random() * 0.002);
    UPDATE mqlayer_app.counter c SET seq = greatest(c.seq, v_seq) WHERE c.topic = p_topic AND c.lp = v_lp
        RETURNING c.topic_id, c.body_limit, clock_timestamp() INTO v_topic_id, v_limit, v_at;"""
LOCKED_FIRST: Final = """UPDATE mqlayer_app.counter c SET seq = c.seq + 1 WHERE c.topic = p_topic AND c.lp = v_lp
        RETURNING c.seq, c.topic_id, c.body_limit, clock_timestamp() INTO v_seq, v_topic_id, v_limit, v_at;"""
STILL_WAITS: Final = """
          AND NOT EXISTS (SELECT FROM mqlayer.parked_message m
                          WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name)"""

RACES: Final[dict[str, RacePlant]] = {
    "by_transaction": RacePlant(
        "an outbox read by (xid8, id) below the oldest open transaction", rounds.outbox_as(OutboxByTransaction)
    ),
    "by_id": RacePlant("an outbox read by id > cursor", rounds.outbox_as(OutboxById)),
    "number_before_lock": RacePlant(
        "a publisher takes its number first and the lock of its LP then",
        rounds.own_outbox,
        Plant("", {APPLICATION: ((LOCKED_FIRST, NUMBERED_FIRST),)}),
    ),
    "lps_unsorted": RacePlant(
        "a transaction takes its LPs in the order of its messages",
        rounds.deadlocks,
        Plant("", {
            APPLICATION: (
                ('GROUP BY topic, lp ORDER BY topic COLLATE "C", lp\n', "GROUP BY topic, lp ORDER BY min(n)\n"),
            )
        }),
    ),
    "statement_retried": RacePlant(
        "a conflict is answered by the statement again, not by the whole transaction",
        rounds.torn_transactions,
        Plant("", code=_retry_statements),
    ),
    "everysec_believed": RacePlant(
        "a node syncs every second, and what it answered counts as stored", rounds.power_cut
    ),
    "settling_without_header": RacePlant(
        "the script that settles has no header: it is refused while memory is full",
        rounds.full_memory,
        Plant("", {"lua/offsets_settle": (("#!lua flags=allow-oom\n", "-- no header\n"),)}),
    ),
    "unpark_unseen": RacePlant(
        "a key is not parked any more once what was handed out of it is handled, whatever came to it meanwhile",
        rounds.parked_keys,
        Plant("", {CONTROL: ((STILL_WAITS, ""),)}, code=_unpark_unseen),
    ),
    "session_lock": RacePlant(
        "who has a session's advisory lock is the owner, and has it still after its connection was lost",
        rounds.two_owners,
    ),
    "trim_by_count": RacePlant(
        "streams are trimmed by how much they hold, not by what groups have settled",
        rounds.trimmed_streams,
        Plant("", {
            "lua/log_trim": (
                ("local count = redis.call(", "floor = tonumber(meta[2]) - 50\nlocal count = redis.call("),
            )
        }),
    ),
    "fence_without_epoch": RacePlant(
        "the fence knows what was applied, not who owns the LP",
        rounds.fenced_owners,
        Plant("", {APPLICATION: (("IF epoch > p_epoch THEN", "IF false THEN"),)}),
    ),
    "no_new_epochs": RacePlant(
        "a node that fell back is armed under the epochs of before, as if tokens came from Redis alone",
        rounds.late_ack,
        Plant("", {
            "sql/queries/control.sql": (
                ("p.state <> 'deleted'\n  AND (%(partitions)s", "false\n  AND (%(partitions)s"),
            )
        }),
    ),
    "any_seal": RacePlant(
        "the gate opens by any command record, also one that its node lost",
        rounds.lost_seal,
        Plant("", {
            "sql/queries/routes.sql": (("AND s.seal_id = %(seal_id)s", "AND %(seal_id)s::text IS NOT NULL"),)
        }),
    ),
    "early_gate": RacePlant(
        "a parent counts as drained once its end was read",
        rounds.early_successors,
        Plant("", code=_early_gate),
    ),
    "ack_without_epoch": RacePlant(
        "whoever settles is believed, whatever its epoch",
        rounds.woken_owners,
        Plant("", {"lua/offsets_settle": (("if lock[1] ~= member or held ~= epoch then", "if false then"),)}),
    ),
    "lower_epoch_taken": RacePlant(
        "a pull lock goes to whoever asks for it, also under a lower epoch",
        rounds.woken_owners,
        Plant("", {"lua/lock_acquire": (("elseif held >= epoch then", "elseif false then"),)}),
    ),
    "clock_takeover": RacePlant(
        "a pull lock that was not refreshed for a second is anybody's, by the node's clock",
        rounds.woken_owners,
        Plant("", {
            "lua/lock_acquire": (
                ("elseif held >= epoch then", "elseif held >= epoch and now - tonumber(lock[3] or '0') < 1 then"),
            )
        }),
    ),
}  # fmt: skip
