"""`upgrade`: status, finalize, cancel."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from mqlayer.cli.addresses import settings_of_owner
from mqlayer.cli.option_rules import RuledCommand, needs, planned
from mqlayer.cli.options import PlanOption, YesOption, echo_plan
from mqlayer.cli.output import JsonOption, echo, pluralize, show_rows
from mqlayer.cli.panels import CHANGE, LOOK
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import runtime_here, runtime_of_any_version
from mqlayer.domain.protocol import PROTOCOL
from mqlayer.maintenance.upgrades import UpgradeStatus, cancel, finalize, run_contracts, upgrade_status
from mqlayer.runtime.runtime import Runtime

upgrades = typer.Typer(no_args_is_help=True, help="Upgrades: which code lives, and the step to its written form.")

DRAIN_S: Final = 120.0


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(upgrades, name="upgrade")


@upgrades.command(rich_help_panel=LOOK)
def status(as_json: JsonOption = False) -> None:
    """Show the protocol version in force, living processes with theirs, and what a finalization waits for."""
    with runtime_of_any_version() as runtime:
        found = upgrade_status(runtime)
    if as_json:
        show_rows([_summary(found)], as_json=True, nothing="")
        return
    echo(_state(found))
    for feature in found.features:
        echo(f"waits: {feature.name}: {feature.text}")
    for step in found.contracts:
        echo(f"waits: contract step {step.schema} {step.number:04d} {step.name}")
    rows = [asdict(one) for one in found.living]
    show_rows(rows, as_json=False, nothing="no process lives")
    _show_blockers(found)


@upgrades.command("finalize", cls=RuledCommand, rich_help_panel=CHANGE)
@planned
@needs("--timeout", "--drain", why="without --drain it waits for nothing")
def finalize_command(
    plan: PlanOption = False,
    yes: YesOption = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="Refuse older processes from now on, and wait until they have drained.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Longest wait with --drain.")] = DRAIN_S,
) -> None:
    """Put this release's written form in force, and run its contract steps; there is no way back to older code.

    Refused while an older process lives. As a role with the right `migrate`.
    """
    del plan
    with runtime_here() as runtime:
        if yes:
            check_change(runtime.control)
        found = upgrade_status(runtime)
        if not yes:
            echo_plan(_plan(found, drain=drain))
            _show_blockers(found)
            return
        answer = finalize(runtime, drain=drain, timeout_s=timeout)
        found = upgrade_status(runtime)
        if answer != "finalized":
            echo(f"not finalized: {_processes(found)} of older code live", err=True)
            _show_blockers(found)
            raise typer.Exit(1)
        echo(f"protocol {found.schemas['control'].served.in_force} is in force")
        if found.contracts:
            _contract(runtime, found)


@upgrades.command("cancel", rich_help_panel=CHANGE)
def cancel_command() -> None:
    """Serve older code again, while a finalization with --drain waits for its processes."""
    with runtime_of_any_version() as runtime:
        check_change(runtime.control)
        cancel(runtime)
    echo("older code is served again")


def _contract(runtime: Runtime, found: UpgradeStatus) -> None:
    settings = settings_of_owner()
    done = run_contracts(runtime, {"control": settings.control_dsn(), "application": settings.application_dsn()})
    for step in done:
        echo(f"{step.schema} {step.number:04d} {step.name}")
    left = len(found.contracts) - len(done)
    if left:
        said = "1 contract step waits" if left == 1 else f"{left} contract steps wait"
        echo(f"{said} until each process has read the version: call again in some seconds", err=True)
        raise typer.Exit(1)


def _state(found: UpgradeStatus) -> str:
    control = found.schemas["control"].served
    text = f"protocol {control.in_force} is in force; this code knows {PROTOCOL}"
    if found.draining:
        return f"{text}; older processes drain, and are refused"
    if found.pending and control.in_force == found.target:
        return f"{text}; the application schema waits for it: mqlayer upgrade finalize"
    if found.pending:
        return f"{text}; {found.target} waits to be finalized: mqlayer upgrade finalize"
    return f"{text}; nothing waits to be finalized"


def _plan(found: UpgradeStatus, *, drain: bool) -> str:
    if not found.pending:
        return f"nothing waits to be finalized, {pluralize(len(found.contracts), 'contract step')} would run"
    names = ", ".join(one.name for one in found.features) or "none"
    older = _processes(found, "older ")
    ends = f"; {older} would drain and end" if drain and found.blockers else ""
    return f"protocol {found.target} would be in force; features: {names}{ends}"


def _show_blockers(found: UpgradeStatus) -> None:
    for one in found.blockers:
        echo(f"too old: {one}", err=True)


def _summary(found: UpgradeStatus) -> dict[str, Any]:
    return {
        "in_force": found.schemas["control"].served.in_force,
        "target": found.target,
        "draining": found.draining,
        "schemas": {name: asdict(one.served) for name, one in found.schemas.items()},
        "features": [asdict(one) for one in found.features],
        "contracts": [f"{one.schema} {one.number:04d} {one.name}" for one in found.contracts],
        "processes": [asdict(one) for one in found.living],
        "blockers": [str(one) for one in found.blockers],
    }


def _processes(found: UpgradeStatus, kind: str = "") -> str:
    count = len(found.blockers)
    return f"{count} {kind}{'process' if count == 1 else 'processes'}"
