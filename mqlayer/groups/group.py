"""Groups: creation, settings and their checks.

A group is *creating* until one transaction has stored its start positions, then *live*. After a crash in between, the
next `ensure_group` continues.
"""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, Final, Literal, TypedDict, Unpack

from psycopg.types.json import Jsonb

from mqlayer.domain.deployments import Deployments
from mqlayer.domain.key_classes import NO_CLASSES, check_key_class
from mqlayer.domain.names import check_group, check_name
from mqlayer.domain.protocol import POP_KEY_CLASSES
from mqlayer.domain.rates import RateLimit, check_rate
from mqlayer.domain.retry_rules import (
    BREAKER_RULES,
    CLASS_RULES,
    PARKING_LIMITS,
    POLICIES,
    RULES_COUNT,
    Policy,
    RetryRules,
    check_error_name,
    error_name,
)
from mqlayer.domain.tags import NO_FILTER, TagFilter
from mqlayer.errors import Conflict, GroupRetired, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.groups.start_positions import (
    Start,
    StartFinder,
    StartPosition,
    behind_archive,
    still_hold,
    undeleted_partitions,
)
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.protocol import read_protocols
from mqlayer.postgres.queries import query
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

Balance = Literal["count", "rate"]
Mode = Literal["exclusive", "pop", "shared", "broadcast"]
Scope = Literal["partition", "key"]
"""Ordered pop: the unit withheld while a message is out."""
CALLED: Final[Mapping[str, str]] = {
    "exclusive": "mqlayer.App, or `mqlayer consume`",
    "pop": "mqlayer.Receiver",
    "shared": "mode='shared' of @app.consumer",
    "broadcast": "mqlayer.App and mode='broadcast'",
}
SET_OPTIONS: Final = {
    "backoff_s": "--backoff",
    "jitter": "--jitter",
    "attempt_limit": "--attempts",
    "policy": "--policy",
    "non_retryable_errors": "--non-retryable",
    "retryable_errors": "--retryable",
    "time_limit_s": "--time-limit",
    "max_time_limit_s": "--max-time-limit",
    "parked_keys_limit": "--parked-keys",
    "parked_messages_limit": "--parked-messages",
    "parked_bytes_limit": "--parked-bytes",
    "key_messages_limit": "--key-messages",
    "key_bytes_limit": "--key-bytes",
    "breaker_share": "--breaker",
    "breaker_keys": "--breaker-keys",
    "breaker_window_s": "--breaker-window",
    "breaker_errors": "--breaker-errors",
    "key_class": "--key-class",
    "class_concurrency": "--class-concurrency",
    "class_rate": "--class-rate",
    "balance": "--balance",
    "tag_filter": "--tag-filter",
    "instance_expiry_s": "--instance-expiry",
    "rate_limit": "--rate",
    "rate_burst": "--burst",
}
"""The options of `mqlayer group set`, by setting."""
FIXED_SETTINGS: Final = ("ordered", "scope", "visibility_timeout_s")
MOST: Final = 2_000_000_000
"""What a count in a group's settings is at most, below the end of its type."""
VISIBILITY_TIMEOUT_S: Final = 30.0
MOST_BREAKER_KEYS: Final = 4096
INSTANCE_EXPIRY_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """A group's settings; None: not set. Meanings, defaults: the page 'Group settings'.

    `math.inf` means no time limit or rate. `start` needs a time zone; with `from_archive` it can't be `latest`.
    """

    start: Start | None = None
    backoff_s: tuple[float, ...] | None = None
    ordered: bool | None = None
    balance: Balance | None = None
    tag_filter: str | None = None
    jitter: float | None = None
    attempt_limit: int | None = None
    policy: Policy | None = None
    non_retryable_errors: tuple[str, ...] | None = None
    retryable_errors: tuple[str, ...] | None = None
    time_limit_s: float | None = None
    max_time_limit_s: float | None = None
    parked_keys_limit: int | None = None
    parked_messages_limit: int | None = None
    parked_bytes_limit: int | None = None
    key_messages_limit: int | None = None
    key_bytes_limit: int | None = None
    mode: Mode | None = None
    scope: Scope | None = None
    visibility_timeout_s: float | None = None
    from_archive: bool = False
    instance_expiry_s: float | None = None
    rate_limit: float | None = None
    rate_burst: float | None = None
    breaker_share: float | None = None
    breaker_keys: int | None = None
    breaker_window_s: float | None = None
    breaker_errors: tuple[str, ...] | None = None
    key_class: str | None = None
    class_concurrency: float | None = None
    class_rate: float | None = None

    def rules(self) -> RetryRules:
        """Return the retry rules of a group created with these."""
        said: dict[str, Any] = {}
        for name in RULES:
            value = getattr(self, name)
            if value is not None:
                said[name] = None if value == math.inf else value
        if self.mode == "pop":
            said.setdefault("policy", "block")
        if self.mode == "shared":
            said.setdefault("policy", "dead_letter")
        return RetryRules(**said)


