"""The pytest plugin in a user's suite, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from mqlayer.stack import GivenAddresses, processes
from mqlayer.stack.process_record import FILE_NAME, ProcessRecord
from mqlayer.testing.servers import DIRECTORY_PREFIX, TestServers
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.servers import Postgres
from tests.fixtures.wait import wait_until

PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "test-with-real-servers.md"
FILES: Final = ("ledger.py", "conftest.py", "test_ledger.py", "test_engines.py", "test_faults.py", "test_exercise.py")
"""What the page's Python blocks are, in their order."""
WAITS: Final = """
import time
from pathlib import Path

def test_waits(mqlayer_stack):
    Path("names").write_text(f"{mqlayer_stack.servers.directory} {mqlayer_stack.dsn}")
    time.sleep(600)
"""
ENGINE: Final = """
from ledger import Order, app
from mqlayer.testing import RealApp

def test_an_engine_runs_where_the_option_says(mqlayer_engine):
    with mqlayer_engine(app) as engine:
        engine.publish("orders", b'{"amount": 10}', key="ann")
        assert len(engine.run().handled("orders")) == 1
        assert isinstance(engine, RealApp)
"""


def suite(directory: Path, program: str = "") -> list[str]:
    """Write the page's files, or another test; return the command that runs it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    for name, text in zip(FILES, blocks, strict=True):
        # One list for each fault is enough here.
        (directory / name).write_text(text.replace("        reset=", "        examples=1,\n        reset="))
    tests = [name for name in FILES if name.startswith("test_")]
    if program:
        tests = ["test_waits.py"]
        (directory / tests[0]).write_text(program)
    # Plugins that the page has no use for take a third of a second in each process.
    left_out = [f"-pno:{name}" for name in ("cacheprovider", "randomly", "hypothesispytest", "anyio", "timeout")]
    return [sys.executable, "-m", "pytest", "-q", *left_out, *tests]


def without_addresses(**given: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MQLAYER_", "PYTEST_"))}
    return kept | given


def databases(server: Postgres) -> list[Any]:
    return ask_postgres(server.dsn("postgres"), "SELECT datname FROM pg_database WHERE datname ~ '^mqlayer_test_.*_'")


@pytest.mark.full
@pytest.mark.slow
def test_the_suite_of_the_page_passes_under_xdist_and_leaves_nothing(postgres_server: Postgres, tmp_path: Path) -> None:
    """A database and a prefix per test, on a Postgres that is given, with nodes of each worker's own."""
    given = without_addresses(MQLAYER_DSN=postgres_server.dsn("postgres"))
    (tmp_path / "test_engine.py").write_text(ENGINE)
    command = [*suite(tmp_path), "test_engine.py", "--mqlayer=real", "-n", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=300, check=False)
    assert "10 passed" in done.stdout, done.stdout + done.stderr
    assert databases(postgres_server) == []


@pytest.mark.full
@pytest.mark.slow
def test_the_servers_of_a_killed_suite_end(tmp_path: Path) -> None:
    """Also those that it could not end: Postgres, two nodes, and their data."""
    names = tmp_path / "names"
    process = subprocess.Popen(suite(tmp_path, WAITS), cwd=tmp_path, env=without_addresses())
    with ExitStack() as cleanup:
        cleanup.callback(process.wait)
        cleanup.callback(process.kill)
        wait_until(lambda: names.exists() and names.read_text(), timeout_s=60, what="the test waits")
        directory = Path(names.read_text().split()[0])
        assert directory.name.startswith(DIRECTORY_PREFIX)
        servers = [ProcessRecord.load(record.parent).process for record in directory.glob(f"*/{FILE_NAME}")]
        assert len(servers) == 3
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not directory.exists(), timeout_s=60, what="the data are gone")
    assert not [one for one in servers if one is not None and processes.is_running(one)]


@pytest.mark.full
def test_the_database_of_a_killed_suite_goes_with_the_next_one(postgres_server: Postgres, redis_url: str) -> None:
    given = GivenAddresses(postgres_server.dsn("postgres"), (redis_url,))
    killed, living = TestServers(given=given), TestServers(given=given)
    with ExitStack() as left:
        left.callback(killed.close)
        # As its process leaves them: its session ends, and with it its lock.
        dsn, prefix = left.enter_context(killed.database())
        with redis.Redis.from_url(redis_url) as client:
            client.set(f"{prefix}:one", "1")
            session = killed._session
            assert session is not None
            lives = f"SELECT 1 FROM pg_stat_activity WHERE pid = {session.info.backend_pid}"
            session.close()
            wait_until(lambda: not ask_postgres(postgres_server.dsn("postgres"), lives), what="its session ends")
            with living, living.database() as (other, _):
                assert [name for (name,) in databases(postgres_server) if name in dsn] == []
                assert [name for (name,) in databases(postgres_server) if name in other] != []
                assert client.get(f"{prefix}:one") is None
    assert databases(postgres_server) == []


def test_the_plugin_imports_nothing_but_itself() -> None:
    program = """
import sys, pytest
before = set(sys.modules)
import mqlayer.testing.plugin
print(*sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    kept = ["mqlayer", "mqlayer.testing", "mqlayer.testing.plugin", "mqlayer.testing.waiting"]
    assert done.stdout.split() == kept
