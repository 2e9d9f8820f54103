"""Checks of Redis users' rights."""

from __future__ import annotations

from mqlayer.doctor.findings import ASK_AGAIN, CheckLimits, CheckStatus, Finding
from mqlayer.errors import MqlayerError
from mqlayer.redis.acl_check import DEFAULT_USER_ADVICE, RequiredAccess
from mqlayer.redis.node_connection import Node
from mqlayer.redis.roles import RedisRole
from mqlayer.redis.server_info import describe_access, read_access


def check_default_user(node: Node, subject: str, prefix: str, limits: CheckLimits) -> list[Finding]:
    """Report missing rights of `default`: Redis loads the append-only file with them."""
    try:
        required = RequiredAccess(RedisRole.WORKER, prefix, node.is_cluster)
        rights = read_access(node, required, user="default", timeout_s=limits.connect_s)
    except MqlayerError as error:
        return [Finding("default user", subject, CheckStatus.UNKNOWN, str(error), ASK_AGAIN)]
    if not rights.missing:
        return []
    seen = "user default lacks rights: the next start leaves out what scripts wrote"
    return [Finding("default user", subject, CheckStatus.BROKEN, seen, f"ACL SETUSER default: {DEFAULT_USER_ADVICE}")]


def check_own_rights(node: Node, subject: str, prefix: str, limits: CheckLimits) -> Finding:
    """Check this command's user only."""
    required = RequiredAccess(RedisRole.VIEWER, prefix, node.is_cluster)
    try:
        rights = read_access(node, required, timeout_s=limits.connect_s)
    except MqlayerError as error:
        return Finding("rights", subject, CheckStatus.UNKNOWN, str(error), ASK_AGAIN)
    if rights.missing:
        return Finding("rights", subject, CheckStatus.WARNING, rights.describe(required), "give the user these rights")
    verdict = CheckStatus.OK if rights.missing is not None else CheckStatus.UNKNOWN
    fix = "" if rights.missing is not None else "Redis 7 or later says what a user may do"
    return Finding("rights", subject, verdict, describe_access(rights, required), fix)
