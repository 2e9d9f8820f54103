"""Who may look runs each command that only shows, and no other; who may operate runs those that change, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqlayer.membership import join
from mqlayer.postgres.rights import Right
from tests.fixtures.command_tree import leaf_commands
from tests.fixtures.commands import Commands
from tests.fixtures.consuming import Stage
from tests.fixtures.failing import Failing, identity_of
from tests.fixtures.roles import Roles

LEFT_OUT = {"consume", "relay", "run", "up", "analytics"}
"""They run until they are stopped, start servers of their own, or need Java."""
SHOWS = {
    "archive gaps", "archive status", "dead list", "dead redrives", "grants", "group lag", "group list",
    "group members", "group show", "inbox stats", "key explain", "node list", "outbox aside list",
    "outbox delayed list", "parked list", "parked stats", "replay list", "route history", "route show", "route watch",
    "snapshot list", "topic list", "verify", "versions gaps", "versions held",
}  # fmt: skip
CHANGES = {
    "archive accept-gap", "group create", "group evict", "group pause", "group resume", "group retire", "key pause",
    "key resume", "key skip-head", "node rearm", "node register", "node set", "outbox adopt", "outbox aside discard",
    "outbox delayed cancel", "outbox renew", "outbox rotate", "route reopen", "snapshot drop", "topic create",
    "topic pause", "topic resume", "versions forget", "versions set",
}  # fmt: skip
NOTHING_TO_DO = {
    "archive retain", "dead cancel", "dead discard", "dead redrive", "dead results", "dead show", "doctor", "down",
    "grant", "group seek", "group set", "inbox show", "migrate", "node acl", "node lost", "outbox aside retry",
    "outbox recover", "parked discard", "parked release", "parked show", "replay cancel", "replay results",
    "replay resume", "replay show", "replay start", "revoke", "route drop", "route merge", "route move",
    "route repair", "route split", "snapshot create", "snapshot export", "snapshot show", "status", "topic set", "trim",
}  # fmt: skip
"""With these arguments they end before they meet a right to change something, or that is another test's."""


@pytest.fixture
def values(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logging_as_before: None) -> dict[str, str]:
    """A system with something of every kind; return arguments for commands by their names."""
    failing = Failing(stage)
    join(stage.database, group_id=failing.group_id, member_id="m1", lease_s=600)
    stage.send([("a", b"{}"), ("b", b"{}")])
    records = failing.records()
    failing.park(records[0], cause="exhausted", attempts=3)
    (dead_id,) = failing.bury(records[1], reason="r", actor="a")
    monkeypatch.delenv("MQLAYER_APP_DSN", raising=False)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    monkeypatch.chdir(tmp_path)
    return {
        "topic": stage.topic, "name": stage.topic, "group": "g", "key": "a", "dead_id": str(dead_id),
        "message": str(identity_of(records[0])), "reason": "r", "entity": "e", "url": stage.url,
    }  # fmt: skip


def path_of(words: list[str]) -> str:
    """Return a command's words without its arguments."""
    known = SHOWS | CHANGES | NOTHING_TO_DO
    return next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in known), " ".join(words))


def test_every_command_is_tried_as_who_may_look_and_as_who_may_operate(
    stage: Stage, values: dict[str, str], roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = leaf_commands(without=LEFT_OUT, value_of=values.get)
    assert {path_of(words) for words in tried} == SHOWS | CHANGES | NOTHING_TO_DO
    for right in (Right.LOOK, Right.OPERATE):
        monkeypatch.setenv("MQLAYER_DSN", roles.login(right))
        for words in tried:
            name, result = path_of(words), Commands()(*words)
            denied = "permission denied" in result.stderr or "lacks the right" in result.stderr
            case = (right, words, result.output)
            assert "Traceback" not in result.output, case
            assert result.exception is None or isinstance(result.exception, SystemExit), case
            assert denied == (right is Right.LOOK and name in CHANGES), case
            if denied:
                (line,) = result.stderr.splitlines()
                assert (result.exit_code, "mqlayer grant" in line) == (1, True), case
            if name in SHOWS:
                assert result.exit_code == 0, case
