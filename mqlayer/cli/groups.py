"""`group`: positions, settings, pauses, seek, retirement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime
from typing import Annotated, Any

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.completion import topic_names
from mqlayer.cli.curves import HoursOption, PointsOption, show_history
from mqlayer.cli.group_options import (
    AttemptsOption,
    BackoffOption,
    BalanceOption,
    BreakerErrorsOption,
    BreakerKeysOption,
    BreakerOption,
    BreakerWindowOption,
    BurstOption,
    ClassConcurrencyOption,
    ClassRateOption,
    IfVersionOption,
    InstanceExpiryOption,
    JitterOption,
    KeyBytesOption,
    KeyClassOption,
    KeyMessagesOption,
    MaxTimeLimitOption,
    NonRetryableOption,
    ParkedBytesOption,
    ParkedKeysOption,
    ParkedMessagesOption,
    PolicyOption,
    RateOption,
    RetryableOption,
    TagFilterOption,
    TimeLimitOption,
)
from mqlayer.cli.option_rules import RuledCommand, excludes, needs, planned
from mqlayer.cli.options import GroupArgument, PlanOption, TopicArgument, YesOption, echo_plan
from mqlayer.cli.output import JsonOption, echo, format_age, pluralize, show_facts, show_rows
from mqlayer.cli.panels import CHANGE, LOOK, REPAIR, START
from mqlayer.cli.pauses import PartitionOption, WaitOption, print_partitions, print_running
from mqlayer.cli.permissions import check_change, check_group_change
from mqlayer.cli.rows import (
    breaker_facts,
    describe_rules,
    describe_totals,
    failure_facts,
    group_row,
    group_text_row,
    lag_row,
    parked_facts,
    partition_facts,
    partition_row,
    replay_facts,
    settings_row,
    stall_row,
    version_facts,
    version_row,
)
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.domain.retry_rules import DEFAULT_BACKOFF_S, POLICIES, exponential
from mqlayer.domain.tags import NO_FILTER
from mqlayer.errors import InvalidInput
from mqlayer.groups import Group, GroupSettings, SeekPlan, Start, apply_seek, ensure_group, find_group, planned_seek
from mqlayer.groups.admin import evict_member, pause_group, resume_group, set_group
from mqlayer.groups.breaker_admin import reset_breaker, trip_breaker
from mqlayer.groups.copy import copy_group
from mqlayer.groups.deployments import DeployPlan, apply_deploy, planned_deploy, planned_return, wait_deployed
from mqlayer.groups.pauses import pause_partitions, resume_partitions, wait_paused
from mqlayer.groups.retirement import forget_retired, retire_group
from mqlayer.inspect import GroupStatus, group_members, group_statuses, members_wanted
from mqlayer.postgres.database import Database
from mqlayer.redelivery import failure_counts
from mqlayer.runtime.route_cache import RouteCache

groups = typer.Typer(no_args_is_help=True, help="Groups: settings, pauses, and where they stand.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(groups, name="group")


@groups.command("set", rich_help_panel=CHANGE)
def set_(
    topic: TopicArgument,
    group: GroupArgument,
    backoff: BackoffOption = None,
    jitter: JitterOption = None,
    attempts: AttemptsOption = None,
    policy: PolicyOption = None,
    non_retryable: NonRetryableOption = None,
    retryable: RetryableOption = None,
    time_limit: TimeLimitOption = None,
    max_time_limit: MaxTimeLimitOption = None,
    parked_keys: ParkedKeysOption = None,
    parked_messages: ParkedMessagesOption = None,
    parked_bytes: ParkedBytesOption = None,
    key_messages: KeyMessagesOption = None,
    key_bytes: KeyBytesOption = None,
    balance: BalanceOption = None,
    tag_filter: TagFilterOption = None,
    instance_expiry: InstanceExpiryOption = None,
    rate: RateOption = None,
    burst: BurstOption = None,
    breaker: BreakerOption = None,
    breaker_keys: BreakerKeysOption = None,
    breaker_window: BreakerWindowOption = None,
    breaker_errors: BreakerErrorsOption = None,
    key_class: KeyClassOption = None,
    class_concurrency: ClassConcurrencyOption = None,
    class_rate: ClassRateOption = None,
    if_version: IfVersionOption = None,
) -> None:
    """Change a group's settings, for all members at once."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        changed = set_group(
            runtime,
            topic,
            group,
            balance=balance,  # type: ignore[arg-type]  # checked there
            tag_filter=tag_filter,
            instance_expiry_s=instance_expiry,
            rate_limit=None if rate is None else _rate(rate),
            rate_burst=None if burst is None else _rate(burst),
            if_version=if_version,
            backoff_s=None if backoff is None else _backoff(backoff),
            jitter=jitter,
            attempt_limit=attempts,
            policy=policy,  # type: ignore[arg-type]  # checked there
            non_retryable_errors=None if non_retryable is None else _names(non_retryable, nothing="none"),
            retryable_errors=None if retryable is None else _names(retryable, nothing="all"),
            time_limit_s=None if time_limit is None else _limit(time_limit),
            max_time_limit_s=None if max_time_limit is None else _limit(max_time_limit),
            parked_keys_limit=parked_keys,
            parked_messages_limit=parked_messages,
            parked_bytes_limit=parked_bytes,
            key_messages_limit=key_messages,
            key_bytes_limit=key_bytes,
            breaker_share=None if breaker is None else _limit(breaker),
            breaker_keys=breaker_keys,
            breaker_window_s=breaker_window,
            breaker_errors=None if breaker_errors is None else _names(breaker_errors, nothing="all"),
            key_class=key_class,
            class_concurrency=None if class_concurrency is None else _rate(class_concurrency),
            class_rate=None if class_rate is None else _rate(class_rate),
        )
    echo(f"settings version {changed.settings_version}: {_settings_text(changed)}")