class RetrySettings(TypedDict, total=False):
    """RetryRules as programs write them. None: not set; `math.inf`: no time limit; errors: classes or names."""

    backoff_s: Sequence[float] | None
    jitter: float | None
    attempt_limit: int | None
    policy: Policy | None
    non_retryable_errors: Sequence[str | type[BaseException]] | None
    retryable_errors: Sequence[str | type[BaseException]] | None
    time_limit_s: float | None
    max_time_limit_s: float | None
    parked_keys_limit: int | None
    parked_messages_limit: int | None
    parked_bytes_limit: int | None
    key_messages_limit: int | None
    key_bytes_limit: int | None
    breaker_share: float | None
    breaker_keys: int | None
    breaker_window_s: float | None
    breaker_errors: Sequence[str | type[BaseException]] | None
    key_class: str | None
    class_concurrency: float | None
    class_rate: float | None


class GroupChanges(RetrySettings, total=False):
    """The changeable settings of a group, as programs write them. None: not set."""

    balance: Balance | None
    tag_filter: str | None
    instance_expiry_s: float | None
    rate_limit: float | None
    rate_burst: float | None


RULES: Final = tuple(field.name for field in fields(RetryRules))


@dataclass(frozen=True, slots=True)
class Group:
    """A group as the server has it."""

    group_id: int
    topic_id: int
    topic: str
    name: str
    state: str
    start: Start
    strategy: str
    version: int
    seek: int
    ordered: bool
    balance: Balance
    settings_version: int
    paused_at: datetime | None
    rules: RetryRules
    mode: Mode = "exclusive"
    scope: Scope | None = None
    tag_filter: str = NO_FILTER
    from_archive: bool = False
    visibility_timeout_s: float | None = None
    instance: str | None = None
    instance_expiry_s: float | None = None
    rate_limit: float | None = None
    rate_burst: float | None = None
    copied_from: int | None = None
    deployments: Deployments = field(default_factory=Deployments)

    @property
    def rate(self) -> RateLimit | None:
        """Limit of messages begun per second."""
        return RateLimit.of(self.rate_limit, self.rate_burst)


def find_group(database: Database, topic: str, name: str) -> Group:
    """Return a group, or an instance `group@instance`. Raises InvalidName, NotFound."""
    check_group(name)
    with database.connection() as connection:
        return read_group(connection, topic, name)


def read_group(connection: Connection, topic: str, name: str) -> Group:
    """Return a group as `find_group`, in a transaction."""
    row = connection.execute(query("group_find"), {"topic": topic, "name": name}).fetchone()
    if row is None:
        raise NotFound("group", f"{topic}/{name}", "it is created when its first member starts")
    deployments = Deployments(*row[-5 - RULES_COUNT : -RULES_COUNT])
    group_id, topic_id, state, start, start_at, *rest = row[: -15 - RULES_COUNT]
    later = row[-15 - RULES_COUNT : -5 - RULES_COUNT]
    values: list[Any] = [*rest, RetryRules.of(row[-RULES_COUNT:]), *later, deployments]
    return Group(group_id, topic_id, topic, name, state, start_at or start, *values)


