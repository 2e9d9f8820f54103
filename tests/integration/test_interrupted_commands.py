"""Commands that a signal ends half-way: no traceback, an exit code that says so, and the same again finishes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from mqlayer.postgres.migrations import migrate
from mqlayer.stack import Stack
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python, start_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.world import World

SIGNALS = [signal.SIGINT, signal.SIGTERM]

Interrupt = Callable[..., None]

pytestmark = pytest.mark.world(by_commands=True, empty=True, partitions=0)


@pytest.fixture
def interrupt(tmp_path: Path) -> Interrupt:
    """Run a command, end it by a signal at a place that it comes to, and run it again to its end."""

    def run(*words: str, at: str, by: signal.Signals, environment: Mapping[str, str]) -> None:
        reached = tmp_path / "reached"
        places = f"{at}=mark:{reached},{at}=wait:{tmp_path / 'never'}"
        told = tmp_path / "told"
        with told.open("wb") as output:
            process = start_python("mqlayer", *words, env={**os.environ, **environment, **armed(places)}, stderr=output)
        try:
            wait_until(reached.exists, timeout_s=60, what=f"{at} to be reached")
            process.send_signal(by)
            assert process.wait(30) == (130 if by is signal.SIGINT else -by)
        finally:
            process.kill()
        assert "Traceback" not in told.read_text()
        again = ask_python("mqlayer", *words, env={**os.environ, **environment})
        assert again.returncode == 0, again.stderr

    return run


@pytest.fixture
def environment(empty_database_dsn: str, key_prefix: str) -> dict[str, str]:
    """The addresses of an empty database."""
    return {"MQLAYER_DSN": empty_database_dsn, "MQLAYER_APP_DSN": empty_database_dsn, "MQLAYER_KEY_PREFIX": key_prefix}


@pytest.fixture
def place(server_directory: Path) -> Iterator[Path]:
    """A directory for a stack, which is erased after the test."""
    home = Path(tempfile.mkdtemp(dir=server_directory, prefix="stack-"))
    home.chmod(0o755)
    yield home / ".mqlayer"
    Stack(home / ".mqlayer").erase()


@pytest.mark.parametrize("by", some_of(SIGNALS, len(SIGNALS)))
def test_migrating(interrupt: Interrupt, environment: dict[str, str], by: signal.Signals) -> None:
    interrupt("migrate", at="migrate.before_record", by=by, environment=environment)
    assert migrate(environment["MQLAYER_DSN"]) == []


@pytest.mark.parametrize("by", some_of(SIGNALS, len(SIGNALS)))
@pytest.mark.parametrize("at", some_of(["topic.after_allocate", "topic.after_make"], 2))
def test_creating_a_topic(
    interrupt: Interrupt, world: World, environment: dict[str, str], at: str, by: signal.Signals
) -> None:
    interrupt("topic", "create", "orders", "--partitions", "2", at=at, by=by, environment=environment)
    world.publish(5)
    assert world.rows("SELECT count(*)::int FROM mqlayer.partition WHERE state = 'open'") == [(2,)]


@pytest.mark.parametrize("by", some_of(SIGNALS, len(SIGNALS)))
def test_trimming(interrupt: Interrupt, world: World, environment: dict[str, str], by: signal.Signals) -> None:
    world.add_topic("orders", partitions=2)
    world.rows(
        "INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) VALUES (1, 'g', 'earliest', '{1}')"
    )
    interrupt("trim", at="trim.after_round", by=by, environment=environment)


@pytest.mark.full
@pytest.mark.parametrize("by", some_of(SIGNALS, len(SIGNALS)))
def test_starting_a_stack(
    interrupt: Interrupt, place: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals
) -> None:
    for name in ("MQLAYER_DSN", "MQLAYER_REDIS_URL", "MQLAYER_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)
    words = ("up", "--servers-only", "--nodes", "1", "--directory", str(place))
    interrupt(*words, at="migrate.before_record", by=by, environment={})
    assert {part.state for part in Stack(place).status()} == {"running"}
