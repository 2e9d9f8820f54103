"""Access-list rules, made from each role's scripts and commands (docs/design/access.md).

Redis 6.2 can't tie commands to keys: there a user may do any of its commands on any of its keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from typing import Final, NamedTuple

from mqlayer.errors import InvalidInput
from mqlayer.redis.command_specs import COMMANDS, KEYLESS, example
from mqlayer.redis.roles import PLAIN_COMMANDS, SCRIPTS, RedisRole
from mqlayer.redis.scripts import HEADERS_SINCE, script_text
from mqlayer.resources import lua_source

ANY: Final = "*"
"""A key known by its place in KEYS only."""
OF_NODE: Final = ("ended", "terms")
OF_PARTITION: Final = ("log", "meta", "marks", "ids", "ages")
OF_GROUP: Final = (
    "lock", "acks", "attempts", "outcomes", "rate", "pops", "queues", "due", "batches", "wake", "ready", "class_out",
    "class_rates",
)  # fmt: skip
CALLERS: Final = ("eval", "evalsha")
CONNECTING: Final = frozenset({"acl|dryrun", "acl|whoami", "info", "ping", "script|load", "select"})
"""Any connection may send these first."""
CONNECTING_TO_CLUSTER: Final = frozenset({"cluster|info", "cluster|slots"})
PLAIN_KEYS: Final[Mapping[str, str]] = {
    "hdel": "marks", "xtrim": "outcomes", "xsetid": "log", "xreadgroup": "log", "xpending": "log",
}  # fmt: skip
"""Of writing commands; readers may read all keys."""
COMMANDS_SINCE: Final[Mapping[str, tuple[int, int, int]]] = {"waitaof": (7, 2, 0)}
"""Commands that an older server than 7.2 lacks."""

SEVERAL_KEYS: Final = frozenset({"del", "unlink"})
"""One selector must cover a whole call, so each has its own."""

_CALL: Final = re.compile(r"\bp?call\('(\w+)'(?:, '(\w+)')?(?:, (\w+(?:, \w+_key)*))?")
_SPLIT: Final = frozenset(name.split("|")[0] for name in COMMANDS if "|" in name)


class CommandAccess(NamedTuple):
    """A command on a kind of key ('': none)."""

    command: str
    key: str

    @property
    def writes(self) -> bool:
        """A script call counts as writing all its keys."""
        return COMMANDS[self.command].writes or self.command in CALLERS


AccessSet = frozenset[CommandAccess]


def pattern(prefix: str, key: str) -> str:
    """Return a kind's key pattern."""
    if key in OF_PARTITION:
        return f"{prefix}:{{*}}:{key}"
    if key in OF_GROUP:
        return f"{prefix}:{{*}}:g*:{key}"
    return f"{prefix}:{key}"


@cache
def needs_of_script(name: str, version: tuple[int, int, int] = HEADERS_SINCE) -> AccessSet:
    """Read needs from the script's text."""
    found = set()
    for command, status, variables in _CALL.findall(script_text(name, version)):
        whole = f"{command}|{status}".lower() if command.lower() in _SPLIT else command.lower()
        named = variables.split(", ")
        kinds = map(_kind, named if whole in SEVERAL_KEYS else named[:1])
        found |= {CommandAccess(whole, kind) for kind in ([""] if whole in KEYLESS else kinds)}
    if version < HEADERS_SINCE and "allow-oom" in lua_source(name).splitlines()[0]:
        found.add(CommandAccess("persist", ANY))
    return frozenset(found)


def _kind(variable: str) -> str:
    kind = variable.removesuffix("_key")
    return kind if variable.endswith("_key") and kind in (*OF_NODE, *OF_PARTITION, *OF_GROUP) else ANY


@cache
def needs_of(role: RedisRole, version: tuple[int, int, int] = HEADERS_SINCE, *, cluster: bool = False) -> AccessSet:
    """Return a role's needs."""
    plain = {
        CommandAccess(name, "" if name in KEYLESS else PLAIN_KEYS.get(name, ANY))
        for name in PLAIN_COMMANDS[role]
        # An access list with an unknown command is refused as a whole.
        if version >= COMMANDS_SINCE.get(name, version)
    }
    plain |= {
        CommandAccess(name, "") for name in CONNECTING if version >= HEADERS_SINCE or not name.startswith("acl|dryrun")
    }
    needs = frozenset(plain).union(*(needs_of_script(name, version) for name in SCRIPTS[role]))
    return _on_cluster(needs) if cluster else needs