def ensure_group(runtime: Runtime, routes: RouteCache, *, topic: str, name: str, settings: GroupSettings) -> Group:
    """Return the group, created with these settings if missing. Safe to call concurrently.

    A start other than earliest asks the topic's nodes. Raises InvalidInput, NotFound for an unknown topic,
    GroupRetired, Conflict for settings other than the server's or `from_archive` on a topic without archive,
    StoreUnavailable.
    """
    check_name("topic", topic)
    check_name("group", name)
    check_start(settings.start)
    check_settings(settings)
    routes.route(topic)
    at = settings.start if isinstance(settings.start, datetime) else None
    start = "time" if at is not None else settings.start or "earliest"
    facts = {
        "topic": topic,
        "name": name,
        "start": start,
        "start_at": at,
        "from_archive": settings.from_archive,
        "ordered": settings.ordered is not False and settings.mode != "shared",
        "balance": settings.balance or "count",
        "tag_filter": settings.tag_filter or NO_FILTER,
        "rate_limit": no_end(settings.rate_limit),
        "rate_burst": no_end(settings.rate_burst),
        "mode": settings.mode or "exclusive",
        "scope": settings.scope or ("key" if settings.mode == "pop" else None),
        "visibility_timeout_s": settings.visibility_timeout_s
        or (VISIBILITY_TIMEOUT_S if settings.mode == "shared" else None),
        "instance_expiry_s": (settings.instance_expiry_s or INSTANCE_EXPIRY_S)
        if settings.mode == "broadcast"
        else None,
        "deployment": runtime.settings.deployment,
        **as_columns(asdict(settings.rules())),
    }

    def create(connection: Connection) -> None:
        refuse_before_finalization(connection, settings)
        if connection.execute(query("group_insert"), facts).rowcount:
            refuse_ineffective(settings, read_group(connection, topic, name))

    runtime.control.transaction(create)
    group = find_group(runtime.control, topic, name)
    if group.state == "retired":
        raise GroupRetired(topic, name)
    refuse_others(group, settings)
    bring_to_life(runtime, routes, group)
    return find_group(runtime.control, topic, name)


def bring_to_life(runtime: Runtime, routes: RouteCache, group: Group) -> None:
    """Store a *creating* group's start positions, which makes it live."""
    if group.state != "creating":
        return
    failpoint("group.after_insert")
    if group.mode == "broadcast":
        # Only instances have positions.
        runtime.control.transaction(
            lambda connection: connection.execute(query("group_live"), {"group_id": group.group_id})
        )
        return
    store = begin_from_archive if group.from_archive else _store_starts
    while not store(runtime, routes, group):
        log.info("group_restarted", extra={"topic": group.topic, "group": group.name})


def settings_of(
    start: Start | None = None,
    *,
    ordered: bool | None = None,
    from_archive: bool = False,
    mode: Mode | None = None,
    **changes: Unpack[GroupChanges],
) -> GroupSettings:
    """Return checked settings. Raises InvalidInput."""
    said: dict[str, Any] = {**changes}
    _check_names(said)
    if said.get("backoff_s") is not None:
        said["backoff_s"] = tuple(map(float, said["backoff_s"]))
    for name in ("non_retryable_errors", "retryable_errors", "breaker_errors"):
        if said.get(name) is not None:
            if isinstance(said[name], str):
                raise InvalidInput(f"{name} is a list of exceptions or their names, not the text {said[name]!r}")
            # Sorted, so that the order in a program makes no conflict.
            names = {error if isinstance(error, str) else error_name(error) for error in said[name]}
            said[name] = tuple(sorted(names))
    if said.get("tag_filter") is not None:
        # The server's form: tags sorted, without duplicates.
        said["tag_filter"] = str(TagFilter.of(said["tag_filter"]) or NO_FILTER)
    settings = GroupSettings(start=start, ordered=ordered, from_archive=from_archive, mode=mode, **said)
    check_start(start)
    check_settings(settings)
    return settings


def _check_names(said: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(GroupSettings)]
    for name in said:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, "batch", "body", "instance", "options"], n=1)
            hint = f"did you mean {near[0]}?" if near else "see the page 'Group settings'"
            raise InvalidInput(f"no setting of a group is called {name}: {hint}")


