"""`mqlayer up`, `status` and `down`: the whole stack in one directory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import redis
from typer.testing import CliRunner, Result

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.main import app
from mqlayer.redis.access import forget_access
from mqlayer.stack import Addresses, GivenAddresses, Stack
from mqlayer.stack.credentials import StackCredentials
from mqlayer.stack.process_record import ProcessRecord
from mqlayer.stack.processes import ProcessId
from mqlayer.stack.stack import _locked
from tests.fixtures.servers import InitialisedClusters, Postgres

# One worker starts the stack that most tests look at.
pytestmark = pytest.mark.xdist_group("stack")

SECRET = "s3cret"


@pytest.fixture
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address is given."""
    for name in ("MQLAYER_DSN", "MQLAYER_REDIS_URL", "MQLAYER_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def directory_of_a_stack(server_directory: Path) -> Iterator[Path]:
    """Lend a directory for a stack, which is down afterwards."""
    home = Path(tempfile.mkdtemp(dir=server_directory, prefix="stack-"))
    home.chmod(0o755)
    yield home / ".mqlayer"
    forget_access()
    Stack(home / ".mqlayer").erase()


@pytest.fixture
def place(server_directory: Path, quick_initdb: None, no_addresses: None) -> Iterator[Path]:
    """A directory for a stack of the test's own."""
    with directory_of_a_stack(server_directory) as place:
        yield place


@pytest.fixture(scope="module")
def place_of_all(server_directory: Path, initialised_clusters: InitialisedClusters) -> Iterator[Path]:
    """The directory of the stack that tests share."""
    with directory_of_a_stack(server_directory) as place:
        yield place


@pytest.fixture
def running(place_of_all: Path, no_addresses: None) -> Path:
    """The directory of a stack that runs, two nodes in it; a test may stop it and start it again."""
    if set(states(place_of_all).values()) != {"running"}:
        up(place_of_all)
    return place_of_all


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def up(place: Path, *arguments: str) -> Addresses:
    run("up", "--servers-only", "--directory", place, *arguments)
    return addresses_of(place)


def addresses_of(place: Path) -> Addresses:
    addresses = Stack(place).addresses()
    assert addresses is not None
    return addresses


def node_of(place: Path, name: str) -> redis.Redis:
    """Return a client of a node as the stack's own user, which may do all."""
    addresses = addresses_of(place)
    return redis.Redis.from_url(StackCredentials.load(place).of("owner").node.in_url(addresses.nodes[name]))


def states(place: Path) -> dict[str, str]:
    return {part.name: part.state for part in Stack(place).status()}


def test_up_starts_all_servers_and_registers_the_nodes(running: Path) -> None:
    addresses = addresses_of(running)

    assert states(running) == dict.fromkeys(["postgres", "node-1", "node-2", "broker"], "running")
    with psycopg.connect(addresses.dsn) as connection:
        nodes: dict[str, str] = dict(connection.execute("SELECT name, url FROM mqlayer.node").fetchall())
    assert nodes == addresses.nodes


def test_up_twice_changes_nothing(running: Path) -> None:
    first = addresses_of(running)
    pids = [part.pid for part in Stack(running).status()]
    assert up(running) == first
    assert "leave --nodes 1 out" in run("up", "--servers-only", "--nodes", "1", "--directory", running, code=1).output
    assert [part.pid for part in Stack(running).status()] == pids


@pytest.mark.full
def test_data_and_addresses_survive_down_and_up(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = addresses_of(running)
    with psycopg.connect(before.dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    with node_of(running, "node-2") as node:
        node.set("kept", "yes")

    run("down", "--directory", running)
    assert set(states(running).values()) == {"stopped"}
    run("status", "--directory", running, code=1)
    monkeypatch.chdir(running.parent)
    said = run("topic", "list", code=1).output
    assert "the stack of this folder is stopped (postgres, node-1, node-2, broker): run mqlayer up" in said
    after = up(running)

    assert after == before
    with psycopg.connect(after.dsn) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)
    with node_of(running, "node-2") as node:
        assert node.get("kept") == b"yes"


@pytest.mark.full
def test_nodes_are_armed_for_their_present_run_after_a_restart(running: Path) -> None:
    run("down", "--directory", running)
    addresses = up(running)

    with psycopg.connect(addresses.dsn) as connection:
        armed: dict[str, str] = dict(connection.execute("SELECT name, armed_run_id FROM mqlayer.node").fetchall())
    for name in addresses.nodes:
        with redis.Redis.from_url(addresses.node_url(name), decode_responses=True) as node:
            assert armed[name] == node.info("server")["run_id"]


def test_up_again_brings_back_what_was_killed(running: Path) -> None:
    before = addresses_of(running)
    stack = Stack(running)
    stack._redis("node-1").kill()
    stack._postgres().kill()
    assert states(running)["node-1"] == states(running)["postgres"] == "stopped"

    assert up(running) == before
    assert set(states(running).values()) == {"running"}


def test_down_erases_the_data_only_when_told_to(place: Path) -> None:
    up(place, "--nodes", "1")
    run("down", "--erase", "--directory", place)
    assert not place.exists()


@pytest.mark.full
def test_erasing_leaves_the_files_of_others(place: Path) -> None:
    up(place, "--nodes", "1")
    (place / "notes").mkdir()
    run("down", "--erase", "--directory", place)
    assert [path.name for path in place.iterdir()] == ["notes"]


def test_status_prints_one_json_object_per_part(running: Path) -> None:
    lines = run("status", "--json", "--directory", running).stdout.splitlines()
    parts = [json.loads(line) for line in lines]
    assert [part["name"] for part in parts] == ["postgres", "node-1", "node-2", "broker"]
    assert all(part["state"] == "running" and Path(part["log"]).exists() for part in parts)


def test_nothing_is_there_before_the_first_up(place: Path) -> None:
    assert "mqlayer up" in run("status", "--directory", place, code=1).stderr
    run("down", "--directory", place)
    assert not place.exists()


def test_given_servers_are_used_and_left_running(
    place: Path, postgres_server: Postgres, empty_database_dsn: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", empty_database_dsn)
    monkeypatch.setenv("MQLAYER_REDIS_URL", redis_url)
    monkeypatch.setenv("MQLAYER_BROKER_URL", redis_url.removesuffix("/0") + "/1")

    addresses = up(place)
    assert up(place, "--nodes", "1") == addresses
    refused = run("up", "--servers-only", "--nodes", "3", "--directory", place, code=1)
    assert "as MQLAYER_REDIS_URL says" in refused.output

    assert addresses.dsn == empty_database_dsn
    assert addresses.nodes == {"node-1": redis_url}
    assert {path.name for path in place.iterdir()} == {"env", "lock", "stack.json"}
    run("down", "--directory", place)
    assert set(states(place).values()) == {"running"}


def test_a_given_server_that_is_down_fails_in_one_line_without_its_password(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", f"postgresql://bob:{SECRET}@127.0.0.1:1/bank")
    monkeypatch.setenv("MQLAYER_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("MQLAYER_BROKER_URL", f"redis://:{SECRET}@127.0.0.1:1/0")

    result = run("up", "--servers-only", "--directory", place, code=1)

    assert "127.0.0.1:1/bank is not available" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert SECRET not in result.output
    shown = run("status", "--directory", place, code=1)
    assert "not reached" in shown.stdout
    assert SECRET not in shown.output
    assert place.joinpath("stack.json").stat().st_mode & 0o077 == 0


@pytest.mark.full
def test_addresses_of_the_stack_itself_in_the_environment_are_not_taken_for_given(
    running: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in addresses_of(running).environment().items():
        monkeypatch.setenv(name, value)
    run("down", "--directory", running)
    up(running)
    assert set(states(running).values()) == {"running"}


def test_addresses_show_no_password() -> None:
    given = GivenAddresses(f"postgresql://bob:{SECRET}@db/x", (f"redis://:{SECRET}@r",), f"redis://:{SECRET}@r")
    addresses = Addresses(given.dsn, {"node-1": given.redis_urls[0]}, given.broker_url)
    assert SECRET not in repr(given) + repr(addresses)


def test_a_later_owner_of_a_recorded_pid_is_not_taken_for_the_server(running: Path) -> None:
    stack = Stack(running)
    stack._redis("node-1").kill()
    broker = ProcessRecord.load(running / "broker").process
    assert broker is not None
    ProcessRecord(port=stack._redis("node-1").port, process=ProcessId(broker.pid, "0")).save(running / "node-1")

    assert states(running)["node-1"] == "stopped"
    stack._redis("node-1").stop()
    assert states(running)["broker"] == "running"


def test_two_commands_at_once_do_not_change_one_stack(place: Path) -> None:
    place.mkdir()
    with _locked(place):
        assert "another `up` or `down`" in run("up", "--directory", place, code=1).stderr


def test_commands_use_the_stack_that_is_here(place: Path, running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_here(place).dsn.get_secret_value() == ""
    addresses = addresses_of(running)
    monkeypatch.setenv("MQLAYER_LEASE_S", "3")
    settings = settings_here(running)
    assert settings.control_dsn() == addresses.dsn
    assert settings.broker_url.get_secret_value() == addresses.broker_url
    assert settings.lease_s == 3


def test_commands_prefer_the_addresses_in_the_environment(running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_DSN", "postgresql://elsewhere/x")
    assert settings_here(running).control_dsn() == "postgresql://elsewhere/x"


@pytest.mark.slow
def test_up_runs_the_relay_and_the_worker_until_down(place: Path) -> None:
    run("up", "--nodes", "1", "--directory", place)
    assert states(place) == dict.fromkeys(["postgres", "node-1", "broker", "worker", "relay"], "running")
    run("down", "--directory", place)
    assert set(states(place).values()) == {"stopped"}
