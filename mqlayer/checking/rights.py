"""Whether the user of this command may ask a node for all that is to be looked at."""

from __future__ import annotations

from mqlayer.checking.findings import ASK_AGAIN, Finding, Limits, Verdict
from mqlayer.errors import MqlayerError
from mqlayer.redis.asking import ask_rights, shown_rights
from mqlayer.redis.nodes import Node
from mqlayer.redis.permissions import DEFAULT_USER_ADVICE, Duty
from mqlayer.redis.roles import RedisRole


def check_default_user(node: Node, subject: str, prefix: str, limits: Limits) -> list[Finding]:
    """User default reads the append-only file, also where it is off."""
    try:
        rights = ask_rights(node, Duty(RedisRole.WORKER, prefix), user="default", timeout_s=limits.connect_s)
    except MqlayerError as error:
        return [Finding("default user", subject, Verdict.UNKNOWN, str(error), ASK_AGAIN)]
    if not rights.missing:
        return []
    seen = "user default lacks rights: the next start leaves out what scripts wrote"
    return [Finding("default user", subject, Verdict.BROKEN, seen, f"ACL SETUSER default: {DEFAULT_USER_ADVICE}")]


def check_own_rights(node: Node, subject: str, prefix: str, limits: Limits) -> Finding:
    """Whether this command's user may look at all that there is; other users: mqlayer node acl ROLE --check."""
    duty = Duty(RedisRole.VIEWER, prefix)
    try:
        rights = ask_rights(node, duty, timeout_s=limits.connect_s)
    except MqlayerError as error:
        return Finding("rights", subject, Verdict.UNKNOWN, str(error), ASK_AGAIN)
    if rights.missing:
        return Finding("rights", subject, Verdict.WARNING, rights.told(duty), "give the user what it lacks")
    verdict = Verdict.OK if rights.missing is not None else Verdict.UNKNOWN
    fix = "" if rights.missing is not None else "Redis 7 or later says what a user may do"
    return Finding("rights", subject, verdict, shown_rights(rights, duty), fix)