def _settings_text(group: Group) -> str:
    words = f"{describe_rules(group.rules)}, balance by {group.balance}"
    if group.instance_expiry_s is not None:
        words += f", positions kept for {group.instance_expiry_s:g} s"
    if group.tag_filter != NO_FILTER:
        words += f", only messages with {group.tag_filter.replace(':', ' of ')}"
    if group.rate is not None:
        words += f", {group.rate.per_s:g} messages/s, {group.rate.burst:g} at once"
    return words


@groups.command(rich_help_panel=CHANGE)
def pause(
    topic: TopicArgument, group: GroupArgument, partition: PartitionOption = None, wait: WaitOption = 0.0
) -> None:
    """Pause a group or partitions: running handlers finish, nothing new starts."""
    with runtime_here() as runtime:
        check_group_change(runtime.control, topic, group)
        if partition:
            changed = pause_partitions(runtime, topic, group, partition)
            print_partitions(partition, changed, "is paused", "is paused already")
        else:
            done = pause_group(runtime, topic, group)
            echo(f"group {group} of topic {topic} {'is paused' if done else 'is paused already'}")
        print_running(wait_paused(runtime.control, topic, group, partition or None, timeout_s=wait))


@groups.command(rich_help_panel=CHANGE)
def resume(topic: TopicArgument, group: GroupArgument, partition: PartitionOption = None) -> None:
    """Resume a paused group, or partitions."""
    with runtime_here() as runtime:
        check_group_change(runtime.control, topic, group)
        if partition:
            changed = resume_partitions(runtime, topic, group, partition)
            print_partitions(partition, changed, "goes on", "was not paused")
            return
        done = resume_group(runtime, topic, group)
    echo(f"group {group} of topic {topic} {'goes on' if done else 'was not paused'}")


@groups.command("open-breaker", rich_help_panel=REPAIR)
def open_breaker(topic: TopicArgument, group: GroupArgument) -> None:
    """Open a group's circuit breaker: probes begin soon, and close it when one succeeds."""
    with runtime_here() as runtime:
        check_group_change(runtime.control, topic, group)
        done = trip_breaker(runtime, topic, group)
    echo(f"the circuit breaker of group {group} of topic {topic} is {'open' if done else 'open already'}")


