"""A process that drives one step of a topic's life, to be killed in it: `python -m tests.proof.step_driver ACT …`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from mqlayer.postgres.database import Database
from mqlayer.routes import drop_change, finish_changes, give_up_node, merge, move, retire_partitions, split
from mqlayer.settings import Settings
from mqlayer.topics import rearm_node
from tests.fixtures.forked_programs import run_python

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
                split(database, TOPIC, int(words[0]), at=[int(words[1])], to=words[2:], prefix=prefix)
            case "merge":
                merge(database, TOPIC, [int(word) for word in words], prefix=prefix)
            case "move":
                move(database, TOPIC, int(words[0]), prefix=prefix)
            case "drop":
                drop_change(database, TOPIC)
            case "finish":
                finish_changes(database, prefix=prefix)
            case "retire":
                retire_partitions(database, prefix=prefix)
            case "rearm":
                rearm_node(database, words[0], prefix=prefix, application=application)
            case "give_up":
                give_up_node(database, words[0], prefix=prefix, application=application)
            case _:
                raise ValueError(act)


if __name__ == "__main__":
    main()
