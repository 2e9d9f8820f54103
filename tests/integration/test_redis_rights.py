"""A Redis user of a role may do what the role's processes do and nothing else: each script, each command, each key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import redis

from mqlayer.redis.acl import (
    COMMANDS_SINCE,
    CONNECTING_TO_CLUSTER,
    OF_GROUP,
    OF_NODE,
    OF_PARTITION,
    CommandAccess,
    acl_file_line,
    needs_of,
    needs_of_script,
    setuser_command,
)
from mqlayer.redis.acl_check import RequiredAccess, access_of
from mqlayer.redis.command_specs import COMMANDS, KEYLESS, example
from mqlayer.redis.roles import GRANTED, SCRIPTS, RedisRole
from mqlayer.redis.scripts import script_text
from mqlayer.resources import lua_names, lua_source
from mqlayer.stack import RedisServer
from tests.fixtures.servers import StartRedis, redis_7_program

PASSWORD = "p@ss"
PREFIX = "shop"
KINDS = (*OF_NODE, *OF_PARTITION, *OF_GROUP)


def key_of(kind: str, prefix: str = PREFIX) -> str:
    if kind in OF_NODE:
        return f"{prefix}:{kind}"
    return f"{prefix}:{{7}}:{'g3:' if kind in OF_GROUP else ''}{kind}"


def version_of(server: RedisServer) -> tuple[int, int, int]:
    major, minor, patch = [*server.program.version, 0, 0][:3]
    return (major, minor, patch) if server.program.flavour == "redis" else (7, 2, 4)


@pytest.fixture
def guarded(every_redis: RedisServer) -> Iterator[RedisServer]:
    """A server with a user for each role."""
    with redis.Redis.from_url(every_redis.url) as client:
        for role in GRANTED:
            make_user(client, role, version=version_of(every_redis))
        yield every_redis
        client.acl_deluser(*(f"u-{role}" for role in GRANTED))
        for key in client.scan_iter(f"{PREFIX}:*"):
            client.delete(key)


def make_user(
    client: redis.Redis, role: RedisRole, *, version: tuple[int, int, int] = (7, 0, 0), cluster: bool = False
) -> None:
    """Make the user of a role, as redis-cli does by the line that is printed, or give it other rules."""
    line = acl_file_line(f"u-{role}", [role], prefix=PREFIX, password=PASSWORD, version=version, cluster=cluster)
    assert client.execute_command(*_words(setuser_command(line)))  # type: ignore[no-untyped-call]


def _words(line: str) -> list[str]:
    """Return the words of a line as redis-cli takes them apart."""
    found, quoted = [], line.split('"')
    for place, part in enumerate(quoted):
        found += [part] if place % 2 else part.split()
    return found


def as_role(server: RedisServer, role: RedisRole) -> redis.Redis:
    return redis.Redis.from_url(server.url, username=f"u-{role}", password=PASSWORD, protocol=2, driver_info=None)


def denied(client: redis.Redis, *words: str) -> bool:
    """Say whether a command is refused for want of rights; any other answer, an error too, is none."""
    try:
        client.execute_command(*words)  # type: ignore[no-untyped-call]
    except redis.exceptions.NoPermissionError:
        return True
    except redis.ResponseError as error:
        return "The user executing the script can't" in str(error) or "ACL failure in script" in str(error)
    return False


@pytest.mark.parametrize("role", GRANTED)
def test_every_script_does_all_its_calls_for_the_roles_that_have_it_and_none_that_writes_for_others(
    guarded: RedisServer, role: RedisRole
) -> None:
    """Each call of each script is made by itself, on the key that it names: what one lacks, a script would meet too."""
    new = version_of(guarded) >= (7, 0, 0)
    own = {need.command for need in needs_of(role, version_of(guarded))}
    with as_role(guarded, role) as client:
        for name in lua_names():
            refusals = {
                need: _refused(client, need) for need in needs_of_script(name, version_of(guarded)) if need.key != "*"
            }
            if name in SCRIPTS[role]:
                assert not [need for need, refused in refusals.items() if refused], name
            elif new:
                writing = {
                    need
                    for need in refusals
                    if need.writes and not {need, CommandAccess(need.command, "*")} & needs_of(role)
                }
                assert all(refusals[need] for need in writing), (name, writing)
            else:
                assert all(refused == (need.command not in own) for need, refused in refusals.items()), name


def _refused(client: redis.Redis, need: CommandAccess) -> bool:
    return denied(client, *example(need.command, key_of(need.key) if need.key else ""))


@pytest.mark.parametrize("role", GRANTED)
def test_every_command_on_every_kind_of_key_is_allowed_exactly_as_the_table_says(
    guarded: RedisServer, role: RedisRole
) -> None:
    """From Redis 7 on; 6.2 knows one list of commands for all keys."""
    version = version_of(guarded)
    needs = needs_of(role, version)
    reads = {need.command for need in needs if not need.writes}
    wrong = []
    with as_role(guarded, role) as client:
        for command, kind in itertools.product(sorted(set(COMMANDS) - KEYLESS), KINDS):
            if command in ("eval", "evalsha") or version < (7, 0, 0):
                allowed = command in {need.command for need in needs}
            elif COMMANDS[command].writes:
                allowed = bool({CommandAccess(command, kind), CommandAccess(command, "*")} & needs)
            else:
                allowed = command in reads
            if _refused(client, CommandAccess(command, kind)) == allowed:
                wrong.append((command, kind, "allowed" if allowed else "refused"))
    assert wrong == []


@pytest.mark.parametrize("role", GRANTED)
def test_no_role_reaches_another_prefix_or_rules_the_server(guarded: RedisServer, role: RedisRole) -> None:
    with as_role(guarded, role) as client:
        for command in sorted(set(COMMANDS) - KEYLESS):
            assert denied(client, *example(command, key_of("meta", "other"))), command
        for words in (
            ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("CONFIG", "SET", "appendonly", "no"), ("ACL", "LIST"),
            ("ACL", "SETUSER", "x"), ("ACL", "GETUSER", "default"), ("SHUTDOWN",), ("REPLICAOF", "NO", "ONE"),
            ("MONITOR",), ("SCRIPT", "FLUSH"), ("SCRIPT", "KILL"), ("CLIENT", "KILL", "ID", "1"),
            ("CLIENT", "LIST"), ("SUBSCRIBE", "x"), ("PUBLISH", "x", "y"), ("MODULE", "LIST"), ("SAVE",),
            ("RENAME", key_of("meta"), key_of("log")), ("COPY", key_of("meta"), key_of("log")),
            ("RESTORE", key_of("meta"), "0", "x"), ("MIGRATE", "h", "1", key_of("meta"), "0", "1"),
            ("DUMP", key_of("meta")), ("OBJECT", "ENCODING", key_of("meta")), ("SWAPDB", "0", "1"),
        ):  # fmt: skip
            assert denied(client, *words), words


@pytest.mark.parametrize("role", GRANTED)
def test_a_script_of_a_callers_own_gets_no_further_than_its_user(guarded: RedisServer, role: RedisRole) -> None:
    """SCRIPT LOAD and EVALSHA run any text: the commands in it are judged one by one."""
    with as_role(guarded, role) as client:
        for command, text in {
            "flushall": "return redis.call('FLUSHALL')",
            "del": "return redis.call('UNLINK', KEYS[1], 'other:key')",
            "set": "return redis.call('SET', 'other:key', '1')",
        }.items():
            digest = client.script_load(text)
            assert denied(client, "EVALSHA", digest, "1", key_of("log")), command


def test_a_consumer_can_not_append_and_a_publisher_can_not_settle(start_redis: StartRedis) -> None:
    program = redis_7_program()
    server = start_redis(program=program)
    with redis.Redis.from_url(server.url) as admin:
        for role in (RedisRole.CONSUMER, RedisRole.PUBLISHER):
            make_user(admin, role)
        admin.hset(key_of("meta"), mapping={"state": "open", "lp_from": 0, "lp_to": 1024, "next": 1})
    with as_role(server, RedisRole.CONSUMER) as consumer:
        digest = consumer.script_load(lua_source("log_append"))
        words = ("EVALSHA", digest, "4", *(key_of(kind) for kind in ("log", "meta", "marks", "ended")))
        assert denied(consumer, *words, "1", "0", "1", "7", "1", "1", "m", "k", "b")
        assert denied(consumer, "XADD", key_of("log"), "1-0", "a", "b")
    with as_role(server, RedisRole.PUBLISHER) as publisher:
        assert denied(publisher, "HSET", key_of("lock"), "committed", "9")
        assert denied(publisher, "DEL", key_of("log"))
        assert denied(publisher, "XTRIM", key_of("log"), "MAXLEN", "0")
    with redis.Redis.from_url(server.url) as admin:
        assert admin.xlen(key_of("log")) == 0


@pytest.mark.parametrize("role", GRANTED)
def test_dryrun_finds_what_a_user_lacks_and_nothing_where_all_is_there(guarded: RedisServer, role: RedisRole) -> None:
    version = version_of(guarded)
    with as_role(guarded, role) as client:

        def ask(commands: object) -> list[object]:
            found: list[object] = []
            for words in commands:  # type: ignore[attr-defined]
                try:
                    reply = client.execute_command(*words)
                    found.append(reply)
                except redis.ResponseError as error:
                    found.append(error)
            return found

        rights = access_of(ask, RequiredAccess(role, PREFIX), version)
        if version < (7, 0, 0):
            assert rights.missing is None
            return
        assert rights.user == f"u-{role}"
        assert rights.missing == ()
        for other in GRANTED:
            found = access_of(ask, RequiredAccess(other, PREFIX), version)
            lacking = {need.command for need in found.missing or ()}
            wanted = {need.command for need in needs_of(other)} - {need.command for need in needs_of(role)}
            assert wanted <= lacking
            if lacking:
                assert f"mqlayer node acl {other}" in found.describe(RequiredAccess(other, PREFIX))
        elsewhere = access_of(ask, RequiredAccess(role, "other"), version)
        assert {need.command for need in elsewhere.missing or ()} == {
            need.command for need in needs_of(role) if need.key
        }


@pytest.mark.parametrize("role", GRANTED)
def test_the_rules_for_a_cluster_reach_the_keys_of_each_partition_in_place_of_the_node_s(
    guarded: RedisServer, role: RedisRole
) -> None:
    version = version_of(guarded)
    writes = [need for need in needs_of(role, version) if need.writes and need.key in OF_NODE]
    of_each = [need._replace(key=f"{{7}}:{need.key}") for need in writes]
    asks = [CommandAccess(command, "") for command in CONNECTING_TO_CLUSTER]

    def refused(needs: list[CommandAccess]) -> set[bool]:
        return {denied(client, *example(need.command, f"{PREFIX}:{need.key}")) for need in needs}

    with redis.Redis.from_url(guarded.url) as admin, as_role(guarded, role) as client:
        assert refused(asks) == {True}
        assert not writes or refused(of_each) == {version >= (7, 0, 0)}
        make_user(admin, role, version=version, cluster=True)
        assert refused([*asks, *of_each]) == {False}
        if version >= (7, 0, 0):
            assert not writes or refused(writes) == {True}


def test_the_texts_of_scripts_for_6_2_have_a_call_more(every_redis: RedisServer) -> None:
    assert "PERSIST" in script_text("log_trim", (6, 2, 0))
    assert CommandAccess("persist", "*") in needs_of_script("log_trim", (6, 2, 0))
    assert CommandAccess("persist", "*") not in needs_of_script("log_trim")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_are_known_as_servers_describe_them(every_redis: RedisServer, command: str) -> None:
    if "|" in command and version_of(every_redis) < (7, 0, 0):
        command = command.split("|", maxsplit=1)[0]
        with redis.Redis.from_url(every_redis.url) as client:
            assert client.execute_command("COMMAND", "INFO", command)
        return
    with redis.Redis.from_url(every_redis.url, protocol=2) as client:
        found = client.execute_command("COMMAND INFO", command)
        told: dict[str, str] = client.info("server")
    if tuple(map(int, told["redis_version"].split("."))) < COMMANDS_SINCE.get(command, (0,)):
        assert found in ([None], {command: None}, {})
        return
    described = next(iter(found.values())) if isinstance(found, dict) else found[0]
    arity, flags = (described["arity"], described["flags"]) if isinstance(described, dict) else described[1:3]
    assert abs(arity) == COMMANDS[command].min_words
    assert ("write" in {getattr(flag, "decode", lambda flag=flag: flag)() for flag in flags}) == COMMANDS[
        command
    ].writes
