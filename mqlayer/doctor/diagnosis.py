"""All checks, in bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from mqlayer.doctor import control, nodes, outbox, postgres, sessions
from mqlayer.doctor.body_store import body_store_subject, check_body_store
from mqlayer.doctor.broker import ask_broker, broker_subject, check_apart
from mqlayer.doctor.findings import LIMITS, Check, CheckLimits, CheckStatus, Finding, run_checks
from mqlayer.doctor.nodes import CheckedNode, RegisteredNode, node_subject
from mqlayer.doctor.postgres import CheckedDatabase
from mqlayer.doctor.rights import check_default_user, check_own_rights
from mqlayer.errors import MqlayerError, SchemaMismatch
from mqlayer.postgres.database import address_of, connect, driver_errors
from mqlayer.postgres.migrations import SchemaName, check_schema
from mqlayer.postgres.queries import query
from mqlayer.postgres.session_setup import is_own
from mqlayer.redis.access import NodeAccess, broker_access
from mqlayer.redis.server_info import ServerInfo, read_server_info
from mqlayer.settings import Settings, as_role

SCHEMA_CHECKS: Final = {"control": control.CHECKS, "application": outbox.CHECKS}


@dataclass(slots=True)
class ServerReport:
    """A server's findings, and data for other checks."""

    findings: list[Finding] = field(default_factory=list)
    registered: list[RegisteredNode] | None = None
    node: CheckedNode | None = None
    broker: ServerInfo | None = None


CheckJobs = Mapping[str, Callable[[], ServerReport]]


def diagnose(settings: Settings, *, role: str = "", limits: CheckLimits = LIMITS) -> list[Finding]:
    """Run all checks, as a Postgres role; a server's error becomes a finding."""
    stores = in_parallel(_store_work(settings, role, limits), limits)
    registered = next((report.registered for report in stores if report.registered is not None), None)
    found = in_parallel(_node_work(registered or [], settings.key_prefix, limits), limits)
    broker = next((report.broker for report in stores if report.broker is not None), None)
    return [
        *(finding for report in (*stores, *found) for finding in report.findings),
        *_check_whole(settings, registered, broker, [report.node for report in found if report.node is not None]),
    ]


def diagnose_database(dsn: str, subject: str, schemas: tuple[SchemaName, ...], limits: CheckLimits) -> ServerReport:
    """Check a Postgres and its schemas."""
    report = ServerReport()
    try:
        with connect(dsn, application="mqlayer doctor") as connection, driver_errors(address_of(dsn)):
            # A pooler passes the session on, with the setting: there, only the limit for all checks applies.
            if is_own(connection):
                connection.execute(query("check_patience"), {"wait": f"{limits.connect_s * 1000:.0f}ms"})
            report.findings.append(Finding("reachable", subject, CheckStatus.OK, "answers"))
            _diagnose(CheckedDatabase(connection, subject, address_of(dsn), dsn), schemas, report, limits)
    except MqlayerError as error:
        fix = "start it, or repair MQLAYER_DSN or MQLAYER_APP_DSN"
        report.findings.append(Finding("reachable", subject, CheckStatus.BROKEN, str(error), fix))
    return report


def diagnose_node(registered: RegisteredNode, prefix: str, limits: CheckLimits) -> ServerReport:
    """Check a node."""
    node, lost_at, classes = registered
    name = node_subject(node)
    try:
        answers = read_server_info(node.url, timeout_s=limits.connect_s, node=node.name, armed=node.armed_run_id)
    except MqlayerError as error:
        if lost_at is not None:
            return ServerReport(
                [Finding("reachable", name, CheckStatus.OK, "it was given up as lost, and does not answer")]
            )
        fix = (
            f"start it; if it never comes back: mqlayer route move --unreachable, or mqlayer node lost "
            f"{node.name} --yes"
        )
        return ServerReport([Finding("reachable", name, CheckStatus.BROKEN, str(error), fix)])
    checked = CheckedNode(node, lost_at, answers, classes)
    seen = f"answers in {answers.round_trip_s * 1000:.1f} ms"
    first = Finding("reachable", name, CheckStatus.OK, seen)
    rights = check_own_rights(node, name, prefix, limits)
    guarded = check_default_user(node, name, prefix, limits)
    checks = [finding for one, some in _checks_of(checked) for finding in run_checks(some, one, one.subject, limits)]
    return ServerReport([first, rights, *guarded, *checks], node=checked)


def _checks_of(checked: CheckedNode) -> Iterator[tuple[CheckedNode, dict[str, Check[CheckedNode]]]]:
    """Yield the checks of a node; of a cluster, those of each shard too."""
    shards = checked.answers.shards
    if not shards:
        yield checked, nodes.CHECKS
        return
    yield checked, {name: check for name, check in nodes.CHECKS.items() if name not in nodes.OF_SHARDS}
    for shard, answers in shards.items():
        yield replace(checked, answers=answers, shard=shard), {name: nodes.CHECKS[name] for name in nodes.OF_SHARDS}


