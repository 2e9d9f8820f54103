"""Which Redis scripts and plain commands a part of the program can send, found by reading its source.

Functions and classes are followed by the names that they use: from the modules of a role, through imports, to every
`line.script("name", …)` and every command that is written as a tuple. It errs towards too much: a class counts as a
whole.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import mqlayer
from mqlayer.redis.acl import CONNECTING
from mqlayer.redis.command_specs import COMMANDS
from mqlayer.resources import lua_names

ROOT: Final = Path(mqlayer.__file__).parent
SCRIPT_NAMES: Final = frozenset(lua_names())
WHOLE: Final = frozenset({"source_end", "source_term", "partition_seal", "lock_fence"})
"""Scripts that are sent as a text, where the server may have forgotten them."""


class Unit(NamedTuple):
    """A function, class or constant at the top of a module."""

    module: str
    name: str


class Reached(NamedTuple):
    """What is sent."""

    scripts: frozenset[str]
    commands: frozenset[str]


class Module:
    """The names of a module: its own, and where those come from that it imports."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.own, self.imported = name, dict[str, ast.AST](), dict[str, Unit]()
        tree = ast.parse(path.read_text("utf-8"))
        for node in tree.body:
            self._add(node)
        for found in ast.walk(tree):
            if isinstance(found, ast.ImportFrom) and found.module and found.module.startswith("mqlayer"):
                for alias in found.names:
                    self.imported[alias.asname or alias.name] = Unit(found.module, alias.name)

    def _add(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self.own[name] = node
            case ast.Assign(targets=targets):
                self.own |= {target.id: node for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                self.own[name] = node


@cache
def modules() -> dict[str, Module]:
    """Return all modules of the library, workers included."""
    return {name: Module(name, path) for name, path in sources().items()}


@cache
def sources() -> dict[str, Path]:
    """Return the file of each module: names alone take no reading."""
    found = {}
    for path in sorted(path for folder in (ROOT, ROOT / "workers") for path in folder.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("mqlayer", *(part for part in parts if part != "__init__")))] = path
    return found


def resolve(unit: Unit) -> Unit | None:
    """Return where a name is defined, through packages that pass it on."""
    module = modules().get(unit.module)
    if module is None:
        return None
    if unit.name in module.own:
        return Unit(module.name, unit.name)
    found = module.imported.get(unit.name)
    # A package that names its own module, as in `from mqlayer import outbox`, defines it nowhere.
    return None if found is None or found == unit else resolve(found)


def reached_from(packages: Iterable[str], *, without: Iterable[Unit] = ()) -> Reached:
    """Return what all code of these packages or modules, and what it uses, can send."""
    left = [Unit(m.name, name) for m in modules().values() if _within(m.name, packages) for name in m.own]
    seen, units, passed = set(left), list[Unit](), set(without)
    while left:
        unit = left.pop()
        if unit in passed:
            continue
        units.append(unit)
        for found in _used(unit):
            if found not in seen:
                seen.add(found)
                left.append(found)
    scripts, commands = set[str](), set[str]()
    for unit in units:
        scripts |= set(_scripts(modules()[unit.module].own[unit.name]))
        commands |= set(_commands(modules()[unit.module].own[unit.name]))
    return Reached(frozenset(scripts), frozenset(commands))


def _within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@cache
def _used(unit: Unit) -> tuple[Unit, ...]:
    module = modules()[unit.module]
    names = {found.id for found in ast.walk(module.own[unit.name]) if isinstance(found, ast.Name)}
    return tuple(found for name in names if (found := resolve(Unit(module.name, name))) is not None)


def _scripts(tree: ast.AST) -> Iterator[str]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            yield from (word for word in map(_word, call.args[:2]) if word in SCRIPT_NAMES)


def _commands(tree: ast.AST) -> Iterator[str]:
    for found in ast.walk(tree):
        match found:
            case ast.Tuple(elts=words) | ast.Call(func=ast.Name(id="bulk"), args=words):
                first, second = [*map(_word, words[:2]), "", ""][:2]
                for name in (f"{first}|{second}".lower(), first.lower()):
                    if first.isupper() and name in COMMANDS:
                        yield name
                        break


def _word(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Constant(value=bytes(text)):
            return text.decode("latin-1")
    return ""


ARMING: Final = frozenset(
    {
        Unit("mqlayer.topics.nodes", "rearm_node"),
        Unit("mqlayer.topics.nodes", "arm_if_allowed"),
        Unit("mqlayer.routes.node_loss", "rearm_lost_nodes"),
    }
)
"""What a consumer does in a worker's place where its user may, and leaves to workers where it may not."""
HEALTH: Final = Unit("mqlayer.health.endpoint", "health_endpoint")
"""Speaks HTTP, whose GET is not a node's."""
STACK: Final = Unit("mqlayer.stack.stack", "Stack")
"""Makes servers; its own users are the owner's."""
COUNTING: Final = Unit("mqlayer.redis.partition_scripts", "recount_command")
"""Repairs what a script left that ended in its middle. A consumer tries it, and goes on where its user may not: the
next append or arming does the same, and who may write a partition's meta could stop it for good."""
JOB_TABLE: Final = Unit("mqlayer.maintenance.jobs", "PERIODIC_JOBS")
"""The doctor reads the jobs' names and intervals only."""
SHADOW: Final = Unit("mqlayer.cli.shadow", "shadow")
"""It loads handlers of consuming, and asks no node."""
CONNECTION: Final = Unit("mqlayer.redis.node_connection", "NodeConnection")
OTHERS: Final = ("mqlayer.cli.asyncapi", "mqlayer.cli.consume", "mqlayer.cli.dead_sessions", "mqlayer.cli.debug",
                 "mqlayer.cli.relay", "mqlayer.cli.relay_processes", "mqlayer.cli.stack", "mqlayer.cli.addresses",
                 "mqlayer.cli.main", "mqlayer.cli.shadow")  # fmt: skip
"""Commands that are processes of other roles, or only read a program; `debug` reads as a viewer, and loads a handler of
consuming."""
PLACES: Final = {
    "publisher": ("mqlayer.producing",),
    "consumer": ("mqlayer.consuming", "mqlayer.receiving"),
    "relay": ("mqlayer.relay",),
    "worker": ("mqlayer.workers.tasks",),
    "viewer": ("mqlayer.inspect", "mqlayer.doctor", "mqlayer.archive.status", "mqlayer.cli.doctor"),
    "operator": (
        *(name for name in sources() if name.startswith("mqlayer.cli.") and name not in OTHERS),
        "mqlayer.inspect",
    ),
    "arming": ("mqlayer.topics.nodes",),
}
"""Where the code of each role begins."""


def reached_by(role: str) -> Reached:
    """Return what the code of a role can send, besides what each connection sends to find out where it is."""
    left_out = {CONNECTION, HEALTH, STACK} | (ARMING if role in ("publisher", "consumer", "viewer") else set())
    left_out |= {COUNTING} if role == "consumer" else set()
    left_out |= {JOB_TABLE} if role in ("viewer", "operator") else set()
    left_out |= {SHADOW} if role == "operator" else set()
    found = reached_from(PLACES[role], without=left_out)
    callers = {"evalsha"} if found.scripts else set()
    callers |= {"eval"} if found.scripts & WHOLE else set()
    asked = {"config|get"} if role in ("relay", "worker", "operator", "arming") else set()
    return Reached(found.scripts, (found.commands - CONNECTING) | callers | asked)


def table(name: str, found: dict[str, frozenset[str]]) -> str:
    """Return a table of `mqlayer.redis.roles` as it has to be."""
    lines = [f"{name}: Final[Mapping[RedisRole, frozenset[str]]] = {{"]
    for role, words in found.items():
        shown = ", ".join(f'"{word}"' for word in sorted(words))
        lines.append(f"    RedisRole.{role.upper()}: frozenset({{{shown}}}),")
    return "\n".join([*lines, "}"])


if __name__ == "__main__":
    every = {role: reached_by(role) for role in PLACES}
    sys.stdout.write(table("SCRIPTS", {role: found.scripts for role, found in every.items()}) + "\n\n")
    sys.stdout.write(table("PLAIN_COMMANDS", {role: found.commands for role, found in every.items()}) + "\n")
