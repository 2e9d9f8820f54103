"""No option is ignored beside another: each pair of a command's options has a verdict; those that clash are refused.

`OPTIONS` lists the options of every command. Two of them count beside each other unless a rule of the command (see
mqlayer.cli.option_rules) or `BY_VALUE` says otherwise. A new option fails the first test until it was gone through.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest

from mqlayer.cli.commands import COMMANDS as TOP
from mqlayer.cli.option_rules import Excludes, Needs, Rule, option_name, rules_of
from mqlayer.cli.panels import CHANGE, PANELS, REPAIR
from tests.fixtures.command_tree import commands, typed
from tests.fixtures.commands import Commands

OPTIONS: Final[dict[str, str]] = {
    "init": "KIND DIRECTORY",
    "up": "--directory --nodes --servers-only --json",
    "down": "--directory --erase",
    "status": "--directory --json",
    "consume": "APPLICATION --processes --concurrency --deployment --zone --reload",
    "asyncapi": "APPLICATION --output --title --app-version --nodes",
    "debug": "TOPIC KEY --handler --group --last --break-before --pdb --plan --yes",
    "migrate": "--sql --schema --owner",
    "upgrade status": "--json",
    "upgrade finalize": "--plan --yes --drain --timeout",
    "upgrade cancel": "",
    "grant": "RIGHT ROLE --topic --group --password-file --sql",
    "revoke": "RIGHT ROLE --topic --group --sql",
    "grants": "--json",
    "exporter": "--port --every --partitions --once",
    "console":
        "--host --port --url --prefix --viewer-role --operator-role --password-file --proxy-from --proxy-user-header "
        "--proxy-groups-header --oidc-issuer --oidc-client-id --oidc-secret-file --oidc-name-claim --oidc-groups-claim "
        "--oidc-scope --viewers --operators --body-readers --idle-minutes --session-hours",
    "console-password": "NAME --operator --bodies --password-stdin",
    "relay": "--once --processes",
    "trim": "TOPIC",
    **dict.fromkeys(
        ("analytics audit", "analytics latency", "analytics failures", "analytics fairness"),
        "--snapshot --topic --out --html --method --from-export --conf --json",
    ),
    **dict.fromkeys(
        ("analytics skew", "analytics all"),
        "--snapshot --topic --out --html --partitions --split-report --method --from-export --conf --json",
    ),
    "analytics shadow":
        "TOPIC --snapshot --handler --against --table --ignore --key --trust-names --allow-unfenced --json",
    "analytics journeys": "--snapshot --topic --out --html --console --method --from-export --conf --json",
    "analytics schedule create": "NAME --every --job --topic --keep --first --export-to",
    "analytics schedule list": "--json",
    "analytics schedule runs": "NAME --limit --after --json",
    "analytics schedule run": "NAME --if-due",
    "analytics schedule pause": "NAME",
    "analytics schedule resume": "NAME",
    "analytics schedule drop": "NAME --plan --yes",
    "analytics effects": "--snapshot --topic --application-dsn --out --html --method --from-export --conf --json",
    "analytics certify":
        "--snapshot --out --key --block --check --export --public-key --hashes-only --continues --spark --from-export "
        "--conf --json",
    "analytics what-if":
        "--snapshot --topic --partitions --split-report --version --group --members --member-rate --handler-ms "
        "--concurrency --balance --slot --since --until --auto --capacity --cool-down --changes-per-hour "
        "--max-partitions --min-partitions --out --html --method --from-export --conf --json",
    "doctor": "--all --json",
    "problems": "--ended --hours --json",
    "size":
        "--rate --body --stop-hours --handler-ms --concurrency --groups --process-consumers --process-rate "
        "--node-rate --node-gb --relays --workers --producers --keys-per-week --inbox --archive-days "
        "--parked-messages --failing-messages --json",
    "verify": "TOPIC --deep --json",
    "node register": "NAME URL --zone --replicas",
    "node list": "--json",
    "node history": "NAME --hours --points --json",
    "node rearm": "NAME --empty --accept-loss --former",
    "node acl": "ROLES --user --password-file --password-stdin --acl-file --redis --cluster --check",
    "node set": "NAME --url --zone --replicas --empty --accept-loss --former",
    "node drain": "NAME --plan --yes --timeout --stop",
    "node balance": "--plan --yes",
    "node remove": "NAME --plan --yes",
    "node lost": "NAME --plan --yes",
    "topic create":
        "NAME --partitions --strategy --body-limit --backlog-limit --archived "
        "--retain-age --retain-bytes --retain-messages --retain-unsettled --message-ttl "
        "--expired --home-zone --durability",
    "topic schema": "TOPIC --version --all --diff --store --json",
    "topic set":
        "NAME --archived --body-limit --backlog-limit --retention --drop-days --schema-mode "
        "--retain-age --retain-bytes --retain-messages --retain-unsettled --message-ttl "
        "--expired --home-zone --durability",
    "topic delete": "NAME --force --plan --yes --json",
    "topic pause": "NAME --wait",
    "topic resume": "NAME",
    "topic history": "NAME --hours --points --json",
    "topic list": "--json",
    "topic show": "NAME --json",
    "publish": "TOPIC --key --body --file --lines --header --tag --dedup-id --expires-after",
    "peek": "TOPIC --key --partition --offset --since --limit --json",
    "tail": "TOPIC --key --partition --offset --since --json",
    "message show":
        "MESSAGE --topic --key --at --within --header --trace-id --dedup-id --limit --raw --json",
    "message body": "MESSAGE --topic --to",
    "route split": "TOPIC PARTITION --at --from-report --to --measure --if-version --plan --yes --watch --timeout",
    "route merge": "TOPIC PARTITIONS --to --if-version --plan --yes --watch --timeout",
    "route move": "TOPIC PARTITION --to --unreachable --accept-loss --if-version --plan --yes --watch --timeout",
    "route show": "TOPIC --version --json",
    "route auto": "TOPIC --on --report --off --min-partitions --max-partitions --capacity --changes-per-hour "
    "--cool-down --rest --quiet",
    "route why": "TOPIC --last --json",
    "route history": "TOPIC --json",
    "route watch": "TOPIC --timeout",
    "route repair": "TOPIC --unreachable --accept-loss",
    "route reopen": "TOPIC --plan --yes",
    "route drop": "TOPIC",
    "group set":
        "TOPIC GROUP --backoff --jitter --attempts --policy --non-retryable --retryable --time-limit --max-time-limit "
        "--parked-keys --parked-messages --parked-bytes --key-messages --key-bytes --balance --tag-filter "
        "--instance-expiry "
        "--rate --burst --breaker --breaker-keys --breaker-window --breaker-errors --key-class "
        "--class-concurrency --class-rate --if-version",
    "group pause": "TOPIC GROUP --partition --wait",
    "group resume": "TOPIC GROUP --partition",
    "group evict": "TOPIC GROUP MEMBER",
    "group open-breaker": "TOPIC GROUP",
    "group close-breaker": "TOPIC GROUP",
    "group retire": "TOPIC GROUP --drop-parked --plan --yes",
    "group copy": "TOPIC GROUP NEW --effects --attempts --policy --tag-filter --rate",
    "group deploy":
        "TOPIC GROUP --to --back --percent --partitions --fallback --wait --plan --yes",
    "group create": "TOPIC GROUP --start --from-archive",
    "group list": "TOPIC --json",
    "group show": "TOPIC GROUP --json",
    "group members": "TOPIC GROUP --json",
    "group lag": "TOPIC GROUP --json",
    "group history": "TOPIC GROUP --hours --points --json",
    "group seek": "TOPIC GROUP --to --replay --plan --yes",
    "key explain": "TOPIC KEY --group --json",
    "key history": "TOPIC KEY --limit --after --json",
    "key skip-head": "TOPIC GROUP KEY --reason --message",
    "key pause": "TOPIC KEY --group",
    "key resume": "TOPIC KEY --group",
    "parked list": "TOPIC GROUP --key --cause --error --since --until --waiting --limit --after --json",
    "parked stats": "TOPIC GROUP --json",
    "parked show": "TOPIC GROUP KEY --message --limit --raw --json",
    "parked release": "TOPIC GROUP KEY --message --all --cause",
    "parked discard": "TOPIC GROUP --reason KEY --message --head",
    "dead list": "TOPIC GROUP --key --cause --error --since --until --redriven --limit --after --json",
    "dead show": "MESSAGE --topic --group --raw --json",
    "dead redrive":
        "TOPIC GROUP --message --key --cause --error --since --until --all --rate --reason --plan --yes --background "
        "--json",
    "bulk plan":
        "ACT TOPIC GROUP --message --key --cause --error --since --until --min-attempts --waiting --all --limit "
        "--first --json",
    "bulk start": "BULK_ID --reason --rate --background --json",
    "bulk resume": "BULK_ID --json",
    "bulk list": "TOPIC GROUP --state --limit --after --json",
    "bulk show": "BULK_ID --failed --limit --after --json",
    "bulk cancel": "BULK_ID",
    "dead discard": "MESSAGE --reason --topic --group",
    "replay start":
        "TOPIC GROUP --key --tag --since --until --snapshot --all --from-export --newer --rate --plan --yes "
        "--background --json",
    "replay resume": "REPLAY_ID --json",
    "replay list": "TOPIC GROUP --limit --after --json",
    "replay show": "REPLAY_ID --json",
    "replay results": "REPLAY_ID --limit --after --json",
    "replay cancel": "REPLAY_ID",
    "outbox rotate": "",
    "outbox recover": "--unproven --anew",
    "outbox adopt": "--plan --yes",
    "outbox renew": "--plan --yes",
    "outbox quarantine list": "--json",
    "outbox quarantine retry": "TOPIC LP",
    "outbox quarantine discard": "NUMBER --plan --yes",
    "outbox delayed list": "TOPIC --limit --json",
    "outbox delayed cancel": "DELAYED_ID",
    "inbox stats": "--json",
    "inbox show": "TOPIC GROUP MESSAGE --name --json",
    "versions gaps": "NAME --limit --json",
    "versions held": "NAME ENTITY --json",
    "versions set": "NAME ENTITY VERSION --reason --drop-held --plan --yes",
    "versions forget": "NAME ENTITY --reason --plan --yes",
    "archive run": "TOPIC --once",
    "archive status": "TOPIC --json",
    "archive gaps": "TOPIC --waiting --json",
    "archive accept-gap": "TOPIC --reason --partition",
    "archive export": "--to --topic --no-verify --json",
    "archive exports": "--json",
    "archive verify-export": "LOCATION --json",
    "archive forget-export": "LOCATION --plan --yes",
    "archive retain": "--older-than --plan --yes --json",
    "snapshot create": "NAME --topic --at",
    "snapshot list": "--json",
    "snapshot show": "NAME --verify --json",
    "snapshot export": "NAME --to --jobs",
    "snapshot drop": "NAME --plan --yes",
}  # fmt: skip
"""Arguments in capitals. Written again after going through the pairs of what is new."""

BY_VALUE: Final = {
    ("grant", "RIGHT", "--topic"), ("grant", "RIGHT", "--group"), ("revoke", "RIGHT", "--topic"),
    ("revoke", "RIGHT", "--group"), ("dead show", "MESSAGE", "--topic"), ("dead show", "MESSAGE", "--group"),
    ("dead discard", "MESSAGE", "--topic"), ("dead discard", "MESSAGE", "--group"),
    ("group create", "--start", "--from-archive"), ("route split", "--from-report", "--if-version"),
    ("analytics schedule create", "--job", "--export-to"),
}  # fmt: skip
"""Pairs that clash with some values only, which the command or the library refuses."""

SMALL: Final = {
    **dict.fromkeys(("dead discard", "key skip-head", "parked discard"), "wants a reason, and keeps the message"),
    "archive accept-gap": "wants a reason, and drops nothing",
    "archive export": "adds to files, and can be repeated",
    **dict.fromkeys(("bulk cancel", "replay cancel", "route drop"), "what was done stays, and it can be started again"),
    **dict.fromkeys(("node rearm", "node set", "outbox recover", "route repair"), "loses nothing without an option"),
    **dict.fromkeys(("outbox rotate", "trim"), "drops what nobody needs, as the worker does"),
    **dict.fromkeys(("grant", "revoke"), "undone by the other"),
    **dict.fromkeys(("group pause", "key pause", "topic pause"), "undone by resume"),
    **dict.fromkeys(("group resume", "key resume", "topic resume"), "undone by pause"),
    **dict.fromkeys(("group set", "route auto", "topic set"), "undone by setting it again"),
    **dict.fromkeys(("bulk resume", "bulk start"), "goes on with what was planned"),
    "bulk plan": "it is the plan; nothing is done before bulk start",
    "group open-breaker": "undone by close-breaker",
    "group close-breaker": "undone by open-breaker",
    "group evict": "one member, whose partitions go to others",
    "outbox delayed cancel": "one message, named by its number",
    "outbox quarantine retry": "what can't be sent stays as it was",
    "parked release": "sends what would be sent anyway",
    "replay resume": "goes on with what was planned",
    "snapshot create": "adds something; dropped by drop",
    "analytics schedule create": "adds something; dropped by drop",
    "analytics schedule run": "does what the worker does at the schedule's time",
    "analytics schedule pause": "undone by resume",
    "analytics schedule resume": "undone by pause",
    "upgrade cancel": "undone by upgrade finalize --drain",
    "topic schema": "adds a version; the topic's mode refuses what breaks readers",
}  # fmt: skip
"""Commands that change something at once, and why none of them needs a plan."""

COMMANDS: Final = {" ".join(words): command for words, command in commands()}
RULES: Final = [(name, rule) for name, command in COMMANDS.items() for rule in rules_of(command.callback)]


def options_of(name: str) -> list[str]:
    return [option_name(parameter) for parameter in COMMANDS[name].params]


def test_every_option_of_every_command_was_gone_through() -> None:
    """A new one: look at each pair with it, add rules where one of the two would be ignored, then its name above."""
    assert {name: " ".join(options_of(name)) for name in COMMANDS} == OPTIONS


def panel_of(name: str) -> str:
    return str(TOP[name].panel if " " not in name else COMMANDS[name].rich_help_panel)


def test_every_command_is_in_a_panel_of_the_help() -> None:
    assert {panel_of(name) for name in COMMANDS} == set(PANELS)


def test_what_changes_or_repairs_plans_first_or_is_small() -> None:
    """One rule: what is large or destroys has --plan, which is the default, and --yes; nothing else has either."""
    changing = {name for name in COMMANDS if panel_of(name) in {CHANGE, REPAIR}}
    planning = {name for name in COMMANDS if {"--plan", "--yes"} & set(options_of(name))}
    for name in planning:
        assert {"--plan", "--yes"} <= set(options_of(name)), name
        assert Excludes("--plan", "--yes", "--plan changes nothing, --yes does it") in rules_of(COMMANDS[name].callback)
        assert not {option_name(one): one.default for one in COMMANDS[name].params}["--yes"], name
    assert (planning & SMALL.keys(), planning - changing) == (set(), set())
    assert changing == planning | SMALL.keys()


def test_rules_and_exceptions_name_options_that_are_there() -> None:
    for name, rule in RULES:
        assert {rule.one, rule.other} <= set(options_of(name)), (name, rule)
    for name, one, other in BY_VALUE:
        assert {one, other} <= set(options_of(name)), (name, one, other)


@pytest.mark.parametrize(("name", "rule"), RULES, ids=[f"{name} {rule.one} {rule.other}" for name, rule in RULES])
def test_options_that_clash_are_refused_with_what_to_do(name: str, rule: Rule, logging_as_before: None) -> None:
    """Before any store is asked: none is named here."""
    wanted = {rule.one, rule.other} if isinstance(rule, Excludes) else {rule.one}
    if isinstance(rule, Excludes):
        while more := {more.other for more in rules_of(COMMANDS[name].callback) if needed_by(more, wanted)} - wanted:
            wanted |= more
    said = Commands().failure(*name.split(), *words_of(name, wanted))
    assert rule.why in said
    assert rule.one in said
    assert ("choose one" if isinstance(rule, Excludes) else "leave") in said


def needed_by(rule: Rule, said: set[str]) -> bool:
    return isinstance(rule, Needs) and rule.one in said


def words_of(name: str, wanted: set[str]) -> list[str]:
    """Return these options as they are typed, with all that the command asks for, and the arguments before them."""
    parameters: list[Any] = COMMANDS[name].params
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    last = max(
        (number for number, one in enumerate(arguments) if one.required or option_name(one) in wanted), default=-1
    )
    chosen = [one for one in parameters if one in arguments[: last + 1] or one.required or option_name(one) in wanted]
    return [word for one in chosen for word in typed(one)]


def test_no_pair_is_refused_by_a_rule_that_its_table_does_not_have() -> None:
    """All other pairs go together: no rule of the command speaks of both."""
    for name in COMMANDS:
        rules = rules_of(COMMANDS[name].callback)
        clashing = {frozenset((rule.one, rule.other)) for rule in rules if isinstance(rule, Excludes)}
        needed = {rule.one: rule.other for rule in rules if isinstance(rule, Needs)}
        for one, other in itertools.combinations(options_of(name), 2):
            said = frozenset((one, other, *(needed[option] for option in (one, other) if option in needed)))
            said |= {needed[option] for option in said if option in needed}
            if any(pair <= said for pair in clashing):
                continue
            for rule in rules:
                rule.check(said)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("grant", "consume", "r", "--topic", "orders"), "can't be limited to topics"),
        (("grant", "publish", "r", "--group", "orders/g"), "can't be limited to groups"),
        (("revoke", "view", "r", "--topic", "orders"), "can't be limited to topics"),
        (("revoke", "view", "r", "--group", "orders/g"), "can't be limited to groups"),
        (("dead", "show", "7", "--topic", "orders"), "leave --topic and --group out"),
        (("dead", "show", "7", "--group", "g"), "leave --topic and --group out"),
        (("dead", "discard", "7", "--topic", "orders", "--reason", "x"), "leave --topic and --group out"),
        (("dead", "discard", "7", "--group", "g", "--reason", "x"), "leave --topic and --group out"),
    ],
)
def test_an_option_that_a_value_has_no_use_for_is_refused(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", "postgresql://nobody@127.0.0.1:1/x")
    assert told in Commands().failure(*words)
