"""Checks of an application database."""

from __future__ import annotations

from typing import Final

from mqlayer.doctor.findings import Check, CheckLimits, CheckStatus, Finding, format_seconds
from mqlayer.doctor.postgres import CheckedDatabase
from mqlayer.postgres.server_identity import NOT_REPORTED, SUSPECT


def check_relays(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report missing relays and late outbox rows."""
    living, unowned = checked.row("check_relays")
    waiting, oldest_s = checked.row("check_outbox")
    late = waiting > 0 and oldest_s > limits.outbox_s
    rows = (
        f"{waiting} outbox rows wait, the oldest for {format_seconds(oldest_s)}" if waiting else "no outbox row waits"
    )
    if not living:
        fix = "run one: mqlayer relay; without it the Celery task relays every 10 s"
        verdict = CheckStatus.BROKEN if late else CheckStatus.WARNING
        return [Finding("relay", checked.subject, verdict, f"no relay lives; {rows}", fix)]
    found = []
    if unowned:
        seen = f"{living} relays live, and {unowned} of 16 LP sets have no owner"
        fix = "nothing, if it passes within a lease: relays take over what another one left; else see their logs"
        found.append(Finding("relay", checked.subject, CheckStatus.WARNING, seen, fix))
    if late:
        fix = "see the relay's log and the nodes: what is away, full, or sealed for a route change?"
        found.append(Finding("relay", checked.subject, CheckStatus.BROKEN, rows, fix))
    return found or [Finding("relay", checked.subject, CheckStatus.OK, f"{living} relays live; {rows}")]


def check_recovery(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report an outbox that waits for recovery: nothing is relayed."""
    rows = checked.rows("outbox_server")
    known, now = rows[0][1:3] if rows else (None, NOT_REPORTED)
    if known != SUSPECT and (known in (None, NOT_REPORTED) or now in (NOT_REPORTED, known)):
        return [Finding("recovery", checked.subject, CheckStatus.OK, "its relays know its timeline")]
    why = "Redis holds more than it ever numbered" if known == SUSPECT else f"it is on timeline {now}, was on {known}"
    seen = f"the outbox waits to be recovered, and nothing is relayed: {why}, so commits may be missing"
    fix = "start a relay, which does it, and re-arm the nodes that its log names; without them: "
    return [Finding("recovery", checked.subject, CheckStatus.BROKEN, seen, fix + "mqlayer outbox recover --unproven")]


def check_quarantine(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report rows that cannot be sent."""
    found = []
    count, reason = checked.row("check_quarantine")
    if count:
        seen = f"{count} LPs get stuck behind a row that can't be sent; the first: {reason}"
        fix = "mqlayer outbox quarantine list; repair the cause, then mqlayer outbox quarantine retry"
        found.append(Finding("quarantined", checked.subject, CheckStatus.BROKEN, seen, fix))
    count, reason = checked.row("check_voided")
    if count:
        seen = f"{count} rows of best_effort topics can't be sent and were passed over; the first: {reason}"
        fix = "mqlayer outbox quarantine list; repair them there, then mqlayer outbox quarantine retry, or discard"
        found.append(Finding("quarantined", checked.subject, CheckStatus.WARNING, seen, fix))
    return found or [Finding("quarantined", checked.subject, CheckStatus.OK, "no row is quarantined")]


def check_publishers(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report roles without an idle timeout: hanging transactions block LPs."""
    names = [name for (name,) in checked.rows("check_publishers")]
    if not names:
        seen = "idle transactions of every role that may publish are ended"
        return [Finding("publishers", checked.subject, CheckStatus.OK, seen)]
    seen = f"idle transactions of {', '.join(names)} are never ended, and each holds the LPs that it published to"
    fix = f"ALTER ROLE {names[0]} SET idle_in_transaction_session_timeout = '30s'"
    return [Finding("publishers", checked.subject, CheckStatus.WARNING, seen, fix)]


def check_versions(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report overdue versions: they hold all later ones."""
    count, waiting, oldest_s, name = checked.row("check_versions")
    if not count:
        return [Finding("versions", checked.subject, CheckStatus.OK, "no version of an entity is overdue")]
    seen = f"entities whose next version is overdue: {count}, the first of {name} for {format_seconds(oldest_s)}"
    fix = "mqlayer versions gaps; look for it among what is parked or dead, or mqlayer versions set"
    return [Finding("versions", checked.subject, CheckStatus.WARNING, f"{seen}; {waiting} later events are held", fix)]


def check_large_bodies(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report large bodies that are not removed."""
    count, size, late, held = checked.row("check_large_bodies")
    found = []
    if late:
        seen = f"{late} of {count} large bodies could not be removed for an hour"
        fix = "see the job clean_large_bodies in a worker's log: workers need the bucket's endpoint and credentials"
        found.append(Finding("large_bodies", checked.subject, CheckStatus.WARNING, seen, fix))
    if held:
        seen = f"large bodies of {held} topics stay: the outbox has kept rows from before a cut for a day"
        fix = "mqlayer outbox quarantine list: a row that no relay can send keeps them; else see the relay"
        found.append(Finding("large_bodies", checked.subject, CheckStatus.WARNING, seen, fix))
    seen = f"{count} large bodies are stored, {size} bytes"
    return found or [Finding("large_bodies", checked.subject, CheckStatus.OK, seen)]


CHECKS: Final[dict[str, Check[CheckedDatabase]]] = {
    "relay": check_relays,
    "recovery": check_recovery,
    "quarantined": check_quarantine,
    "publishers": check_publishers,
    "large_bodies": check_large_bodies,
    "versions": check_versions,
}
