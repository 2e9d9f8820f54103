"""Checks of an application database: relays, what waits, what can never be sent, who holds LPs, missing versions."""

from __future__ import annotations

from typing import Final

from mqlayer.checking.findings import Check, Finding, Limits, Verdict, shown_s
from mqlayer.checking.postgres import AskedDatabase
from mqlayer.postgres.server import SUSPECT, UNTOLD


def check_relays(asked: AskedDatabase, limits: Limits) -> list[Finding]:
    """Committed messages get to their partitions, and soon."""
    living, unowned = asked.row("check_relays")
    waiting, oldest_s = asked.row("check_outbox")
    late = waiting > 0 and oldest_s > limits.waiting_s
    rows = f"{waiting} outbox rows wait, the oldest since {shown_s(oldest_s)}" if waiting else "no outbox row waits"
    if not living:
        fix = "run one: mqlayer relay; without it the Celery task relays every 10 s"
        verdict = Verdict.BROKEN if late else Verdict.WARNING
        return [Finding("relay", asked.subject, verdict, f"no relay lives; {rows}", fix)]
    found = []
    if unowned:
        seen = f"{living} relays live, and {unowned} of 16 LP sets have no owner"
        fix = "nothing, if it passes within a lease: relays take over what another one left; else see their logs"
        found.append(Finding("relay", asked.subject, Verdict.WARNING, seen, fix))
    if late:
        fix = "see the relay's log and the nodes: what is away, full, or sealed for a route change?"
        found.append(Finding("relay", asked.subject, Verdict.BROKEN, rows, fix))
    return found or [Finding("relay", asked.subject, Verdict.OK, f"{living} relays live; {rows}")]


def check_recovery(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """Nothing is relayed of an outbox that may have lost commits before it is recovered."""
    rows = asked.rows("outbox_server")
    known, now = rows[0][1:3] if rows else (None, UNTOLD)
    if known != SUSPECT and (known in (None, UNTOLD) or now in (UNTOLD, known)):
        return [Finding("recovery", asked.subject, Verdict.OK, "its relays know its timeline")]
    why = "Redis holds more than it ever numbered" if known == SUSPECT else f"it is on timeline {now}, was on {known}"
    seen = f"the outbox waits to be recovered, and nothing is relayed: {why}, so commits may be missing"
    fix = "start a relay, which does it, and bring back the nodes that its log names; without them: "
    return [Finding("recovery", asked.subject, Verdict.BROKEN, seen, fix + "mqlayer outbox recover --unproven")]


def check_aside(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """A row that can never be sent holds its LP, or, in a best_effort topic, waits for an operator."""
    found = []
    count, reason = asked.row("check_aside")
    if count:
        seen = f"{count} LPs stand still behind a row that can't be sent; the first: {reason}"
        fix = "mqlayer outbox aside list; mend the cause, then mqlayer outbox aside retry"
        found.append(Finding("set aside", asked.subject, Verdict.BROKEN, seen, fix))
    count, reason = asked.row("check_voided")
    if count:
        seen = f"{count} rows of best_effort topics can't be sent and were passed over; the first: {reason}"
        fix = "mqlayer outbox aside list; mend them there, then mqlayer outbox aside retry, or discard"
        found.append(Finding("set aside", asked.subject, Verdict.WARNING, seen, fix))
    return found or [Finding("set aside", asked.subject, Verdict.OK, "no row is set aside")]


def check_publishers(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """An application that stops inside of a transaction stops the LPs that it published to."""
    names = [name for (name,) in asked.rows("check_publishers")]
    if not names:
        seen = "idle transactions of every role that may publish are ended"
        return [Finding("publishers", asked.subject, Verdict.OK, seen)]
    seen = f"idle transactions of {', '.join(names)} are never ended, and each holds the LPs that it published to"
    fix = f"ALTER ROLE {names[0]} SET idle_in_transaction_session_timeout = '30s'"
    return [Finding("publishers", asked.subject, Verdict.WARNING, seen, fix)]


def check_versions(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """A version that does not come holds all later ones of its entity."""
    count, held, oldest_s, name = asked.row("check_versions")
    if not count:
        return [Finding("versions", asked.subject, Verdict.OK, "no version of an entity is overdue")]
    seen = f"entities whose next version is overdue: {count}, the first of {name} since {shown_s(oldest_s)}"
    fix = "mqlayer versions gaps; look for it among what is parked or dead, or mqlayer versions set"
    return [Finding("versions", asked.subject, Verdict.WARNING, f"{seen}; {held} later events are held", fix)]


CHECKS: Final[dict[str, Check[AskedDatabase]]] = {
    "relay": check_relays,
    "recovery": check_recovery,
    "set aside": check_aside,
    "publishers": check_publishers,
    "versions": check_versions,
}