def check_settings(settings: GroupSettings) -> None:
    """Raise InvalidInput for impossible settings."""
    waits = settings.backoff_s
    if waits is not None and not (waits and all(0 <= wait < math.inf for wait in waits)):
        raise InvalidInput("the backoff table needs at least one wait, each of 0 seconds or more")
    if settings.balance not in (None, "count", "rate"):
        raise InvalidInput(f"a group is balanced by count or by rate, not {settings.balance!r}")
    if settings.jitter is not None and not 0 <= settings.jitter <= 1:
        raise InvalidInput(f"the jitter is the part of a wait that may be left out: from 0 to 1, not {settings.jitter}")
    attempts = settings.attempt_limit
    if attempts is not None and not (1 <= attempts <= MOST and attempts == int(attempts)):
        raise InvalidInput(f"the attempts of a message are a whole number from 1 to {MOST}, not {attempts}")
    if settings.policy not in (None, *POLICIES):
        raise InvalidInput(f"the policy is one of {', '.join(POLICIES)}, not {settings.policy!r}")
    _check_parking_limits(settings)
    for names in (settings.non_retryable_errors, settings.retryable_errors, settings.breaker_errors):
        for name in names or ():
            check_error_name(name)
    _check_breaker(settings)
    check_key_class(settings.key_class)
    _check_class_limits(settings)
    for limit_s in (settings.time_limit_s, settings.max_time_limit_s):
        if limit_s is not None and not limit_s > 0:
            raise InvalidInput(f"a limit of time is over 0 seconds, not {limit_s}: leave it out, or inf for none")
    check_times(settings.time_limit_s, settings.max_time_limit_s)
    check_rate(settings.rate_limit, settings.rate_burst)
    _check_mode(settings)


def _check_parking_limits(settings: GroupSettings) -> None:
    for name in PARKING_LIMITS:
        limit = getattr(settings, name)
        most = MOST if name == "parked_keys_limit" else 2**53 - 1
        if limit is not None and not (1 <= limit <= most and limit == int(limit)):
            raise InvalidInput(f"{name} is a whole number from 1 to {most}, not {limit}")


def _check_breaker(settings: GroupSettings) -> None:
    share, keys, window_s = settings.breaker_share, settings.breaker_keys, settings.breaker_window_s
    if share is not None and share != math.inf and not 0 < share <= 1:
        raise InvalidInput(f"the breaker's share of failing keys is over 0 to 1, not {share}: 0.5, or inf for none")
    if keys is not None and not (1 <= keys <= MOST_BREAKER_KEYS and keys == int(keys)):
        raise InvalidInput(f"breaker_keys is a whole number from 1 to {MOST_BREAKER_KEYS}, not {keys}")
    if window_s is not None and not 1 <= window_s <= 3600:
        raise InvalidInput(f"breaker_window_s is from 1 to 3600 seconds, not {window_s}")


def _check_class_limits(settings: GroupSettings) -> None:
    count = settings.class_concurrency
    if count is not None and count != math.inf and not (1 <= count <= MOST and count == int(count)):
        raise InvalidInput(f"class_concurrency is a whole number from 1 to {MOST}, or inf for none, not {count}")
    check_rate(settings.class_rate, None)


def _check_mode(settings: GroupSettings) -> None:
    if settings.mode not in (None, *CALLED):
        raise InvalidInput(f"a group is consumed in one of the modes {', '.join(CALLED)}, not {settings.mode!r}")
    _check_broadcast(settings)
    if settings.scope not in (None, "partition", "key"):
        raise InvalidInput(f"the scope of ordered pop is partition or key, not {settings.scope!r}")
    if settings.mode != "pop" and settings.scope is not None:
        raise InvalidInput("only a group with ordered pop has a scope: say mode='pop'")
    if settings.mode == "pop" and (settings.ordered is False or settings.balance is not None):
        raise InvalidInput("ordered pop is ordered, and has no members to balance: leave ordered and balance out")
    if settings.mode == "pop":
        if settings.scope == "partition":
            _refuse_key_class(settings, "scope partition withholds all messages together")
        _refuse_retrying(settings)
    _check_shared(settings)
    if settings.from_archive and (settings.mode == "pop" or settings.start == "latest"):
        raise InvalidInput("from the archive a group with members starts, at earliest or a time: say another start")


