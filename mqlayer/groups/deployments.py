"""Move a group's partitions from the members of one deployment to those of another (docs/design/deployments.md).

One transaction changes the group and rebalances; each partition then passes as in any hand-over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from mqlayer.domain.deployments import Deployments
from mqlayer.domain.names import check_deployment
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, find_group, read_group
from mqlayer.groups.rebalance import change_group, put_deployments, rebalance
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

POLL_S: Final = 0.1


class DeployedPartition(NamedTuple):
    """A readable partition. `wanted`: the deployment whose members may have it; `actual`: its owner's."""

    partition: int
    lp_from: int
    lp_to: int
    wanted: str
    owner: str | None
    actual: str | None


@dataclass(frozen=True, slots=True)
class DeployPlan:
    """A switch of deployments. `members`: living ones per deployment."""

    group: Group
    after: Deployments
    partitions: Sequence[DeployedPartition]
    members: Counter[str]

    @property
    def to(self) -> str:
        """The deployment that gets partitions."""
        return self.after.canary or self.after.in_force

    @property
    def passing(self) -> list[tuple[DeployedPartition, str]]:
        """Partitions that another deployment gets, and which one."""
        now = [(one, self.after.of(one.lp_from)) for one in self.partitions]
        return [(one, next_one) for one, next_one in now if next_one != one.wanted]


def planned_deploy(
    runtime: Runtime, topic: str, name: str, to: str, *, percent: float | None = None, partitions: int | None = None,
    fallback: bool = False,
) -> DeployPlan:  # fmt: skip
    """Plan a switch to a deployment: of all partitions, or of those that hold the first LPs. Changes nothing.

    `percent`: of the LPs, at least one partition. `partitions`: so many. `fallback`: go back to the older deployment,
    once, if no member of the newer one lives. Raises NotFound, InvalidInput, InvalidName; Conflict for a group that is
    not live.
    """
    check_deployment(to)
    group = _deployable(runtime, topic, name)
    if fallback and group.mode != "exclusive":
        raise InvalidInput(f"a group of mode {group.mode} owns no partitions: leave the fallback out")
    readable = deployed_partitions(runtime.control, group)
    lps = _lps(readable, percent, partitions)
    now = group.deployments
    after = now.switched(to, fallback=fallback) if lps is None else now.with_canary(to, lps, fallback=fallback)
    return _plan(runtime, group, after, readable)


def planned_return(runtime: Runtime, topic: str, name: str) -> DeployPlan:
    """Plan to take the canary, or the last switch, back. Raises as `planned_deploy`; Conflict without either."""
    group = _deployable(runtime, topic, name)
    after = group.deployments.back()
    return _plan(runtime, group, after, deployed_partitions(runtime.control, group))


def apply_deploy(runtime: Runtime, plan: DeployPlan) -> None:
    """Apply a plan: members of the one deployment drain, those of the other begin where they settled.

    Raises Conflict, nothing changed, if deployments changed since the plan, or no member lives that could begin.
    """
    group = plan.group
    to = plan.to

    def work(connection: Connection) -> None:
        if read_group(connection, group.topic, group.name).deployments != group.deployments:
            raise Conflict(f"the deployments of {_called(group)} changed meanwhile", "look at the plan again")
        connection.execute(query("member_expire"), {"group_id": group.group_id})
        _check_living(group, to, _living(connection, group))
        if not put_deployments(connection, group.group_id, plan.after):
            raise Conflict(f"{_called(group)} is not live", "nothing was changed")
        facts = {
            "from": group.deployments.in_force,
            "to": to,
            "lps": plan.after.canary_lps,
            "fallback": plan.after.fallback,
        }
        write_audit(connection, runtime.actor, "group deploy", f"{group.topic}/{group.name}", facts)
        rebalance(connection, group.group_id)
        connection.execute(query("allocation_raise"), {"group_id": group.group_id})
        failpoint("group_deploy.before_commit")

    change_group(runtime.control, group.group_id, work)
    failpoint("group_deploy.after_commit")
    log.info("group_deployed", extra={"topic": group.topic, "group": group.name, "deployment": to})


def deployed_partitions(database: Database, group: Group) -> list[DeployedPartition]:
    """Return what a group may consume, in the order of LPs."""
    with database.connection() as connection:
        rows = connection.execute(query("deployment_partitions"), {"group_id": group.group_id}).fetchall()
    return [DeployedPartition(*row) for row in rows]


def wait_deployed(database: Database, group: Group, *, timeout_s: float) -> int:
    """Wait until members of the right deployments own all partitions, or the timeout; return how many are left."""
    until = time.monotonic() + timeout_s
    while True:
        left = 0
        if group.mode == "exclusive":
            left = sum(one.actual != one.wanted for one in deployed_partitions(database, group))
        if not left or time.monotonic() >= until:
            return left
        time.sleep(POLL_S)


def _deployable(runtime: Runtime, topic: str, name: str) -> Group:
    group = find_group(runtime.control, topic, name)
    if group.mode == "broadcast" or group.instance is not None:
        raise InvalidInput(f"{_called(group)} broadcasts: every process gets every message, whatever its deployment")
    if group.state != "live":
        raise Conflict(f"{_called(group)} is {group.state}, not live", "start a member first")
    return group


def _lps(readable: Sequence[DeployedPartition], percent: float | None, partitions: int | None) -> int | None:
    if percent is not None:
        if not 0 < percent <= 100:
            raise InvalidInput(f"a share is above 0 and up to 100 percent, not {percent:g}")
        return max(1, round(LP_COUNT * percent / 100))
    if partitions is None:
        return None
    if not 1 <= partitions <= len(readable):
        raise InvalidInput(f"the group may consume {len(readable)} partitions now: say 1 to {len(readable)}")
    return readable[partitions - 1].lp_to


def _plan(runtime: Runtime, group: Group, after: Deployments, readable: Sequence[DeployedPartition]) -> DeployPlan:
    with runtime.control.connection() as connection:
        living = _living(connection, group)
    return DeployPlan(group, after, readable, living)


def _living(connection: Connection, group: Group) -> Counter[str]:
    rows = connection.execute(query("member_live"), {"group_id": group.group_id}).fetchall()
    return Counter(deployment for _, leaving, deployment, _ in rows if not leaving)


def _check_living(group: Group, to: str, living: Counter[str]) -> None:
    # Receivers are no members.
    if group.mode != "pop" and not living[to]:
        there = f"; living: {', '.join(sorted(living))}" if living else ""
        raise Conflict(
            f"no member of deployment {to!r} lives in {_called(group)}{there}",
            f"start one: mqlayer consume MODULE:APP --deployment {to}",
        )


def _called(group: Group) -> str:
    return f"group {group.name!r} of topic {group.topic!r}"
