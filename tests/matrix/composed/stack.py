"""docker-compose.yml, run by the programs in PATH against the engine at DOCKER_HOST."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.fixtures.wait import wait_until
from tests.matrix.composed import ledger

ROOT: Final = Path(__file__).parents[3]
HERE: Final = Path(__file__).parent
FILES: Final = (ROOT / "docker-compose.yml", HERE / "build.yml")
SUPERUSER_DSN: Final = "postgresql://postgres:mqlayer@127.0.0.1:5432/mqlayer?connect_timeout=5"
CLIENT_DSN: Final = "postgresql://mqlayer_client:mqlayer@127.0.0.1:5432/mqlayer?connect_timeout=5"
AS_OPERATOR: Final = {
    "MQLAYER_DSN": "postgresql://mqlayer_operator:mqlayer@postgres:5432/mqlayer",
    "MQLAYER_REDIS_USER": "mqlayer-operator",
    "MQLAYER_REDIS_PASSWORD": "mqlayer",
}
ACCOUNTS: Final = 20
WRITERS: Final = 2
EVERY_S: Final = 0.02
COMMAND_WITHIN_S: Final = 900.0
BACK_WITHIN_S: Final = 120.0


class ComposedStack:
    """The services of the file, with a consumer application of ours."""

    def __init__(self) -> None:
        self._environment = {**os.environ, "CONSUMERS": "ledger:app", "CONSUMERS_FOLDER": str(HERE)}

    def compose(self, *words: str, profiles: tuple[str, ...] = ("consumers",)) -> str:
        """Run docker-compose; return its output. Fails with what it said."""
        files = [part for file in FILES for part in ("--file", str(file))]
        chosen = [part for name in profiles for part in ("--profile", name)]
        return self._run("docker-compose", *files, *chosen, *words)

    def docker(self, *words: str) -> str:
        """Run docker; return its output."""
        return self._run("docker", *words)

    def up(self, *profiles: str) -> None:
        """Start what is missing, and wait until all of it is healthy."""
        self.compose("up", "--detach", "--wait", "--no-build", profiles=("consumers", *profiles))

    def operate(self, *words: str) -> str:
        """Run a command of mqlayer beside the services, as operator."""
        facts = [part for name, value in AS_OPERATOR.items() for part in ("--env", f"{name}={value}")]
        return self.compose("exec", "-T", *facts, "relay", "mqlayer", *words)

    def state(self, service: str) -> dict[str, Any]:
        """Return what the engine says of a service's container."""
        container = self.compose("ps", "--all", "--quiet", service).strip()
        found = json.loads(self.docker("inspect", container))[0]
        return {**found["State"], "RestartCount": found["RestartCount"], "Id": container}

    def await_health(self, service: str) -> None:
        """Wait until the container runs and its health check succeeds."""

        def healthy() -> bool:
            state = self.state(service)
            return bool(state["Running"]) and state["Health"]["Status"] == "healthy"

        wait_until(healthy, timeout_s=BACK_WITHIN_S, what=f"{service} is healthy")

    def left(self) -> list[str]:
        """Return containers, networks and volumes of the project."""
        mine = ("--quiet", "--filter", "label=com.docker.compose.project=mqlayer")
        kinds = {"container": ("--all",), "network": (), "volume": ()}
        return [
            f"{kind} {name}" for kind, more in kinds.items() for name in self.docker(kind, "ls", *more, *mine).split()
        ]

    def _run(self, *command: str) -> str:
        answer = subprocess.run(
            command,
            env=self._environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_WITHIN_S,
        )
        assert answer.returncode == 0, f"{' '.join(command)}: {answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
        return answer.stdout


@contextmanager
def writing() -> Iterator[None]:
    """Change accounts all the while, with new connections after each failure."""
    stop = threading.Event()
    threads = [threading.Thread(target=_write, args=(stop, number)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _write(stop: threading.Event, first: int) -> None:
    number = first
    while not stop.is_set():
        try:
            with psycopg.connect(CLIENT_DSN) as connection:
                while not stop.wait(EVERY_S):
                    number += WRITERS
                    with connection.transaction():
                        ledger.change(connection, f"account-{number % ACCOUNTS}", number % 7)
        except psycopg.Error:
            stop.wait(EVERY_S)


def change_all() -> list[ledger.Change]:
    """Change every account, on all partitions, once Postgres takes that."""
    deadline = time.monotonic() + BACK_WITHIN_S
    while True:
        try:
            with psycopg.connect(CLIENT_DSN) as connection:
                return [ledger.change(connection, f"account-{number}", 1) for number in range(ACCOUNTS)]
        except psycopg.Error:
            if time.monotonic() > deadline:
                raise


def await_bookings(made: list[ledger.Change]) -> None:
    """Wait until the ledger has all of these changes."""
    wait_until(
        lambda: all(_is_booked(one) for one in made),
        timeout_s=BACK_WITHIN_S,
        what="changes on all partitions are booked",
    )


def check_the_ledger() -> int:
    """Wait until all changes are booked; return how many. Fails where one is missing, double or out of turn."""

    def all_booked() -> int:
        with psycopg.connect(SUPERUSER_DSN) as connection:
            booked, made = ledger.counts(connection)
        return booked if booked >= made else 0

    count = wait_until(all_booked, timeout_s=BACK_WITHIN_S, what="all changes are booked")
    with psycopg.connect(SUPERUSER_DSN) as connection:
        assert ledger.faults(connection) == []
    return count


def _is_booked(made: ledger.Change) -> bool:
    asked = "SELECT FROM ledger WHERE account = %s AND number = %s"
    try:
        with psycopg.connect(SUPERUSER_DSN) as connection:
            return connection.execute(asked, (made.account, made.number)).fetchone() is not None
    except psycopg.OperationalError:
        return False