def _check_shared(settings: GroupSettings) -> None:
    visibility_timeout_s = settings.visibility_timeout_s
    if settings.mode != "shared":
        if visibility_timeout_s is not None:
            raise InvalidInput("only a shared group has a visibility timeout: say mode='shared'")
        return
    if visibility_timeout_s is not None and not 0.1 <= visibility_timeout_s <= 43_200:
        raise InvalidInput(f"the visibility timeout is {visibility_timeout_s:g} s: say 0.1 to 43,200 seconds")
    if settings.ordered or settings.balance is not None:
        raise InvalidInput("a shared group has no order, and nothing to balance: leave ordered and balance out")
    if settings.policy not in (None, "dead_letter", "skip"):
        raise InvalidInput(
            f"policy {settings.policy} keeps a message and what follows it: a shared group has no order to keep, say "
            "dead_letter or skip"
        )
    if settings.from_archive:
        raise InvalidInput("a shared group begins with the streams: leave from_archive out")
    _refuse_parking_limits(settings, "a shared group")


def _refuse_key_class(settings: GroupSettings, why: str) -> None:
    said = [name for name in CLASS_RULES if getattr(settings, name) not in (None, NO_CLASSES, math.inf)]
    if said:
        raise InvalidInput(f"{why}, in no turns of key classes: leave {', '.join(said)} out")


def _refuse_retrying(settings: GroupSettings) -> None:
    kept = ("policy", "attempt_limit", *CLASS_RULES, *PARKING_LIMITS)
    said = [name for name in RULES if name not in kept and getattr(settings, name) is not None]
    if said:
        raise InvalidInput(
            f"ordered pop has no handler that fails: leave {', '.join(said)} out, and decide in the receiver "
            "(nack with a delay, ack); attempt_limit and policy are the group's"
        )


def refuse_before_finalization(connection: Connection, settings: GroupSettings) -> None:
    """Raise Conflict for settings that older code, which may live, does not keep."""
    if settings.mode != "pop" or settings.key_class in (None, NO_CLASSES):
        return
    if read_protocols(connection, POP_KEY_CLASSES.schema).served.in_force < POP_KEY_CLASSES.since:
        raise Conflict(
            "receivers of the former release know no key classes, and may live", "run `mqlayer upgrade finalize` first"
        )


def refuse_ineffective(settings: GroupSettings, group: Group) -> None:
    """Raise InvalidInput for a given setting without effect."""
    rules = group.rules
    if group.mode == "pop" and rules.policy == "block" and settings.attempt_limit is not None:
        raise InvalidInput(
            "with the policy block a message is given out until it is acknowledged: leave attempt_limit out, or say a "
            "policy too"
        )
    if settings.rate_burst not in (None, math.inf) and group.rate_limit is None:
        raise InvalidInput("a burst is of a rate, and the group has none: say rate_limit too, or leave rate_burst out")
    of_breaker = [name for name in BREAKER_RULES[1:] if getattr(settings, name) is not None]
    if of_breaker and rules.breaker_share is None:
        raise InvalidInput(
            f"the group has no circuit breaker: say breaker_share too, or leave {', '.join(of_breaker)} out"
        )
    of_classes = [name for name in CLASS_RULES[1:] if getattr(settings, name) not in (None, math.inf)]
    if of_classes and rules.key_class == NO_CLASSES:
        raise InvalidInput(f"the group has no key classes: say key_class too, or leave {', '.join(of_classes)} out")
    if rules.attempt_limit == 1 and settings.jitter:
        raise InvalidInput("a message has one attempt, so no wait is left to chance: leave jitter out")
    if rules.attempt_limit == 1 and rules.policy in ("dead_letter", "skip") and settings.backoff_s is not None:
        raise InvalidInput(
            f"a message has one attempt, then the policy is {rules.policy}: leave backoff_s out, or raise attempt_limit"
        )
    of_keys = [name for name in ("key_messages_limit", "key_bytes_limit") if getattr(settings, name) is not None]
    if of_keys and not (group.ordered and group.strategy == "strict"):
        raise InvalidInput(f"without order each message is parked by itself: leave {', '.join(of_keys)} out")


def _refuse_parking_limits(settings: GroupSettings, kind: str) -> None:
    said = [name for name in PARKING_LIMITS if getattr(settings, name) is not None]
    if said:
        raise InvalidInput(f"{kind} parks no keys: leave {', '.join(said)} out")


def _check_broadcast(settings: GroupSettings) -> None:
    if settings.instance_expiry_s is not None and not 0 < settings.instance_expiry_s < math.inf:
        raise InvalidInput(f"a position is kept for some seconds, not {settings.instance_expiry_s}: say a time over 0")
    if settings.mode not in (None, "broadcast") and settings.instance_expiry_s is not None:
        raise InvalidInput("only a broadcast group has instances to keep positions of: say mode='broadcast'")
    if settings.mode == "broadcast" and settings.balance is not None:
        raise InvalidInput("an instance of a broadcast group has all partitions: leave balance out")
    if settings.mode == "broadcast" and settings.from_archive:
        raise InvalidInput("an instance of a broadcast group begins with the streams: leave from_archive out")


