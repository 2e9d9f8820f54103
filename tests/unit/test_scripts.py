"""Every script says what it takes, and takes what it says."""

from __future__ import annotations

import re

import pytest

from mqlayer.redis.scripts import script_digests, script_text
from mqlayer.resources import lua_names, lua_source

SETTLING = {
    "lock_acquire", "lock_release", "lock_fence", "offsets_settle", "attempt_count", "attempt_start", "log_trim",
    "partition_retire", "partition_seal", "partition_open", "mark_skip", "dedup_load", "group_forget",
    "pop_receive", "pop_settle", "rate_acquire", "shared_acquire", "shared_settle", "shared_due", "shared_nack",
    "shared_attempt", "shared_extend", "shared_reclaim", "source_end", "source_term", "log_recount", "marks_drop",
    "position_drop", "shared_defer", "shared_deferred",
}  # fmt: skip
READING = {
    "group_position", "key_find", "log_bound", "log_chain", "log_select", "log_search", "log_ends", "marks_read",
    "partition_read",
}  # fmt: skip
KEY_SECOND = {"MEMORY", "TIME", "XGROUP", "XINFO"}
FLAGS = dict.fromkeys(SETTLING, " flags=allow-oom") | dict.fromkeys(READING, " flags=no-writes")


def section(source: str, title: str) -> dict[int, str]:
    """Return number -> name of a header's section; a line `...` stands for the rest and has no name."""
    header = source.split("--[[", 1)[1].split("]]", 1)[0]
    match = re.search(rf"^{title}\n((?:  .*\n)*)", header, re.MULTILINE)
    if match is None:
        return {}
    return {int(n): name for n, name in re.findall(r"^  (\d+) (\S+)", match[1], re.MULTILINE) if name != "..."}


def bindings(source: str, array: str) -> dict[int, str]:
    """Return number -> local of the entries that are bound at the top of a body."""
    body = source.split("]]", 1)[1]
    found = re.findall(rf"^local (\w+) = (?:tonumber\()?{array}\[(\d+)\]", body, re.MULTILINE)
    return {int(number): name for name, number in found}


@pytest.mark.parametrize("name", lua_names())
def test_each_key_and_argument_is_bound_once_to_its_name(name: str) -> None:
    source = lua_source(name)
    for title, array in (("KEYS", "KEYS"), ("ARGV", "ARGV")):
        assert bindings(source, array) == section(source, title)


@pytest.mark.parametrize("name", lua_names())
def test_no_script_makes_a_key_or_runs_text(name: str) -> None:
    body = lua_source(name).split("]]", 1)[1]
    assert "loadstring" not in body
    assert "{" + "prefix" not in body
    commands = re.findall(r"call\('(\w+)', ([\w']+)", body)
    assert commands
    for command, first in commands:
        assert first.endswith("_key") or first == "KEYS" or command in KEY_SECOND, f"{command} {first}"


@pytest.mark.parametrize("name", lua_names())
def test_settling_goes_on_when_memory_is_out_and_publishing_does_not(name: str) -> None:
    header = lua_source(name).splitlines()[0]
    assert header == "#!lua" + FLAGS.get(name, "")


@pytest.mark.parametrize("name", lua_names())
def test_redis_6_gets_no_header_but_a_prelude_of_one_line(name: str) -> None:
    old, new = script_text(name, (6, 2, 14)), script_text(name, (7, 0, 0))
    assert old.splitlines()[0].startswith("redis.replicate_commands()")
    assert ("PERSIST" in old.splitlines()[0]) == (name in SETTLING)
    assert old.splitlines()[1:] == new.splitlines()[1:]


def test_a_version_has_a_digest_for_every_script() -> None:
    assert set(script_digests((6, 2, 0))) == set(script_digests((8, 0, 0))) == set(lua_names())
    assert script_digests((6, 2, 0)) != script_digests((7, 0, 0))
