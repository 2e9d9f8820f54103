"""Checks of what new sessions begin with, and of what lies between us and the database.

Sessions of ours are set up alike whatever that is; those of applications are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from mqlayer.checking.findings import Check, Finding, Limits, Verdict
from mqlayer.checking.postgres import AskedDatabase
from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import connect_directly
from mqlayer.postgres.own_sessions import is_direct, is_own
from mqlayer.settings import way_of

SHORT_STATEMENT_MS: Final = 1_000
SHORT_LOCK_MS: Final = 100


class Harm(NamedTuple):
    """From which value on a setting hurts an application's session, and how."""

    hurts: Callable[[str, float | None], bool]
    why: str


def _is(*values: str) -> Callable[[str, float | None], bool]:
    return lambda value, _: value in values


def _under(least_ms: int) -> Callable[[str, float | None], bool]:
    return lambda _, duration_ms: duration_ms is not None and 0 < duration_ms < least_ms


def _but(*values: str) -> Callable[[str, float | None], bool]:
    return lambda value, _: value.upper() not in values


HARMS: Final[Mapping[str, Harm]] = {
    "array_nulls": Harm(_is("off"), "what is NULL in an array arrives as a word"),
    "client_encoding": Harm(_but("UTF8", "UTF-8", "UNICODE"), "keys and texts of other characters can't be sent"),
    "default_transaction_isolation": Harm(
        _but("READ COMMITTED", "READ UNCOMMITTED"),
        "a transaction that publishes to a busy key, or passes its fence, fails and has to be run again",
    ),
    "default_transaction_read_only": Harm(_is("on"), "it can neither publish nor have effects"),
    "exit_on_error": Harm(_is("on"), "each refusal ends its connection"),
    "lock_timeout": Harm(_under(SHORT_LOCK_MS), "it does not wait for a key that another transaction publishes to"),
    "plpgsql.extra_errors": Harm(_but("NONE", ""), "functions may be refused that are right"),
    "restrict_nonsystem_relation_kind": Harm(_but(""), "views of the schemas can't be read"),
    "row_security": Harm(_is("off"), "tables with policies are refused in place of filtered"),
    "session_replication_role": Harm(_is("replica", "local"), "triggers do not run, so rules are not kept"),
    "standard_conforming_strings": Harm(_is("off"), "a backslash in a text is read as something else"),
    "statement_timeout": Harm(_under(SHORT_STATEMENT_MS), "a statement that waits for a busy key is ended"),
    "synchronous_commit": Harm(_is("off"), "a crash may lose effects whose messages count as handled"),
    "transform_null_equals": Harm(_is("on"), "comparisons with NULL mean something else"),
}
"""What is worth a line where a role, the database or the server has it so."""


def check_sessions(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """What applications' sessions begin with: what of it publishing and effects suffer from."""
    found = [
        Finding("sessions", asked.subject, Verdict.WARNING, f"{who} has {name} = {value}: {HARMS[name].why}", fix)
        for who, name, value, duration_ms, fix in asked.rows("check_session_defaults", names=list(HARMS))
        if HARMS[name].hurts(value, duration_ms)
    ]
    seen = "what new sessions begin with hurts no application"
    return found or [Finding("sessions", asked.subject, Verdict.OK, seen)]


def check_pooler(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """Whether a pooler is in between, and a way past it is known."""
    if is_direct(asked.connection):
        return [Finding("pooler", asked.subject, Verdict.OK, "no pooler is in between")]
    way = way_of(asked.dsn)
    if is_own(asked.connection) and not way.direct:
        return [Finding("pooler", asked.subject, Verdict.OK, "through a pooler that lends by client, as is said")]
    try:
        connect_directly(asked.dsn, purpose="members, receivers, relays and migrations").close()
    except MqlayerError as error:
        verdict = Verdict.BROKEN if way.direct else Verdict.WARNING
        fix = f"set {way.direct_setting} to the server's own address"
        return [Finding("pooler", asked.subject, verdict, str(error), fix)]
    return [Finding("pooler", asked.subject, Verdict.OK, f"through a pooler, and past it by {way.direct_setting}")]


CHECKS: Final[dict[str, Check[AskedDatabase]]] = {"sessions": check_sessions, "pooler": check_pooler}
