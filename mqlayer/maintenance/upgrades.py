"""Which protocol version is in force, who lives with which, and the step to the next (docs/design/upgrades.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from mqlayer.domain.protocol import FEATURES, PROTOCOL, Feature, ServedProtocols
from mqlayer.errors import Conflict
from mqlayer.failpoints import failpoint
from mqlayer.groups.rebalance import change_group, rebalance
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.migrations import Migration, SchemaName, contract, pending_contracts
from mqlayer.postgres.protocol import FinalizeAnswer, SchemaProtocols, read_protocols
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

MOST_SHOWN: Final = 1_000
POLL_S: Final = 0.25
LOCK_WAIT: Final = "5000ms"
"""Longest wait for a process that joins meanwhile."""
_FINALIZE: Final = {"control": "protocol_finalize_control", "application": "protocol_finalize_application"}
_REOPEN: Final = {"control": "protocol_reopen_control", "application": "protocol_reopen_application"}
ACTS: Final = {"finalized": "finalize", "draining": "drain"}


@dataclass(frozen=True, slots=True)
class LivingProcess:
    """A process whose code counts. `acts_on`: the version that it writes. `beats`: its lease holds."""

    kind: str
    name: str
    host: str
    pid: int
    since: datetime | None
    version: str
    least: int
    most: int
    acts_on: int
    beats: bool

    def __str__(self) -> str:
        where = f" on {self.host} (pid {self.pid})" if self.host else ""
        began = f", since {self.since.isoformat(timespec='seconds')}" if self.since is not None else ""
        silent = "" if self.beats else ", silent"
        return f"{self.kind} {self.name}{where}: mqlayer {self.version or '?'}, protocol {self.most}{began}{silent}"


@dataclass(frozen=True, slots=True)
class UpgradeStatus:
    """The versions of both schemas, living processes, and the contract steps that wait."""

    schemas: Mapping[SchemaName, SchemaProtocols]
    living: tuple[LivingProcess, ...]
    contracts: tuple[Migration, ...]

    @property
    def target(self) -> int:
        """The version that a finalization by this code puts in force."""
        return min(PROTOCOL.most, *(one.served.serves_to for one in self.schemas.values()))

    @property
    def pending(self) -> bool:
        """Whether a version waits to be finalized."""
        return any(one.served.in_force < self.target for one in self.schemas.values())

    @property
    def draining(self) -> bool:
        """Whether older processes are refused, and the next version is not in force yet."""
        return any(one.served.serves_from > one.served.in_force for one in self.schemas.values())

    @property
    def features(self) -> tuple[Feature, ...]:
        """Features that wait for the finalization."""
        return tuple(one for one in FEATURES if one.since > self.schemas[one.schema].served.in_force)

    @property
    def blockers(self) -> tuple[LivingProcess, ...]:
        """Processes that do not know the target."""
        return tuple(one for one in self.living if one.most < self.target) if self.pending else ()

    @property
    def behind(self) -> tuple[LivingProcess, ...]:
        """Processes that still act on an earlier version than the one in force: contract steps wait for them."""
        return tuple(one for one in self.living if one.acts_on < self.schemas["control"].served.in_force)


def upgrade_status(runtime: Runtime) -> UpgradeStatus:
    """Read the versions and the living processes. Raises StoreUnavailable, SchemaMismatch."""
    limit = {"limit": MOST_SHOWN}
    with runtime.control.connection() as connection:
        control = read_protocols(connection, "control")
        living = connection.execute(query("living_processes"), limit).fetchall()
        contracts = pending_contracts(connection, "control")
    with runtime.outbox.connection() as connection:
        application = read_protocols(connection, "application")
        relays = connection.execute(query("living_relays"), limit).fetchall()
        contracts += pending_contracts(connection, "application")
    processes = [LivingProcess(*row) for row in living]
    named = {one.name for one in processes if one.kind == "relay"}
    # Only this schema knows a relay that has not reached the control database for a while.
    processes += [one for one in (LivingProcess(*row) for row in relays) if one.name not in named]
    return UpgradeStatus({"control": control, "application": application}, tuple(processes), tuple(contracts))


def finalize(runtime: Runtime, *, drain: bool = False, timeout_s: float = 0.0) -> FinalizeAnswer:
    """Put the newest version that this code and both schemas know in force: first in control, then in application.

    "blocked" changed nothing: older processes live. `drain` refuses these from now on and waits for their end; after
    `timeout_s`, "draining". Safe to repeat and to run concurrently. Raises StoreUnavailable, TransactionConflict.
    """
    until = time.monotonic() + timeout_s
    while True:
        answer = _advance(runtime, drain=drain)
        if answer != "draining" or time.monotonic() >= until:
            return answer
        time.sleep(POLL_S)


def finalize_when_due(runtime: Runtime) -> bool:
    """Finalize if the setting asks for it, the version is prepared for long enough, and nothing blocks it."""
    wait_s = runtime.settings.finalize_after_s
    if not wait_s:
        return False
    status = upgrade_status(runtime)
    ready = all(one.age_s >= wait_s for one in status.schemas.values())
    return status.pending and ready and not status.blockers and finalize(runtime) == "finalized"


def run_contracts(runtime: Runtime, dsns: Mapping[SchemaName, str]) -> list[Migration]:
    """Run the contract steps that no living process keeps waiting; return them. `dsns`: of the schemas' owner.

    Raises StoreUnavailable, SchemaMismatch, TransactionConflict.
    """
    with runtime.control.connection() as connection:
        version = read_protocols(connection, "control").served.in_force
    _note_overdue(runtime.control, version)
    done = contract(dsns["control"], schema="control")
    # Members and workers write the application schema too, and say on which version they act in the control schema.
    if not upgrade_status(runtime).behind:
        done += contract(dsns["application"], schema="application")
    return done


def cancel(runtime: Runtime) -> None:
    """Serve older code again. Raises Conflict unless a finalization drains older processes, in both schemas."""
    control, application = _served(runtime)
    if control.in_force > application.in_force:
        reason = f"protocol {control.in_force} is in force in the control schema, so older code stays refused"
        raise Conflict(reason, "mqlayer upgrade finalize --yes goes on")
    reopened = [_reopen(runtime, database, schema) for schema, database in _schemas(runtime)]
    if not any(reopened):
        raise Conflict("no finalization drains older processes", "see mqlayer upgrade status")


def _schemas(runtime: Runtime) -> tuple[tuple[SchemaName, Database], ...]:
    return ("control", runtime.control), ("application", runtime.outbox)


def _served(runtime: Runtime) -> list[ServedProtocols]:
    found = []
    for schema, database in _schemas(runtime):
        with database.connection() as connection:
            found.append(read_protocols(connection, schema).served)
    return found


def _advance(runtime: Runtime, *, drain: bool) -> FinalizeAnswer:
    target = upgrade_status(runtime).target
    for schema, database in _schemas(runtime):
        with database.connection() as connection:
            served = read_protocols(connection, schema).served
        for version in range(served.in_force + 1, target + 1):
            if schema == "control":
                _note_overdue(database, version)
            answer = _finalize_one(runtime, schema, version, drain=drain)
            if answer != "finalized":
                return answer
        failpoint("upgrade.after_schema")
    return "finalized"


def _finalize_one(runtime: Runtime, schema: SchemaName, version: int, *, drain: bool) -> FinalizeAnswer:
    def work(connection: Connection) -> FinalizeAnswer:
        connection.execute(query("transaction_patience"), {"lock_wait": LOCK_WAIT, "idle": LOCK_WAIT})
        connection.execute(query("protocol_finalize_lock"))
        before = read_protocols(connection, schema).served
        facts = {"version": version, "drain": drain}
        row = connection.execute(query(_FINALIZE[schema]), facts).fetchone()
        answer: FinalizeAnswer = row[0] if row is not None else "blocked"
        # Another call may have been first.
        changed = before.in_force < version if answer == "finalized" else before.serves_from < version
        if schema == "control" and changed and answer in ACTS:
            write_audit(connection, runtime.actor, f"upgrade {ACTS[answer]}", schema, {"version": version})
        failpoint("upgrade.before_commit")
        return answer

    answer = dict(_schemas(runtime))[schema].transaction(work, timeout_s=0)
    log.info("upgrade_step", extra={"answer": answer, "schema": schema, "protocol": version})
    return answer


def _note_overdue(control: Database, version: int) -> None:
    """Note for good that silent members of earlier versions are gone; other members get their partitions."""
    with control.connection() as connection:
        found = connection.execute(query("protocol_overdue_groups"), {"version": version}).fetchall()
    for (group_id,) in found:
        change_group(control, group_id, partial(rebalance, group_id=group_id))


def _reopen(runtime: Runtime, database: Database, schema: SchemaName) -> bool:
    def work(connection: Connection) -> bool:
        row = connection.execute(query(_REOPEN[schema])).fetchone()
        reopened = row is not None and bool(row[0])
        if schema == "control" and reopened:
            write_audit(connection, runtime.actor, "upgrade cancel", schema, {})
        return reopened

    return database.transaction(work)
