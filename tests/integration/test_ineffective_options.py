"""What a program or a command asks for is done, or refused with what to do: nothing is accepted and ignored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest

import mqlayer
from mqlayer.consuming.engine.failure_actions import ParkKey, failure_action
from mqlayer.consuming.engine.options import MemberOptions
from mqlayer.domain.retry_rules import POLICIES, Policy, RetryRules
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.groups import GroupSettings, ensure_group, find_group
from mqlayer.groups.admin import set_group
from mqlayer.groups.group import CALLED, Group
from mqlayer.redis.addresses import parse_address
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.settings import OTHERS, Settings
from mqlayer.topics import create_topic, list_topics
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Stage
from tests.proof.runtimes import runtime_of

REQUESTS: dict[str, Any] = {
    "start": "latest", "backoff_s": (1.0,), "ordered": True, "balance": "rate", "tag_filter": str(mqlayer.any_of("eu")),
    "jitter": 0.5, "attempt_limit": 3, "policy": "skip", "non_retryable_errors": ("KeyError",),
    "retryable_errors": ("OSError",), "time_limit_s": 5.0, "max_time_limit_s": 9.0, "parked_keys_limit": 5,
    "parked_messages_limit": 5, "parked_bytes_limit": 5, "key_messages_limit": 5, "key_bytes_limit": 5,
    "mode": "exclusive", "scope": "partition", "visibility_timeout_s": 7.0, "from_archive": True,
    "instance_expiry_s": 60.0,
    "rate_limit": 5.0, "rate_burst": 7.0, "breaker_share": 0.5, "breaker_keys": 7, "breaker_window_s": 30.0,
    "breaker_errors": ("OSError",), "key_class": "prefix:/", "class_concurrency": 4, "class_rate": 5.0,
}  # fmt: skip
"""A value for every setting of a group that differs from its default."""


@pytest.fixture
def created(stage: Stage) -> Callable[[GroupSettings], Group]:
    """Create a group with settings, each time another one."""
    numbers = iter(range(1, 1_000))
    routes = RouteCache(stage.database)

    def create(settings: GroupSettings, name: str = "") -> Group:
        name = name or f"g{next(numbers)}"
        here = stage.runtime
        return ensure_group(here, routes, topic=stage.topic, name=name, settings=settings)

    return create


def partner_of(name: str) -> dict[str, Any]:
    """Return the setting without which one has no effect."""
    if name == "rate_burst":
        return {"rate_limit": 5.0}
    if name.startswith("class_"):
        return {"key_class": "prefix:/"}
    return {"breaker_share": 0.5} if name.startswith("breaker_") and name != "breaker_share" else {}


def in_force(group: Group, name: str) -> Any:
    return getattr(group if hasattr(group, name) else group.rules, name)


def test_every_setting_of_a_group_is_tried_here() -> None:
    assert set(REQUESTS) == set(GroupSettings.__dataclass_fields__)


@pytest.mark.parametrize("mode", CALLED)
def test_a_setting_is_in_force_in_its_mode_or_refused_with_what_to_do(mode: Any, created: Any, stage: Stage) -> None:
    """Each setting by itself, with its partner where it needs one, in each mode."""
    refused: dict[str, str] = {}
    for name, value in REQUESTS.items():
        wish = {"mode": mode, name: value} | partner_of(name)
        try:
            group = created(GroupSettings(**{**wish, "mode": mode}))
        except (InvalidInput, Conflict) as error:
            refused[name] = str(error)
        else:
            assert in_force(group, name) == (mode if name == "mode" else value), (mode, name)
    for name, said in refused.items():
        told = any(word in said for word in ("leave", "say", "only", "has no", "needs"))
        assert told or (name == "from_archive" and "is not archived" in said), (name, said)


IDLE: dict[str, GroupSettings] = {
    "rate_limit": GroupSettings(rate_burst=7.0),
    "leave backoff_s out": GroupSettings(attempt_limit=1, policy="dead_letter", backoff_s=(1.0,)),
    "or raise attempt_limit": GroupSettings(mode="shared", attempt_limit=1, policy="skip", backoff_s=(1.0,)),
    "leave breaker_keys out": GroupSettings(breaker_keys=5),
    "leave class_rate out": GroupSettings(class_rate=5.0),
    "leave jitter out": GroupSettings(attempt_limit=1, jitter=0.5),
    "leave key_messages_limit out": GroupSettings(ordered=False, key_messages_limit=5),
    "leave key_bytes_limit out": GroupSettings(mode="broadcast", ordered=False, key_bytes_limit=5),
    "leave time_limit_s out": GroupSettings(mode="pop", attempt_limit=3, policy="park", time_limit_s=1.0),
    "leave attempt_limit out, or say a policy too": GroupSettings(mode="pop", attempt_limit=3),
}  # fmt: skip
"""Settings that change nothing beside others, by what is said of them."""


@pytest.mark.parametrize("told", IDLE)
def test_a_setting_that_changes_nothing_beside_others_is_refused(told: str, created: Any, stage: Stage) -> None:
    """And leaves no group behind."""
    with pytest.raises(InvalidInput, match=told):
        created(IDLE[told], name="idle")
    with pytest.raises(NotFound):
        find_group(stage.database, stage.topic, "idle")


def test_a_setting_that_changes_nothing_in_a_living_group_is_refused(created: Any, stage: Stage) -> None:
    def change(name: str, **said: Any) -> None:
        set_group(runtime_of(stage.database, actor="test"), stage.topic, name, **said)

    created(GroupSettings(attempt_limit=1, policy="skip"), name="once")
    with pytest.raises(InvalidInput, match="raise attempt_limit"):
        change("once", backoff_s=(1.0,))
    change("once", backoff_s=(1.0,), attempt_limit=2)
    created(GroupSettings(ordered=False), name="loose")
    with pytest.raises(InvalidInput, match="leave key_bytes_limit out"):
        change("loose", key_bytes_limit=5)
    with pytest.raises(InvalidInput, match="rate_limit"):
        change("loose", rate_burst=5.0)
    change("loose", rate_limit=5.0)
    change("loose", rate_burst=7.0)
    created(GroupSettings(mode="pop"), name="popped")
    for name, value in {"attempt_limit": 3, "backoff_s": (1.0,), "jitter": 0.5, "time_limit_s": 3.0}.items():
        with pytest.raises(InvalidInput, match=f"leave {name} out"):
            change("popped", **{name: value})


def test_limits_of_parking_count_whatever_the_policy_is() -> None:
    """A key is parked by `key pause`, a redrive and a replay too, and by a handler that has it rest for long."""
    for policy in POLICIES:
        rules = RetryRules(policy=cast("Policy", policy))
        facts: dict[str, Any] = {"before": 0, "failing_s": 0.0, "share": 0.0, "parked": False, "text": ""}
        assert isinstance(failure_action(mqlayer.PauseKey(3_600), rules, **facts), ParkKey), policy


def test_a_group_that_began_with_the_streams_does_not_begin_with_the_archive(created: Any) -> None:
    group = created(GroupSettings())
    with pytest.raises(Conflict, match="mqlayer replay start"):
        created(GroupSettings(from_archive=True), name=group.name)


def test_a_producer_refuses_what_only_replicas_give_meaning(stage: Stage) -> None:
    for wrong in ({"require_replicas": True}, {"replica_timeout_s": 0.5}):
        with pytest.raises(InvalidInput, match="say how many replicas"):
            mqlayer.Producer(stage.settings(), options=mqlayer.ProducerOptions(**wrong))


def test_another_setting_for_a_group_that_is_there_is_refused(created: Any) -> None:
    group = created(GroupSettings())
    for name, value in REQUESTS.items():
        if name in ("mode", "from_archive", "ordered", "scope", "visibility_timeout_s"):
            # Said once, and equal here, or another mode's: see the tests beside.
            continue
        with pytest.raises((Conflict, InvalidInput)):
            created(GroupSettings(**{name: value}, **partner_of(name)), name=group.name)
    with pytest.raises(Conflict, match="mqlayer group seek"):
        created(GroupSettings(start=datetime(2026, 1, 1, tzinfo=UTC)), name=group.name)
    latest = created(GroupSettings(start="latest"))
    with pytest.raises(Conflict, match="mqlayer group seek"):
        created(GroupSettings(start="earliest"), name=latest.name)


def test_a_group_says_its_start_again_and_again(created: Any) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    for start in ("earliest", "latest", at):
        group = created(GroupSettings(start=start))
        assert created(GroupSettings(start=start), name=group.name).start == start
        assert created(GroupSettings(), name=group.name).start == start


def test_order_is_refused_where_the_topic_keeps_none(stage: Stage) -> None:
    create_topic(stage.runtime, "loose", partitions=1, strategy="best_effort")
    here, routes = stage.runtime, RouteCache(stage.database)
    with pytest.raises(Conflict, match="leave ordered out"):
        ensure_group(here, routes, topic="loose", name="g", settings=GroupSettings(ordered=True))
    assert ensure_group(here, routes, topic="loose", name="g", settings=GroupSettings()).strategy == "best_effort"


def test_options_of_a_member_that_its_mode_has_no_use_for_are_refused() -> None:
    app = mqlayer.App()
    with pytest.raises(InvalidInput, match="leave it out"):
        app.consumer("t", group="g", options=MemberOptions(extend_limit_s=5))
    with pytest.raises(InvalidInput, match="leave parked_keys out"):
        app.consumer("t", group="g", mode="shared", options=MemberOptions(parked_keys=5))
    with pytest.raises(InvalidInput, match="broadcast"):
        app.consumer("t", group="g", instance="web-1")
    assert "options" in inspect.signature(app.consumer).parameters


def test_a_topic_is_created_again_with_what_it_has_and_with_nothing_else(stage: Stage) -> None:
    here = stage.runtime
    create_topic(here, "three", partitions=3)
    create_topic(here, "three", partitions=3)
    create_topic(here, "three")
    other: dict[str, Any] = {
        "partitions": 6,
        "strategy": "best_effort",
        "body_limit": 99,
        "backlog_limit": 7,
        "archived": True,
        "home_zone": "east",
    }
    assert set(other) == set(inspect.signature(create_topic).parameters) - {"runtime", "name"}
    for name, value in other.items():
        with pytest.raises(Conflict):
            create_topic(here, "three", **{"partitions": 3, name: value})
    assert [topic.partitions for topic in list_topics(stage.database) if topic.name == "three"] == [3]


def test_the_command_refuses_another_number_of_partitions(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    typed = Commands()
    typed.text("topic", "create", "three", "--partitions", "3")
    assert "mqlayer route split three" in typed.failure("topic", "create", "three", "--partitions", "6")
    assert typed.text("topic", "create", "three").startswith("three has 3 partitions")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MQLAYER_LEASES", "MQLAYER_LEASE_S"),
        ("MQLAYER_HELTH_PORT", "MQLAYER_HEALTH_PORT"),
        ("MQLAYER_LOGLEVEL", "MQLAYER_LOG_LEVEL"),
        ("MQLAYER_ZZZ", "the page 'Settings'"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_name_that_was_meant(
    variable: str, meant: str, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    monkeypatch.setenv(variable, "7")
    with pytest.raises(InvalidInput, match=meant):
        Settings()
    assert variable in Commands().failure("topic", "list")


def test_variables_that_something_reads_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTHERS:
        monkeypatch.setenv(name, "")
    kubernetes = {
        "MQLAYER_RELAY_SERVICE_HOST": "10.0.0.1",
        "MQLAYER_RELAY_SERVICE_PORT": "80",
        "MQLAYER_RELAY_SERVICE_PORT_HTTP": "80",
        "MQLAYER_RELAY_PORT": "tcp://10.0.0.1:80",
        "MQLAYER_RELAY_PORT_80_TCP": "tcp://10.0.0.1:80",
        "MQLAYER_RELAY_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    for name, value in kubernetes.items():
        monkeypatch.setenv(name, value)
    assert Settings().lease_s == 10


def test_options_of_an_address_that_the_driver_does_not_know_are_refused() -> None:
    with pytest.raises(InvalidInput):
        parse_address("redis://h:1/0?socket_timeut=5")
