"""A process that drives one step of a topic's life, to be killed in it: `python -m tests.proof.step_driver ACT …`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from mqlayer.autopilot.node_balance import plan_balance
from mqlayer.postgres.database import Database
from mqlayer.routes import carry_out_moves, drain_node, drop_change, finish_changes, give_up_node, retire_partitions
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.topics import rearm_node, remove_node
from tests.fixtures.forked_programs import run_python
from tests.proof.route_steps import merge, move, split
from tests.proof.runtimes import runtime_of

TOPIC: Final = "orders"
ROOT: Final = Path(__file__).parents[2]


def drive(*words: str, environment: Mapping[str, str], timeout_s: float = 60.0) -> int:
    """Run an act in a process of its own; return how that ended."""
    return run_python("tests.proof.step_driver", *words, cwd=ROOT, env=environment, timeout=timeout_s)


def main() -> None:
    """Do what the words say."""
    act, *words = sys.argv[1:]
    settings = Settings(dsn=SecretStr(os.environ["MQLAYER_DSN"]))
    prefix = settings.key_prefix
    with Database(settings.control_dsn()) as database, Database(settings.application_dsn()) as application:
        match act:
            case "split":
                split(runtime_of(database, prefix), TOPIC, int(words[0]), at=[int(words[1])], to=words[2:])
            case "merge":
                merge(runtime_of(database, prefix), TOPIC, [int(word) for word in words])
            case "move":
                move(runtime_of(database, prefix), TOPIC, int(words[0]))
            case "drop":
                drop_change(runtime_of(database), TOPIC)
            case "finish":
                finish_changes(runtime_of(database, prefix))
            case "retire":
                retire_partitions(runtime_of(database, prefix))
            case "rearm":
                rearm_node(runtime_of(database, prefix, application=application), words[0])
            case "balance":
                balance(runtime_of(database, prefix))
            case "give_up":
                give_up_node(runtime_of(database, prefix, application=application), words[0])
            case _:
                empty_node(act, runtime_of(database, prefix, application=application), words[0])


def balance(runtime: Runtime) -> None:
    """Do as `mqlayer node balance --yes`."""
    assert carry_out_moves(runtime, [one.move for one in plan_balance(runtime).moves]) == {}


def empty_node(act: str, runtime: Runtime, name: str) -> None:
    """Drain or remove a node."""
    match act:
        case "drain":
            assert drain_node(runtime, name).is_empty
        case "remove":
            remove_node(runtime, name)
        case _:
            raise ValueError(act)


if __name__ == "__main__":
    main()
