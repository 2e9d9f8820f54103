"""Checks of applications' session defaults, and of poolers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from mqlayer.doctor.findings import Check, CheckLimits, CheckStatus, Finding
from mqlayer.doctor.postgres import CheckedDatabase
from mqlayer.errors import MqlayerError
from mqlayer.postgres.database import connect_directly
from mqlayer.postgres.session_setup import is_direct, is_own
from mqlayer.settings import options_of

SHORT_STATEMENT_MS: Final = 1_000
SHORT_LOCK_MS: Final = 100


class HarmfulSetting(NamedTuple):
    """A test for harmful values, and the harm."""

    hurts: Callable[[str, float | None], bool]
    why: str


def _is(*values: str) -> Callable[[str, float | None], bool]:
    return lambda value, _: value in values


def _under(least_ms: int) -> Callable[[str, float | None], bool]:
    return lambda _, duration_ms: duration_ms is not None and 0 < duration_ms < least_ms


def _but(*values: str) -> Callable[[str, float | None], bool]:
    return lambda value, _: value.upper() not in values


HARMS: Final[Mapping[str, HarmfulSetting]] = {
    "array_nulls": HarmfulSetting(_is("off"), "a NULL in an array arrives as a word"),
    "client_encoding": HarmfulSetting(
        _but("UTF8", "UTF-8", "UNICODE"), "keys and texts of other characters can't be sent"
    ),
    "default_transaction_isolation": HarmfulSetting(
        _but("READ COMMITTED", "READ UNCOMMITTED"),
        "a transaction that publishes to a busy key, or passes its fence, fails and has to be run again",
    ),
    "default_transaction_read_only": HarmfulSetting(_is("on"), "it can neither publish nor have effects"),
    "exit_on_error": HarmfulSetting(_is("on"), "each refusal ends its connection"),
    "lock_timeout": HarmfulSetting(
        _under(SHORT_LOCK_MS), "it does not wait for a key that another transaction publishes to"
    ),
    "plpgsql.extra_errors": HarmfulSetting(_but("NONE", ""), "correct functions may be refused"),
    "restrict_nonsystem_relation_kind": HarmfulSetting(_but(""), "views of the schemas can't be read"),
    "row_security": HarmfulSetting(_is("off"), "tables with policies are refused in place of filtered"),
    "session_replication_role": HarmfulSetting(_is("replica", "local"), "triggers do not run, so rules are not kept"),
    "standard_conforming_strings": HarmfulSetting(_is("off"), "a backslash in a text is read as something else"),
    "statement_timeout": HarmfulSetting(_under(SHORT_STATEMENT_MS), "a statement that waits for a busy key is ended"),
    "synchronous_commit": HarmfulSetting(_is("off"), "a crash may lose effects whose messages count as handled"),
    "transform_null_equals": HarmfulSetting(_is("on"), "comparisons with NULL mean something else"),
}


def check_sessions(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report defaults that harm publishing or effects."""
    found = [
        Finding("sessions", checked.subject, CheckStatus.WARNING, f"{who} has {name} = {value}: {HARMS[name].why}", fix)
        for who, name, value, duration_ms, fix in checked.rows("check_session_defaults", names=list(HARMS))
        if HARMS[name].hurts(value, duration_ms)
    ]
    seen = "the settings of new sessions hurt no application"
    return found or [Finding("sessions", checked.subject, CheckStatus.OK, seen)]


def check_pooler(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report a pooler without a known way past it."""
    if is_direct(checked.connection):
        return [Finding("pooler", checked.subject, CheckStatus.OK, "no pooler is in between")]
    options = options_of(checked.dsn)
    if is_own(checked.connection) and not options.direct:
        return [Finding("pooler", checked.subject, CheckStatus.OK, "through a session pooler, as MQLAYER_POOLER says")]
    try:
        connect_directly(checked.dsn, purpose="members, receivers, relays and migrations").close()
    except MqlayerError as error:
        verdict = CheckStatus.BROKEN if options.direct else CheckStatus.WARNING
        fix = f"set {options.direct_setting} to the server's own address"
        return [Finding("pooler", checked.subject, verdict, str(error), fix)]
    return [
        Finding("pooler", checked.subject, CheckStatus.OK, f"through a pooler, and past it by {options.direct_setting}")
    ]


CHECKS: Final[dict[str, Check[CheckedDatabase]]] = {"sessions": check_sessions, "pooler": check_pooler}