def refuse_broadcast(group: Group) -> None:
    """Raise InvalidInput for a broadcast group, which has no positions."""
    if group.mode == "broadcast":
        raise InvalidInput(
            f"group {group.name!r} of topic {group.topic!r} is broadcast, its instances have positions: name one as "
            f"{group.name}@INSTANCE; those there are: mqlayer group list {group.topic}"
        )


def check_times(limit_s: float | None, cap_s: float | None) -> None:
    """Raise InvalidInput for a time limit above its cap."""
    if limit_s is not None and cap_s is not None and cap_s < limit_s < math.inf:
        raise InvalidInput(f"the time limit of {limit_s:g} s is over max_time_limit_s, {cap_s:g} s: raise that too")


def no_end(value: float | None) -> float | None:
    """Return a limit as stored: infinity becomes None."""
    return None if value == math.inf else value


def as_columns(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings as query parameters."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def refuse_others(group: Group, settings: GroupSettings) -> None:
    """Raise Conflict if a given setting differs from the server's."""
    if settings.mode not in (None, group.mode):
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} is consumed in mode {group.mode}, not {settings.mode}",
            f"consume it with {CALLED[group.mode]}, or use another group: the mode is said once",
        )
    _refuse_order(group, settings)
    _refuse_start(group, settings)
    stored: dict[str, Any] = {}
    for name in (*FIXED_SETTINGS, *SET_OPTIONS):
        brought, there = getattr(settings, name), getattr(group.rules if name in RULES else group, name)
        if there is None:
            there = math.inf
        if brought is not None and brought != there:
            stored[name] = there
    if stored:
        raise Conflict(*_differences(group, stored, {name: getattr(settings, name) for name in stored}))


def _differences(group: Group, stored: Mapping[str, Any], brought: Mapping[str, Any]) -> tuple[str, str]:
    shown = ", ".join(f"{name} = {value}" for name, value in brought.items())
    one = len(stored) == 1
    what = (
        f"group {group.name!r} of topic {group.topic!r} has "
        f"{', '.join(f'{name} = {value}' for name, value in stored.items())} (settings version "
        f"{group.settings_version}), this member brings {shown.partition(' = ')[2] if one else shown}"
    )
    fixed = [name for name in stored if name in FIXED_SETTINGS]
    ways = [f"{', '.join(fixed)} can't be changed"] if fixed else []
    if changes := [f"{SET_OPTIONS[name]} {_option_text(name, brought[name])}" for name in stored if name not in fixed]:
        named = f"{group.topic} {group.name.partition('@')[0]}"
        ways.append(f"change {'it' if one else 'them'} for all: mqlayer group set {named} {' '.join(changes)}")
    return what, f"leave {'it' if one else 'them'} out of the program, or {'; '.join(reversed(ways))}"


def _option_text(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        nothing = "all" if name == "retryable_errors" else "none"
        return ",".join(_option_text(name, one) for one in value) or nothing
    if isinstance(value, float):
        return "none" if value == math.inf else str(int(value) if value == int(value) else value)
    return shlex.quote(str(value))


def _refuse_order(group: Group, settings: GroupSettings) -> None:
    if settings.ordered and group.strategy == "best_effort":
        raise Conflict(
            f"topic {group.topic!r} is best_effort: group {group.name!r} can't have ordered = True",
            "leave ordered out, or publish to a topic of the strategy strict",
        )


def _refuse_start(group: Group, settings: GroupSettings) -> None:
    if settings.from_archive and not group.from_archive:
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} was created without from_archive",
            "leave from_archive out of the program; to give it what the archive holds: mqlayer replay start "
            f"{group.topic} {group.name} --all",
        )
    if group.state != "creating" and settings.start not in (None, group.start):
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} was created with start = {group.start}, this member brings "
            f"{settings.start}",
            f"leave it out of the program; to move the group: mqlayer group seek {group.topic} {group.name}",
        )