@groups.command("close-breaker", rich_help_panel=REPAIR)
def close_breaker(topic: TopicArgument, group: GroupArgument) -> None:
    """Close a group's circuit breaker now, without a probe."""
    with runtime_here() as runtime:
        check_group_change(runtime.control, topic, group)
        done = reset_breaker(runtime, topic, group)
    echo(f"the circuit breaker of group {group} of topic {topic} is {'closed' if done else 'closed already'}")


@groups.command(rich_help_panel=REPAIR)
def evict(
    topic: TopicArgument,
    group: GroupArgument,
    member: Annotated[str, typer.Argument(help="The member's id.")],
) -> None:
    """Remove a member: others get its partitions, its process stops."""
    with runtime_here() as runtime:
        check_group_change(runtime.control, topic, group)
        evict_member(runtime, topic, group, member)
    echo(f"member {member} of group {group} of topic {topic} is evicted")


@groups.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
@excludes("--to", "--back", why="--back takes the last switch back, --to names where to go")
@excludes("--percent", "--partitions", why="each says how much the deployment gets")
@needs("--percent", "--to", why="it is the named deployment's share")
@needs("--partitions", "--to", why="it is the named deployment's share")
@needs("--fallback", "--to", why="it says what follows if the named deployment's members end")
@needs("--wait", "--yes", why="a plan has no end to wait for")
def deploy(
    topic: TopicArgument,
    group: GroupArgument,
    to: Annotated[str | None, typer.Option(metavar="DEPLOYMENT", help="Whose members get partitions.")] = None,
    back: Annotated[bool, typer.Option("--back", help="Take the canary, or the last switch, back.")] = False,
    percent: Annotated[
        float | None, typer.Option(metavar="P", help="Only partitions that begin in the first P percent of the LPs.")
    ] = None,
    partitions: Annotated[int | None, typer.Option(metavar="N", help="Only the first N partitions.")] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Go back, once, if no member of the deployment lives.")
    ] = False,
    wait: Annotated[float, typer.Option(min=0.0, metavar="S", help="Wait for the hand-over, so many seconds.")] = 0.0,
    _plan: PlanOption = False,
    yes: YesOption = False,
) -> None:
    """Give partitions to the members of another deployment, in order, and take them back."""
    with runtime_here() as runtime:
        if yes:
            check_group_change(runtime.control, topic, group)
        if back:
            plan = planned_return(runtime, topic, group)
        elif to is None:
            raise InvalidInput("where to? say --to DEPLOYMENT, or --back")
        else:
            plan = planned_deploy(runtime, topic, group, to, percent=percent, partitions=partitions, fallback=fallback)
        for line in _deploy_lines(plan):
            echo(line)
        if not yes:
            echo("nothing was changed: --yes does this")
            return
        apply_deploy(runtime, plan)
        left = wait_deployed(runtime.control, plan.group, timeout_s=wait)
    echo(f"group {group} of topic {topic} is deployed")
    if left:
        echo(f"{pluralize(left, 'partition')} still to be handed over: --wait S waits for that", err=True)