def _on_cluster(needs: AccessSet) -> AccessSet:
    # Its connections ask for the slots; the keys of a single node are each partition's.
    of_each = (need._replace(key=f"{{*}}:{need.key}") if need.key in OF_NODE else need for need in needs)
    return frozenset(of_each) | {CommandAccess(name, "") for name in CONNECTING_TO_CLUSTER}


def acl_rules(
    roles: Iterable[RedisRole],
    *,
    prefix: str,
    version: tuple[int, int, int] = HEADERS_SINCE,
    cluster: bool = False,
) -> tuple[str, ...]:
    """Return a user's rules, without password, in stable order."""
    needs = frozenset[CommandAccess]().union(*(needs_of(role, version, cluster=cluster) for role in roles))
    first = ("resetkeys", "resetchannels", "-@all")
    if version < HEADERS_SINCE:
        return (*first, f"~{pattern(prefix, ANY)}", *_allowed(needs))
    return (*first, *_reading(needs, prefix), *_selectors(needs, prefix))


def _reading(needs: AccessSet, prefix: str) -> tuple[str, ...]:
    reads = {need for need in needs if not need.writes}
    kinds = {need.key for need in reads if need.key}
    kinds = {ANY} if ANY in kinds else kinds
    return (*(f"%R~{pattern(prefix, kind)}" for kind in sorted(kinds)), *_allowed(reads))


def _selectors(needs: AccessSet, prefix: str) -> tuple[str, ...]:
    by_kind: dict[str, frozenset[str]] = {}
    for need in needs:
        if need.writes and need.command not in (*CALLERS, *SEVERAL_KEYS):
            by_kind[need.key] = by_kind.get(need.key, frozenset()) | {need.command}
    callers = {need.command for need in needs if need.command in CALLERS}
    found = [_selector(callers, [ANY], prefix)] if callers else []
    for command in sorted({need.command for need in needs} & SEVERAL_KEYS):
        kinds = sorted({need.key for need in needs if need.command == command})
        found.append(_selector([command], [ANY] if ANY in kinds else kinds, prefix))
    for commands in sorted(set(by_kind.values()), key=sorted):
        kinds = sorted(kind for kind, those in by_kind.items() if those == commands)
        found.append(_selector(commands, kinds, prefix))
    return tuple(found)


def _selector(commands: Iterable[str], kinds: Iterable[str], prefix: str) -> str:
    patterns = " ".join(f"~{pattern(prefix, kind)}" for kind in kinds)
    return f"({' '.join(f'+{name}' for name in sorted(commands))} {patterns})"


def _allowed(needs: Iterable[CommandAccess]) -> tuple[str, ...]:
    return tuple(f"+{name}" for name in sorted({need.command for need in needs}))


def acl_file_line(
    user: str,
    roles: Iterable[RedisRole],
    *,
    prefix: str,
    password: str | None,
    version: tuple[int, int, int],
    cluster: bool = False,
) -> str:
    """Return a line of an ACL file. Raises InvalidInput for a bad name."""
    if not re.fullmatch(r"[\w.:@-]{1,64}", user):
        raise InvalidInput(f"{user!r} is no name of a Redis user here: use letters, digits and _ . : @ -")
    rules = acl_rules(roles, prefix=prefix, version=version, cluster=cluster)
    return " ".join(("user", user, "on", password_rule(password), *rules))


def setuser_command(acl_line: str) -> str:
    """Return redis-cli's command for a line; it resets the user."""
    _, name, *rules = _rules(acl_line)
    return " ".join(("ACL", "SETUSER", name, "reset", *(f'"{rule}"' if " " in rule else rule for rule in rules)))


def _rules(acl_line: str) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", acl_line)


def password_rule(password: str | None) -> str:
    """Return a hash, or a placeholder."""
    if password is None:
        return "#SHA256_OF_THE_PASSWORD"
    return f"#{sha256(password.encode()).hexdigest()}"


def probes(needs: AccessSet, prefix: str) -> dict[CommandAccess, tuple[str, ...]]:
    """Return harmless calls for ACL DRYRUN."""
    return {need: tuple(example(need.command, _key(prefix, need.key))) for need in sorted(needs)}


def _key(prefix: str, kind: str) -> str:
    return pattern(prefix, kind).replace("{*}", "{0}").replace("g*", "g0").replace("*", "{0}:log") if kind else ""
