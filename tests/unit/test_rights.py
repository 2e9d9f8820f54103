"""What each role may do on a node is what its code sends, neither less nor more."""

from __future__ import annotations

import re

import pytest

from mqlayer.redis.acl import ANY, CommandAccess, acl_rules, needs_of, needs_of_script, password_rule
from mqlayer.redis.command_specs import COMMANDS, KEYLESS
from mqlayer.redis.roles import GRANTED, PLAIN_COMMANDS, SCRIPTS, RedisRole
from mqlayer.resources import lua_names, lua_source
from tests.proof.reach import PLACES, reached_by

WRITING_OF_CONSUMERS = {
    "lock",
    "acks",
    "attempts",
    "outcomes",
    "rate",
    "pops",
    "queues",
    "due",
    "batches",
    "wake",
    "ready",
    "class_out",
    "class_rates",
    "log",
}


# One worker reads the sources.
@pytest.mark.xdist_group("sources")
@pytest.mark.parametrize("role", sorted(PLACES))
def test_a_role_has_the_scripts_and_commands_that_its_code_sends(role: str) -> None:
    """Where this fails, `python -m tests.proof.reach` prints the tables of mqlayer/redis/roles.py anew."""
    found = reached_by(role)
    assert SCRIPTS[RedisRole(role)] == found.scripts
    assert PLAIN_COMMANDS[RedisRole(role)] == found.commands


def test_every_script_belongs_to_a_role() -> None:
    assert frozenset().union(*SCRIPTS.values()) == set(lua_names())


@pytest.mark.parametrize("name", lua_names())
def test_every_call_of_a_script_is_read(name: str) -> None:
    """A call whose command is a variable would be missing in the rules."""
    body = lua_source(name).split("]]", 1)[1]
    calls = re.findall(r"\bp?call\((.{0,60})", body)
    found = needs_of_script(name)
    assert calls
    for call in calls:
        command = re.match(r"'(\w+)'", call)
        assert command, call
        known = {need.command.split("|")[0] for need in found}
        assert command[1].lower() in known
    assert all(need.command in COMMANDS for need in found)
    assert all(bool(need.key) == (need.command not in KEYLESS) for need in found)


def test_a_publisher_changes_nothing_of_groups_and_a_consumer_nothing_that_publishing_writes() -> None:
    written = {role: {need.key for need in needs_of(role) if need.writes} - {ANY} for role in RedisRole}
    assert written[RedisRole.PUBLISHER] == {"log", "meta", "marks", "ids", "ages"}
    assert written[RedisRole.CONSUMER] == WRITING_OF_CONSUMERS
    assert CommandAccess("xadd", "log") not in needs_of(RedisRole.CONSUMER)
    assert written[RedisRole.VIEWER] == set()


@pytest.mark.parametrize("version", [(6, 2, 0), (7, 0, 0)])
@pytest.mark.parametrize("role", GRANTED)
def test_rules_allow_no_whole_category_no_other_prefix_and_no_management(
    role: RedisRole, version: tuple[int, int, int]
) -> None:
    rules = " ".join(acl_rules([role], prefix="shop", version=version))
    words = rules.replace("(", " ").replace(")", " ").split()
    assert words[:3] == ["resetkeys", "resetchannels", "-@all"]
    assert not [word for word in words if word.startswith("+@")]
    assert all(":" in word and "~shop:" in word for word in words if "~" in word)
    named = {word.removeprefix("+").split("|")[0] for word in words if word.startswith("+")}
    assert not named & {"flushall", "flushdb", "keys", "debug", "shutdown", "migrate", "restore", "replicaof", "module"}
    assert "+config" not in words
    assert "+acl" not in words


def test_rules_for_a_cluster_are_those_of_a_node_but_for_its_questions_and_the_keys_of_each_partition() -> None:
    asks = {"+cluster|info", "+cluster|slots"}
    for role in GRANTED:
        of_node, of_cluster = ({*acl_rules([role], prefix="mq", cluster=cluster)} for cluster in (False, True))
        assert of_cluster - of_node - asks == {
            rule.replace("~mq:ended", "~mq:{*}:ended").replace("~mq:terms", "~mq:{*}:terms")
            for rule in of_node - of_cluster
        }
        assert asks <= of_cluster
        told = any(rule.startswith("(+hset") and "~mq:{*}:terms" in rule for rule in of_cluster)
        assert told == (role in (RedisRole.RELAY, RedisRole.WORKER))


def test_a_call_with_several_keys_is_allowed_by_one_list() -> None:
    """A server asks each list of a user by itself whether it allows the whole call."""
    assert {CommandAccess("unlink", kind) for kind in ("acks", "queues", "batches")} <= needs_of_script("pop_receive")
    (rule,) = [rule for rule in acl_rules([RedisRole.CONSUMER], prefix="mq") if "+unlink" in rule]
    assert rule.startswith("(+unlink ~")
    assert all(f"~mq:{{*}}:g*:{kind}" in rule for kind in ("acks", "attempts", "pops", "queues", "due", "batches"))


def test_a_password_is_shown_as_its_hash_only() -> None:
    assert password_rule("secret") == "#2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
    assert "secret" not in password_rule("secret")