@groups.command(rich_help_panel=START)
def copy(
    topic: TopicArgument,
    group: GroupArgument,
    new: Annotated[str, typer.Argument(help="The new group's name.")],
    effects: Annotated[
        bool,
        typer.Option("--effects", help="What the group's fence and inbox hold counts as applied in the new one too."),
    ] = False,
    attempts: Annotated[
        int | None, typer.Option(help="As in `group set`, for the new group; so are the next ones.")
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="|".join(POLICIES), help="The new group's policy.")] = None,
    tag_filter: Annotated[str | None, typer.Option(metavar="any:T,T|all:T,T|none", help="Its tag filter.")] = None,
    rate: Annotated[str | None, typer.Option(metavar="N", help="Its messages per second; or none.")] = None,
) -> None:
    """Create a group where another one stands, with its settings, attempts and parked keys."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        done = copy_group(
            runtime,
            topic,
            group,
            new,
            effects=effects,
            attempt_limit=attempts,
            policy=policy,  # type: ignore[arg-type]  # checked there
            tag_filter=tag_filter,
            rate_limit=None if rate is None else _rate(rate),
        )
    parked = f", {pluralize(done.parked_messages, 'parked message')} of {pluralize(done.parked_keys, 'key')}"
    with_it = "" if done.effects is None else f", {pluralize(done.effects, 'effect')}"
    counts = f"{pluralize(done.partitions, 'partition')}{parked}{with_it}"
    echo(f"group {new} of topic {topic} begins where {group} stands: {counts}")


@groups.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
def retire(
    topic: TopicArgument,
    group: GroupArgument,
    drop_parked: Annotated[bool, typer.Option("--drop-parked", help="Also drop parked messages.")] = False,
    _plan: PlanOption = False,
    yes: YesOption = False,
) -> None:
    """Retire a group for good: trimming no longer waits, its name stays taken."""
    with runtime_here() as runtime:
        if not yes:
            find_group(runtime.control, topic, group)
            with_it = ", and its parked messages dropped; unsettled ones" if drop_parked else "; unsettled messages"
            echo_plan(f"group {group} of topic {topic} would be retired{with_it} stay unhandled")
            return
        check_change(runtime.control)
        done = retire_group(runtime, topic, group, drop_parked=drop_parked)
        forget_retired(runtime)
    with_it = f", with {pluralize(done.instances, 'instance')}" if done.group.mode == "broadcast" else ""
    if done.parked:
        with_it += f"; {pluralize(done.parked, 'parked message')} dropped"
    echo(f"group {group} of topic {topic} is retired{with_it}")


@groups.command(rich_help_panel=START)
def create(
    topic: TopicArgument,
    group: GroupArgument,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE", help="earliest (default), latest, or a time with zone: 2026-11-21T09:30:00+00:00"
        ),
    ] = None,
    from_archive: Annotated[
        bool, typer.Option("--from-archive", help="Begin with what the archive holds, then go on with the streams.")
    ] = False,
) -> None:
    """Create a group as its first member would, unless it exists."""
    said = GroupSettings(start=None if start is None else _start(start), from_archive=from_archive)
    with runtime_here() as runtime, closing(RouteCache(runtime.control)) as routes:
        check_group_change(runtime.control, topic, group)
        ensure_group(runtime, routes, topic=topic, name=group, settings=said)
        (status,) = group_statuses(runtime, topic, group)
    given = "" if status.replay is None else f"; first it gets the archive: replay {status.replay.replay_id}"
    echo(f"group {group} of topic {topic} is {status.facts.state}{given}")


@groups.command("list", rich_help_panel=LOOK)
def list_(
    topic: Annotated[str | None, typer.Argument(help="Only of this topic.", autocompletion=topic_names)] = None,
    as_json: JsonOption = False,
) -> None:
    """List groups: state, version, members, undrained partitions, lag."""
    found = _statuses(topic)
    rows = map(group_row if as_json else group_text_row, found)
    show_rows(rows, as_json=as_json, nothing="no groups: a group is created by its first member", by=2)


@groups.command(rich_help_panel=LOOK)
def show(topic: TopicArgument, group: GroupArgument, as_json: JsonOption = False) -> None:
    """Show a group's settings and positions."""
    (found,) = _statuses(topic, group)
    here = settings_here()
    with Database(here.control_dsn()) as database:
        wanted = members_wanted(database, topic, group, lag_target_s=here.lag_target_s)
        living = Counter(one.code for one in group_members(database, topic, group) if one.state != "gone")
        (counts,) = failure_counts(database, topic, group)
    settings = settings_row(found) | {"members_wanted": wanted}
    settings |= {"members_by_version": dict(living)} if living else {}
    if as_json:
        partitions = [partition_facts(one) for one in found.partitions]
        failures = {"failures": failure_facts(counts)}
        row = settings | {"breaker": breaker_facts(found)} | failures | {"partitions": partitions}
        show_rows([row], as_json=True, nothing="")
        return
    shown = settings | {"version": f"{settings['version']} of {settings['topic_version']}"}
    shown["ever"] = describe_totals(counts)
    show_facts({name: value for name, value in shown.items() if name not in {"topic_version", "unreachable"}})
    echo()
    show_rows(map(partition_row, found.partitions), as_json=False, nothing="it has no partitions yet")
    _print_unreachable(found)