def check_start(start: Start | None) -> None:
    """Raise InvalidInput for an invalid start."""
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidInput(f"the start {start.isoformat()} has no time zone: add one")
    elif start not in (None, "earliest", "latest"):
        raise InvalidInput(f"a group starts at earliest, latest or a time, not {start!r}")


def _store_starts(runtime: Runtime, routes: RouteCache, group: Group) -> bool:
    """Return False, with nothing stored, if a node was armed meanwhile."""
    with runtime.control.connection() as connection:
        kept = undeleted_partitions(connection, group.topic_id)
    beginnings = StartFinder(runtime, routes, kept).of(group.start)
    failpoint("group.before_starts")
    with runtime.control.connection() as connection, connection.transaction():
        if connection.execute(query("group_creating"), {"group_id": group.group_id}).fetchone() is None:
            return True
        if not still_hold(connection, kept, beginnings):
            return False
        put_beginnings(connection, group.group_id, beginnings)
        raise_group_version(connection, group.group_id)
        failpoint("group.before_live")
        connection.execute(query("group_live"), {"group_id": group.group_id})
    return True


def begin_from_archive(runtime: Runtime, routes: RouteCache, group: Group) -> bool:
    """Store a new group's backfill and its positions in the streams.

    The topic's archive stays locked, so nothing more becomes trimmable before the group exists. Returns False, with
    nothing stored, if nodes or partitions changed meanwhile.
    """
    with runtime.control.connection() as connection:
        kept = undeleted_partitions(connection, group.topic_id)
    found = StartFinder(runtime, routes, kept).of(group.start)

    def work(connection: Connection) -> bool:
        facts = {"group_id": group.group_id, "topic_id": group.topic_id}
        if connection.execute(query("group_creating"), facts).fetchone() is None:
            return True
        locked = connection.execute(query("backfill_topic_hold"), facts).fetchone()
        if locked is None:
            raise Conflict(
                f"topic {group.topic!r} is not archived", "let its archive be switched on, or start without it"
            )
        if undeleted_partitions(connection, group.topic_id) != kept:
            return False
        rows = connection.execute(query("backfill_progress"), facts).fetchall()
        beginnings, bounds = behind_archive(kept, found, {partition: (upto, done) for partition, upto, done in rows})
        if not still_hold(connection, kept, beginnings):
            return False
        put_beginnings(connection, group.group_id, beginnings)
        raise_group_version(connection, group.group_id)
        if locked[0]:
            _put_backfill(connection, group, int(locked[0]), bounds)
        failpoint("group.before_backfill_commit")
        connection.execute(query("group_live"), facts)
        return True

    return runtime.control.transaction(work)


def _put_backfill(connection: Connection, group: Group, upto_batch: int, bounds: Mapping[str, int]) -> None:
    described = {"since": group.start.isoformat()} if isinstance(group.start, datetime) else {}
    facts = {"group_id": group.group_id, "filter": Jsonb(described), "per_s": 0.0, "actor": "group", "worker": None,
             "lease_s": 0.0, "kind": "backfill", "upto_batch": upto_batch, "snapshot_id": None, "bounds": Jsonb(bounds),
             "newer": "wait", "name": None}  # fmt: skip
    ((redrive_id,),) = connection.execute(query("replay_insert"), facts).fetchall()
    write_audit(
        connection,
        "group",
        "group backfill",
        f"{group.topic}/{group.name}",
        {"replay": redrive_id, "filter": described},
    )


def put_beginnings(connection: Connection, group_id: int, beginnings: Iterable[StartPosition]) -> None:
    """Store start positions, in the caller's transaction."""
    for beginning in beginnings:
        facts = {"group_id": group_id, "partition_id": beginning.partition, "start_offset": beginning.offset}
        connection.execute(query("group_start_insert"), facts)
        if beginning.drained:
            connection.execute(query("drained_from_start"), facts)


def raise_group_version(connection: Connection, group_id: int) -> int:
    """Raise a group's route version as far as it has drained; return it. Call in a transaction."""
    row = connection.execute(query("group_version"), {"group_id": group_id}).fetchone()
    version = int(row[0]) if row else 0
    while True:
        raised = connection.execute(query("group_version_raise"), {"group_id": group_id, "version": version}).fetchone()
        if raised is None:
            return version
        version = int(raised[0])
