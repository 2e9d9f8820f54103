"""`mqlayer relay --processes 2`: what becomes of a dead relay's part."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psycopg
import pytest

from mqlayer.outbox import publish
from mqlayer.postgres.database import Database
from mqlayer.relay.lp_leases import LpSets, end_dead_relay
from mqlayer.stack.processes import ProcessId, _started, children_of
from tests.fixtures.forked_programs import start_python
from tests.fixtures.wait import wait_until
from tests.proof.world import World

HOLDERS = "SELECT relay_id, count(*) FROM mqlayer_app.lp_set WHERE relay_id IS NOT NULL GROUP BY 1 ORDER BY 1"


@pytest.mark.full
def test_the_other_relay_takes_the_part_of_a_dead_one_long_before_its_lease_ends(world: World, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MQLAYER_DSN": world.dsn,
        "MQLAYER_KEY_PREFIX": world.key_prefix,
        "MQLAYER_LEASE_S": "120",
    }
    log = tmp_path / "log"
    with psycopg.connect(world.dsn, autocommit=True) as connection, log.open("ab") as said:
        process = start_python("mqlayer", "relay", "--processes", "2", cwd=tmp_path, env=environment, stderr=said)
        try:

            def parts() -> list[int]:
                return [count for _, count in connection.execute(HOLDERS).fetchall()]

            wait_until(lambda: parts() == [8, 8], timeout_s=60, what="each relay has its part")
            victim, _ = children_of(ProcessId(process.pid, _started(process.pid) or ""))
            os.kill(victim.pid, signal.SIGKILL)
            for number in range(200):
                publish(connection, "orders", key=f"key-{number}", body=b"")
            wait_until(lambda: relayed(connection) == 200, timeout_s=60, what="all messages relayed")
            wait_until(lambda: parts() == [8, 8], timeout_s=60, what="the dead one's successor has a part")
            assert log.read_text().count("dead_relay_ended") == 1
            assert "lp_sets=8" in log.read_text()
            process.terminate()
            assert process.wait(20) == 0
            assert parts() == []
        finally:
            process.kill()
            process.wait()
            sys.stderr.write(log.read_text())


def relayed(connection: psycopg.Connection) -> int:
    """Return how many messages the relays have recorded as sent."""
    row = connection.execute("SELECT coalesce(sum(seq), 0)::int FROM mqlayer_app.relayed").fetchone()
    return int(row[0]) if row else 0


def test_the_end_of_a_dead_relay_frees_its_part_only(database_dsn: str) -> None:
    """A word that comes twice, or of one that holds nothing, frees nothing."""
    with Database(database_dsn) as database, database.connection() as connection:
        dead, other = LpSets("dead", lease_s=60), LpSets("other", lease_s=60)
        dead.heartbeat(connection)
        other.heartbeat(connection)
        dead.heartbeat(connection)
        other.heartbeat(connection)
        assert (len(dead.owned), len(other.owned)) == (8, 8)
        assert [end_dead_relay(database, "dead") for _ in range(2)] == [8, 0]
        assert len(other.heartbeat(connection).gained) == 8
        assert end_dead_relay(database, "dead") == 0
        assert len(other.owned) == 16
