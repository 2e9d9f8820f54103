"""Supported and faulty server versions."""

from __future__ import annotations

from typing import Final

from mqlayer.doctor.findings import CheckStatus, Finding
from mqlayer.postgres.session_setup import OLDEST_POSTGRES
from mqlayer.redis.server_versions import Product, ServerVersion

OLDEST_REDIS: Final = (6, 2, 0)
HEADERS_SINCE: Final = (7, 0, 0)
EVICTED_BLOCKED: Final = ((7, 2, 0), (8, 6, 3))
"""From, fixed in: CVE-2026-23479, blocked clients and eviction."""
LUA_FIXED: Final[dict[Product, dict[tuple[int, int], ServerVersion]]] = {
    "redis": {(6, 2): (6, 2, 20), (7, 2): (7, 2, 11), (7, 4): (7, 4, 6), (8, 0): (8, 0, 4), (8, 2): (8, 2, 2)},
    "valkey": {(7, 2): (7, 2, 11), (8, 0): (8, 0, 6), (8, 1): (8, 1, 4)},
}
"""First release per series without CVE-2025-49844 (server takeover by scripts)."""

NEWEST_POSTGRES: Final = 18


def redis_finding(subject: str, product: Product, version: ServerVersion) -> Finding:
    """Judge a node's version."""
    shown = f"{product} {'.'.join(map(str, version))}"
    if product == "redis" and version < OLDEST_REDIS:
        return Finding(
            "version", subject, CheckStatus.BROKEN, shown, "use Redis 7.2.11 or later of its series, or Valkey"
        )
    bad = [*_redis_faults(version)] if product == "redis" else []
    if not _lua_is_fixed(product, version):
        bad.append("CVE-2025-49844 (scripts take the server over), unless this build has the fix")
    if not bad:
        return Finding("version", subject, CheckStatus.OK, shown)
    fix = "upgrade to the last release of a series that is maintained, or to your distribution's build with the fixes"
    return Finding("version", subject, CheckStatus.WARNING, f"{shown}: {'; '.join(bad)}", fix)


def postgres_finding(subject: str, number: int) -> Finding:
    """Judge a `server_version_num`."""
    major, shown = number // 10_000, f"Postgres {number // 10_000}.{number % 10_000}"
    if major < OLDEST_POSTGRES:
        return Finding("version", subject, CheckStatus.BROKEN, shown, f"use Postgres {OLDEST_POSTGRES} or later")
    if major > NEWEST_POSTGRES:
        fix = f"nothing, if the tests of mqlayer pass on it; tried are {OLDEST_POSTGRES} to {NEWEST_POSTGRES}"
        return Finding("version", subject, CheckStatus.WARNING, f"{shown}: newer than what was tried", fix)
    return Finding("version", subject, CheckStatus.OK, shown)


def _redis_faults(version: ServerVersion) -> list[str]:
    found = []
    if version < HEADERS_SINCE:
        found.append("scripts have no flags here: one that meets a full disk half-way is not refused beforehand")
    if EVICTED_BLOCKED[0] <= version < EVICTED_BLOCKED[1]:
        found.append("CVE-2026-23479 (blocked clients and eviction), fixed in 8.6.3")
    return found


def _lua_is_fixed(product: Product, version: ServerVersion) -> bool:
    fixed = LUA_FIXED[product]
    if version[:2] in fixed:
        return version >= fixed[version[:2]]
    return version[:2] > max(fixed)