@groups.command(rich_help_panel=LOOK)
def members(topic: TopicArgument, group: GroupArgument, as_json: JsonOption = False) -> None:
    """List members and the remaining seconds of their leases."""
    with control_here() as database:
        found = group_members(database, topic, group)
    rows = (
        {
            "member": one.member_id,
            "state": one.state,
            "host": one.host,
            "pid": one.pid,
            "joined_at": one.joined_at,
            "lease_left_s": None if one.lease_left_s is None else round(one.lease_left_s, 1),
            "leaving": one.state == "leaving",
            "deployment": one.deployment,
            "partitions": one.partitions,
            "version": one.version,
            "protocol": one.protocol,
        }
        for one in found
    )
    nothing = f"group {group} of topic {topic} has no members: start a consumer, or a receiver where its mode is pop"
    show_rows(rows, as_json=as_json, nothing=nothing)


@groups.command(rich_help_panel=LOOK)
def lag(
    topic: TopicArgument,
    group: Annotated[str | None, typer.Argument(help="Only this group.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the lag per partition and route version, and stalls."""
    found = _statuses(topic, group)
    if group is not None and found[0].facts.mode == "broadcast":
        found = [one for one in _statuses(topic) if one.facts.name.startswith(f"{group}@")]
    # Only the instances of a broadcast group have lag.
    found = [one for one in found if one.facts.mode != "broadcast"]
    if as_json:
        show_rows(map(_lag_json, found), as_json=True, nothing="")
        return
    for status in found:
        _show_lag(status)
    if not found:
        echo(f"topic {topic} has no groups: a group is created by its first member")


@groups.command(rich_help_panel=LOOK)
def history(
    topic: TopicArgument, group: GroupArgument, hours: HoursOption = 24.0, points: PointsOption = 40,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show a group's lag, oldest age, parked and dead messages over time, by samples of each minute."""
    show_history("group", group, topic, hours, points, as_json=as_json)


def _statuses(topic: str | None, group: str | None = None) -> list[GroupStatus]:
    with runtime_here() as runtime:
        return group_statuses(runtime, topic, group)


def _lag_json(status: GroupStatus) -> dict[str, Any]:
    return {
        "topic": status.facts.topic,
        "group": status.facts.name,
        "state": status.facts.state,
        "lag": status.lag,
        "age_s": status.age_s,
        "versions": [version_facts(one) for one in status.versions()],
        "partitions": [partition_facts(one) for one in status.undrained],
        "unreachable": dict(status.unreachable),
        "parked": parked_facts(status),
        "replay": replay_facts(status),
    }


def _show_lag(status: GroupStatus) -> None:
    behind = [one for one in status.undrained if one.lag != 0]
    oldest = f", the oldest {format_age(status.age_s)} old" if status.age_s is not None else ""
    unasked = [str(one.facts.partition) for one in status.undrained if one.lag is None]
    more = f"; not asked: partition {', '.join(unasked)}" if unasked else ""
    count = ("at least " if unasked else "") + pluralize(status.lag, "message")
    echo(f"group {status.facts.name}: {count} not settled{oldest}{more}")
    if (parked := status.parked).keys:
        named = f"{status.facts.topic} {status.facts.name}"
        echo(
            f"parked: {pluralize(parked.messages, 'message')} of {pluralize(parked.keys, 'key')}, {parked.waiting} "
            f"of them "
            f"wait for an operator: mqlayer parked list {named}"
        )
    if (replay := status.replay) is not None:
        how_far = f"{pluralize(replay.sent, 'message')} given, {replay.waiting} of them wait"
        place = f"batch {replay.at_batch} of {replay.upto_batch} of the archive"
        echo(f"{replay.kind} {replay.replay_id}: {how_far}; {place}: mqlayer replay show {replay.replay_id}")
    settled = len(status.undrained) - len(behind)
    echo()
    show_rows(map(version_row, status.versions()), as_json=False, nothing="it has no partitions yet")
    if behind:
        echo()
        show_rows(map(lag_row, behind), as_json=False, nothing="")
    if settled:
        echo(f"nothing waits in {pluralize(settled, 'partition')}")
    if still := [one for one in behind if one.stall is not None]:
        echo()
        show_rows(map(stall_row, still), as_json=False, nothing="")
    _print_unreachable(status)


def _print_unreachable(status: GroupStatus) -> None:
    for name, reason in sorted(status.unreachable.items()):
        echo(f"node {name} does not answer: {reason}", err=True)


@groups.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
def seek(
    topic: TopicArgument,
    group: GroupArgument,
    to: Annotated[
        str, typer.Option(metavar="WHERE", help="earliest, latest, or a time with zone: 2026-11-21T09:30:00+00:00.")
    ],
    replay: Annotated[
        bool, typer.Option("--replay", help="Apply fenced effects again; else those that were applied are passed over.")
    ] = False,
    _plan: PlanOption = False,
    yes: YesOption = False,
) -> None:
    """Move a living group to another position, without a restart."""
    start = _start(to)
    with runtime_here() as runtime:
        if yes:
            check_group_change(runtime.control, topic, group)
        with closing(RouteCache(runtime.control)) as routes:
            planned = planned_seek(runtime, routes, topic=topic, name=group, to=start)
        for line in _plan_lines(planned, replay=replay):
            echo(line)
        if not yes:
            echo("nothing was changed: --yes does this")
            return
        missed = apply_seek(runtime, planned, replay=replay)
    echo(f"group {group} of topic {topic} goes on from there")
    for name in missed:
        echo(f"node {name} does not answer: it refuses earlier owners once it does", err=True)


def _backoff(text: str) -> tuple[float, ...]:
    if text == "default":
        return DEFAULT_BACKOFF_S
    kind, colon, rest = text.partition(":")
    if not colon:
        return _seconds(text)
    numbers = _seconds(rest)
    if kind != "exponential" or len(numbers) != 3:
        raise InvalidInput(f"{text!r} is no backoff: say exponential:FIRST,FACTOR,LIMIT, as in exponential:1,2,600")
    return exponential(*numbers)


def _seconds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{text!r} is no list of seconds: say for example 1,5,10") from None


def _limit(text: str) -> float:
    try:
        return math.inf if text == "none" else float(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no limit of time: say seconds, or none") from None


def _rate(text: str) -> float:
    try:
        return math.inf if text == "none" else float(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no number of messages: say for example 50, 0.1, or none") from None


def _names(text: str, *, nothing: str) -> tuple[str, ...]:
    return () if text == nothing else tuple(part.strip() for part in text.split(","))


def _start(text: str) -> Start:
    places: dict[str, Start] = {"earliest": "earliest", "latest": "latest"}
    try:
        return places.get(text) or datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no place to go: say earliest, latest, or a time with its zone") from None


def _deploy_lines(plan: DeployPlan) -> Iterable[str]:
    after = plan.after
    to = f"deployment {after.in_force}"
    if after.canary is not None:
        to = f"deployment {after.canary} below LP {after.canary_lps}, {after.in_force} above"
    there = ", ".join(f"{name} {count}" for name, count in sorted(plan.members.items())) or "none are known"
    yield f"group {plan.group.name} of topic {plan.group.topic}: {to}; living members: {there}"
    for one, next_one in plan.passing:
        owner = f" ({one.owner})" if one.owner is not None else ""
        yield f"  partition {one.partition}, LPs [{one.lp_from}, {one.lp_to}): from {one.wanted}{owner} to {next_one}"
    if not plan.passing:
        yield "  no partition passes"
    if plan.group.mode != "pop" and not plan.members[plan.to]:
        yield f"  refused while no member of deployment {plan.to} lives"


def _plan_lines(plan: SeekPlan, *, replay: bool) -> Iterable[str]:
    again = "fenced effects are applied again" if replay else "fenced effects that were applied are passed over"
    yield f"seek of group {plan.group.name} of topic {plan.group.topic}; {again}"
    for kept, beginning in zip(plan.partitions, plan.beginnings, strict=True):
        where = "after the last message" if beginning.drained else f"from offset {beginning.offset}"
        yield f"  partition {kept.partition}, LPs [{kept.lp_from}, {kept.lp_to}): {where}"
