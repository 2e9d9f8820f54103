"""For each alert: who waits for what, and a command that helps."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from mqlayer.doctor.problem_history import Problem

EFFECTS: Final[Mapping[str, str]] = {
    "MqlayerSchemaMismatch": "Processes of the other version refuse to work, and nothing else was looked at.",
    "MqlayerCommitsWait": "No commit ends: publishers, effects, leases and relays' progress wait; nothing is lost.",
    "MqlayerOutboxSuspect": "No committed message reaches its consumers until the outbox is recovered.",
    "MqlayerJobsLate": "Nothing is trimmed, archived or repaired, dead members keep partitions longer, and curves end.",
    "MqlayerBreakerOpen": "Nothing of the group is handled but probes; no attempt counts, and its lag grows.",
    "MqlayerAutopilotStopped": "Hot partitions stay as they are; messages flow as before.",
    "MqlayerKeyHot": "Messages of this LP wait longer than those of others.",
    "MqlayerLagUnknown": "How many messages wait there is not known; totals count less than there is.",
    "MqlayerJobFailed": "Its work waits for the next run.",
    "MqlayerSamplesMissing": "Curves have a hole, and rates are unknown.",
    "MqlayerLeasesLost": "Others take over their partitions; messages in hand come again.",
    "MqlayerArchiveGap": "Nothing behind the gap is archived or trimmed, so nodes fill up.",
    "MqlayerExportLate": "Retention keeps the days that it lacks, where it waits for exports.",
    "MqlayerScheduleFaults": "The snapshot's records are not as they must be, or handlers' effects differ.",
    "MqlayerScheduleFailed": "Its snapshot is not looked at until the next run.",
    "MqlayerScheduleLate": "No snapshot is made and looked at meanwhile.",
    "MqlayerArchiveLate": "Nothing of the topic is trimmed, so nodes fill up.",
    "MqlayerProducerReplaced": "Each open source costs memory on nodes; no message waits.",
    "MqlayerAppendsRefused": "Publishers and relays of its partitions wait; stored messages are delivered.",
}
"""Where no figure says more."""

COMMANDS: Final[Mapping[str, str]] = {
    "MqlayerNodeAway": "mqlayer node rearm {node}",
    "MqlayerSchemaMismatch": "mqlayer migrate",
    "MqlayerOutboxSuspect": "mqlayer relay",
    "MqlayerNoRelay": "mqlayer relay",
    "MqlayerNoMembers": "mqlayer group members {topic} {group}",
    "MqlayerBreakerOpen": "mqlayer group show {topic} {group}",
    "MqlayerParkingFull": "mqlayer parked stats {topic} {group}",
    "MqlayerRouteChangeStuck": "mqlayer route repair {topic}",
    "MqlayerPartitionsStuck": "mqlayer group lag {topic} {group}",
    "MqlayerAutopilotStopped": "mqlayer route why {topic}",
    "MqlayerKeyHot": "mqlayer route why {topic}",
    "MqlayerPartitionHot": "mqlayer route split {topic} {partition} --plan",
    "MqlayerLagGrows": "mqlayer group lag {topic} {group}",
    "MqlayerLagUnknown": "mqlayer group lag {topic} {group}",
    "MqlayerFailureRate": "mqlayer parked list {topic} {group}",
    "MqlayerKeysWaitForOperator": "mqlayer parked list {topic} {group} --waiting",
    "MqlayerParkedKeysOverdue": "mqlayer group members {topic} {group}",
    "MqlayerDeadMessages": "mqlayer dead list {topic} {group}",
    "MqlayerOutboxQuarantined": "mqlayer outbox quarantine list",
    "MqlayerVersionsOverdue": "mqlayer versions gaps",
    "MqlayerArchiveGap": "mqlayer archive gaps {topic}",
    "MqlayerArchiveLate": "mqlayer archive status",
    "MqlayerExportLate": "mqlayer archive exports",
    "MqlayerKeysParked": "mqlayer parked list {topic} {group}",
    "MqlayerPaused": "mqlayer group resume {topic} {group}",
}
"""Filled in with the names of a problem's place."""


def with_help(problem: Problem) -> Problem:
    """Return a problem with its effect and command, where it has none."""
    return replace(
        problem,
        effect=problem.effect or EFFECTS.get(problem.alert.name, ""),
        command=problem.command or _command(problem),
    )


def _command(problem: Problem) -> str:
    # A node that does not answer can't be armed.
    if problem.alert.name == "MqlayerNodeAway" and not problem.rearms:
        return ""
    names = {"topic": problem.topic, "group": problem.group, "node": problem.node, "partition": problem.partition}
    quoted = {name: shlex.quote(str(value)) for name, value in names.items()}
    return COMMANDS.get(problem.alert.name, "").format(**quoted)