def diagnose_broker(url: str, access: NodeAccess, limits: CheckLimits) -> ServerReport:
    """Check that Celery's broker answers."""
    answers, finding = ask_broker(url, timeout_s=limits.connect_s, access=access)
    return ServerReport([finding], broker=answers)


def in_parallel(work: CheckJobs, limits: CheckLimits) -> list[ServerReport]:
    """Check servers in threads; late ones become UNKNOWN."""
    done: dict[str, ServerReport] = {}
    faults: list[BaseException] = []

    def one(name: str, ask: Callable[[], ServerReport]) -> None:
        try:
            done[name] = ask()
        except BaseException as fault:  # noqa: BLE001 - a bug: raised again, where it can be seen
            faults.append(fault)

    # Daemon threads: a silent server must not keep the process alive.
    threads = [threading.Thread(target=one, args=item, name=f"asks-{item[0]}", daemon=True) for item in work.items()]
    until = time.monotonic() + limits.server_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if faults:
        raise faults[0]
    return [done.get(name) or _silent(name, limits) for name in work]


def _silent(name: str, limits: CheckLimits) -> ServerReport:
    seen = f"it did not answer all questions within {limits.server_s:g} s"
    fix = "see whether it is stopped, overloaded or cut off"
    return ServerReport([Finding("reachable", name, CheckStatus.UNKNOWN, seen, fix)])


def _store_work(settings: Settings, role: str, limits: CheckLimits) -> CheckJobs:
    control_dsn = as_role(settings.control_dsn(), role) if settings.dsn else ""
    application_dsn = as_role(settings.application_dsn(), role) if settings.app_dsn or settings.dsn else ""
    places: list[tuple[str, str, tuple[SchemaName, ...]]] = [
        ("control database", control_dsn, ("control",)),
        ("application database", application_dsn, ("application",)),
    ]
    if control_dsn == application_dsn:
        places = [("database", control_dsn, ("control", "application"))]
    work: dict[str, Callable[[], ServerReport]] = {}
    for title, dsn, schemas in places:
        if dsn:
            name = f"{title} ({address_of(dsn)})"
            work[name] = partial(diagnose_database, dsn, name, schemas, limits)
    if "broker_url" in settings.model_fields_set:
        url = settings.broker_url.get_secret_value()
        work[broker_subject(url)] = partial(diagnose_broker, url, broker_access(settings), limits)
    if settings.large_bodies == "s3":
        work[body_store_subject(settings)] = lambda: ServerReport([check_body_store(settings)])
    return work


def _node_work(registered: list[RegisteredNode], prefix: str, limits: CheckLimits) -> CheckJobs:
    return {node_subject(one.node): partial(diagnose_node, one, prefix, limits) for one in registered}


def _check_whole(
    settings: Settings,
    registered: list[RegisteredNode] | None,
    broker: ServerInfo | None,
    checked: list[CheckedNode],
) -> list[Finding]:
    found = []
    if not settings.dsn:
        fix = "set MQLAYER_DSN, or start a stack: mqlayer up"
        found.append(Finding("reachable", "database", CheckStatus.BROKEN, "no database is given", fix))
    if registered is None:
        seen, fix = "the control database, which knows them, can't be asked", "repair that one first"
        found.append(Finding("reachable", "nodes", CheckStatus.UNKNOWN, seen, fix))
    elif not registered:
        fix = "mqlayer node register NAME URL"
        found.append(Finding("reachable", "nodes", CheckStatus.WARNING, "no node is registered", fix))
    if broker is not None:
        found.append(check_apart(settings.broker_url.get_secret_value(), broker, checked))
    elif "broker_url" not in settings.model_fields_set:
        seen, fix = "MQLAYER_BROKER_URL is not set here", "set it as the workers have it, and ask again"
        found.append(Finding("reachable", "broker", CheckStatus.UNKNOWN, seen, fix))
    return found


def _diagnose(
    checked: CheckedDatabase, schemas: tuple[SchemaName, ...], report: ServerReport, limits: CheckLimits
) -> None:
    report.findings += run_checks({**postgres.CHECKS, **sessions.CHECKS}, checked, checked.subject, limits)
    for schema in schemas:
        finding = _check_migrations(checked, schema)
        report.findings.append(finding)
        if finding.verdict is not CheckStatus.OK:
            # The queries fit this version of the schema only.
            continue
        report.findings += run_checks(SCHEMA_CHECKS[schema], checked, checked.subject, limits)
        if schema == "control":
            report.registered = control.registered_nodes(checked)


def _check_migrations(checked: CheckedDatabase, schema: SchemaName) -> Finding:
    check = f"{schema} schema"
    try:
        with driver_errors(checked.address):
            check_schema(checked.connection, schema, checked.address)
    except SchemaMismatch as error:
        seen = f"it has {error.found}, this code needs {error.wanted}"
        return Finding(check, checked.subject, CheckStatus.BROKEN, seen, error.hint)
    except MqlayerError as error:
        return Finding(check, checked.subject, CheckStatus.UNKNOWN, str(error), "let the role of the DSN read it")
    return Finding(check, checked.subject, CheckStatus.OK, "as new as this code")
