"""The previous release and this one in one group, through an upgrade and back, under load and kills.

The previous release's wheel is built from a commit; its members, relays, producers and workers are real processes, as
are those of this one. The histories of both, the streams and the sink are judged together.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from mqlayer.errors import Conflict
from mqlayer.groups.admin import set_group
from mqlayer.maintenance.upgrades import finalize, run_contracts, upgrade_status
from mqlayer.postgres.migrations import SCHEMAS, migrate
from mqlayer.runtime.runtime import Runtime
from tests.chaos.actors import GROUP, TOPIC
from tests.chaos.harness.run import Length, shown
from tests.chaos.harness.stores import drained
from tests.chaos.harness.upgrade_run import UpgradeRun
from tests.fixtures.commands import Commands
from tests.fixtures.forked_programs import Process, start_python
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.kill_scenes import KEYS, PARTITIONS, ROOT, KillScene, commit_numbered, judge, kill_scene_on
from tests.fixtures.previous_release import FORMER_PROTOCOL, PreviousRelease
from tests.fixtures.wait import wait_until
from tests.proof.history import History
from tests.proof.runtimes import runtime_of

PROGRAM: Final = """
import os
import time
from pathlib import Path

import mqlayer
from tests.chaos.actors import _book_into_sink
from tests.proof.history import History

app, directory = mqlayer.App(), Path(os.environ["MQLAYER_TEST_DIRECTORY"])
if os.environ["MQLAYER_TEST_NAME"].startswith(os.environ.get("MQLAYER_TEST_STUCK", "-")):
    from tests.chaos import actors

    book = actors._delivery
    actors._delivery = lambda *arguments: (time.sleep(1_000), book(*arguments))[1]
_book_into_sink(app, History(directory, f"{os.environ['MQLAYER_TEST_NAME']}-{os.getpid()}"))
"""
PHASE: Final = Length(seconds=0, faults=8, every_s=0.4, settling_s=120.0, pause_s=0.08)
"""Of each phase of an upgrade under faults."""
EVERY_S: Final = 0.3
"""How often a message of each key is published."""
TOO_OLD: Final = 78
"""With what a process ends whose code is refused."""


class MixedScene:
    """A topic in a database of the previous release, under load, and processes of both releases."""

    def __init__(self, scene: KillScene, former: PreviousRelease) -> None:
        self.scene, self._former = scene, former
        self.runtime: Runtime = runtime_of(
            scene.database, settings=scene.settings, application=scene.database, actor="ann@desk"
        )
        (scene.directory / "mixed_program.py").write_text(PROGRAM)
        scene.environment |= {
            "MQLAYER_TEST_DIRECTORY": str(scene.directory),
            "MQLAYER_TEST_FAILING": "0",
            # The old members must outlive a stall of the machine.
            "MQLAYER_LEASE_S": "4.0",
        }

    def start(self, name: str, *words: str, module: str = "mqlayer") -> Process:
        """Run a command of mqlayer, of the previous release where the name begins with "old"."""
        environment = self.scene.environment | {"MQLAYER_TEST_NAME": name, "PYTHONPATH": str(ROOT)}
        with (self.scene.directory / f"{name}.log").open("ab") as log:
            if name.startswith("old"):
                process = self._former.start(module, *words, env=environment, cwd=self.scene.directory, log=log)
            else:
                process = start_python(
                    module, *words, env=environment, cwd=self.scene.directory, stdout=log, stderr=log
                )
        self.scene.running.append(process)
        return process

    def receiver(self, name: str) -> Process:
        """Start a receiver, and wait until it is known."""
        process = self.start(name, "receiver", name, str(self.scene.directory), module="tests.chaos.actors")
        lives = "SELECT count(*)::int FROM mqlayer.process WHERE pid = %s AND kind = 'receiver'"
        dsn = self.scene.settings.control_dsn()
        wait_until(lambda: ask_postgres(dsn, lives, [process.pid]) == [(1,)], timeout_s=30, what=f"{name} receives")
        return process

    def member(self, name: str) -> Process:
        """Start a member, and wait until it owns a partition."""
        process = self.start(name, "consume", "mixed_program:app")
        wait_until(lambda: self.owns(process), timeout_s=30, what=f"{name} owns partitions")
        return process

    def owns(self, process: Process) -> bool:
        """Say whether a process is a member that owns partitions."""
        statement = (
            "SELECT count(*)::int FROM mqlayer.assignment a JOIN mqlayer.member m "
            "ON (m.group_id, m.member_id) = (a.group_id, a.member_id) WHERE m.pid = %s AND m.lease_until > now()"
        )
        assert process.poll() is None, self.said()
        return ask_postgres(self.scene.settings.control_dsn(), statement, [process.pid]) != [(0,)]

    def said(self, name: str = "*") -> str:
        """Return what a process logged, or all."""
        logs = self.scene.directory.glob(f"{name}.log")
        return "\n".join(f"{log.name}: {log.read_text()[-2_000:]}" for log in logs)

    def command(self, name: str, *words: str) -> int:
        """Run a command to its end; return its exit code."""
        return self.start(name, *words).wait(60)

    def protocols(self, kind: str) -> set[int]:
        """Return the newest versions that living processes of a kind know."""
        return {one.most for one in upgrade_status(self.runtime).living if one.kind == kind and one.beats}

    def handled(self) -> int:
        """Return how many effects there are."""
        [(count,)] = ask_postgres(self.scene.settings.control_dsn(), "SELECT count(*)::int FROM sink")
        return int(count)

    def await_more(self, count: int = KEYS) -> None:
        """Wait until so many more messages have their effects."""
        wanted = self.handled() + count
        wait_until(lambda: self.handled() >= wanted, timeout_s=60, what="the group goes on")

    def has_contracted(self) -> bool:
        """Run contract steps, and say whether none is left."""
        run_contracts(self.runtime, dict.fromkeys(SCHEMAS, self.scene.settings.control_dsn()))
        return not upgrade_status(self.runtime).contracts

    @contextmanager
    def load(self) -> Iterator[None]:
        """Publish a message of each key again and again meanwhile."""
        stopping, failed = threading.Event(), list[BaseException]()

        def publish() -> None:
            try:
                with self.scene.database.connection() as connection, History(self.scene.directory, "load") as history:
                    while not stopping.is_set():
                        first = self.scene.published
                        commit_numbered(connection, history, range(first, first + KEYS))
                        self.scene.published += KEYS
                        stopping.wait(EVERY_S)
            except BaseException as error:  # noqa: BLE001 - told at the end
                failed.append(error)

        thread = threading.Thread(target=publish, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
        assert not failed, failed


@pytest.fixture
def mixed(
    empty_database_dsn: str, redis_url: str, key_prefix: str, tmp_path: Path, previous_release: PreviousRelease
) -> Iterator[MixedScene]:
    """A topic whose database the previous release's `mqlayer migrate` made."""
    environment = os.environ | {"MQLAYER_DSN": empty_database_dsn, "MQLAYER_KEY_PREFIX": key_prefix}

    def old(*words: str) -> None:
        with (tmp_path / "old-migrate.log").open("ab") as log:
            assert previous_release.start("mqlayer", *words, env=environment, log=log).wait(60) == 0

    def make() -> None:
        old("node", "register", "n1", redis_url)
        old("topic", "create", TOPIC, "--partitions", str(len(PARTITIONS)))

    old("migrate")
    with kill_scene_on(redis_url, dsn=empty_database_dsn, prefix=key_prefix, directory=tmp_path, make=make) as scene:
        yield MixedScene(scene, previous_release)


def drain(mixed: MixedScene) -> None:
    """Wait until all that was published has its effect."""
    dsn = mixed.scene.settings.control_dsn()
    wait_until(lambda: drained(dsn), timeout_s=60, what=f"every message has its effect; {mixed.said()}")


def end(*processes: Process) -> None:
    """End processes in order."""
    for process in processes:
        process.terminate()
    assert [process.wait(30) for process in processes] == [0] * len(processes)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_baselines_are_as_the_previous_release_has_them(schema: str, previous_release: PreviousRelease) -> None:
    """Where this fails, put the change into a new step: a database of that release would never get it."""
    for path in sorted((previous_release.place / "site" / "mqlayer" / "sql" / "migrations" / schema).glob("*.sql")):
        assert (ROOT / "sql" / "migrations" / schema / path.name).read_bytes() == path.read_bytes(), path.name


def test_members_of_two_releases_share_a_group_until_the_older_ones_are_drained(mixed: MixedScene) -> None:
    """Old schema, old and new members, a kill, a restart in the window, a finalization with `--drain`."""
    relay = mixed.start("old-relay", "relay")
    old = mixed.member("old-1")
    with mixed.load():
        mixed.await_more()
        assert [step.name for step in migrate(mixed.scene.settings.control_dsn())] == [
            "expand_producer_topics", "expand_pop_key_classes", "expand_durability", "expand_analytics_schedules",
            "expand_lake", "expand_parked_messages_end", "expand_relay_place",
            "expand_outbox_replica_identity", "expand_fence_walk", "expand_publish_place", "expand_fence_batches",
        ]  # fmt: skip
        new = mixed.member("new-1")
        new_relay = mixed.start("new-relay", "relay")
        wait_until(lambda: len(mixed.protocols("relay")) == 2, timeout_s=20, what="relays of both releases")
        end(relay)
        mixed.await_more()
        old.kill()
        old.wait()
        old = mixed.member("old-2")
        assert mixed.protocols("member") >= {FORMER_PROTOCOL}
        assert len(mixed.protocols("member")) == 2, "the older one that restarts in the window joins again"
        assert finalize(mixed.runtime) == "blocked"
        mixed.await_more()
        assert finalize(mixed.runtime, drain=True, timeout_s=30) == "finalized"
        assert old.wait(20) == TOO_OLD, mixed.said()
        assert mixed.start("old-3", "consume", "mixed_program:app").wait(30) == TOO_OLD
        assert "upgrade mqlayer on this machine" in mixed.said()
        mixed.await_more()
    drain(mixed)
    # A relay says on which version it acts every ten seconds.
    end(new_relay)
    wait_until(mixed.has_contracted, timeout_s=20, what="the contract steps")
    end(new)
    judge(mixed.scene)


def test_commands_of_either_release_say_what_the_other_schema_wants(mixed: MixedScene, run: Commands) -> None:
    """New code before `migrate`; old code in the window, and once the version is in force."""
    migrate_first = "run `mqlayer migrate`"
    for words in (("upgrade", "status"), ("topic", "list"), ("upgrade", "finalize", "--yes")):
        assert migrate_first in run(*words).stderr, words
    assert mixed.command("new-member", "consume", "mixed_program:app") == 1
    assert migrate_first in mixed.said("new-member")
    assert "application 0002 expand_relay_place" in run.text("migrate")
    assert mixed.command("old-list", "topic", "list") == 0
    assert mixed.command("old-again", "migrate") == 0
    assert f"protocol {FORMER_PROTOCOL} is in force" in run.text("upgrade", "status")
    assert "is in force" in run.text("upgrade", "finalize", "--yes")
    for late in (("migrate",), ("relay",)):
        assert mixed.command(f"old-{late[0]}", *late) in (1, TOO_OLD)
        assert "upgrade mqlayer on this machine" in mixed.said(f"old-{late[0]}")


def test_new_processes_go_and_old_ones_go_on_before_the_finalization(mixed: MixedScene) -> None:
    """The way back: nothing of the window is in the way of old code, nor of a second try."""
    mixed.start("old-relay", "relay")
    migrate(mixed.scene.settings.control_dsn())
    new = mixed.member("new-1")
    with mixed.load():
        mixed.await_more()
        new.kill()
        new.wait()
        old = mixed.member("old-1")
        mixed.await_more()
    assert mixed.protocols("member") == {FORMER_PROTOCOL}
    drain(mixed)
    end(old)
    judge(mixed.scene)


@pytest.mark.full
def test_key_classes_of_receivers_come_with_the_finalization(mixed: MixedScene) -> None:
    """Older receivers share the group until then; one that slept through it finds no place that it can't read."""
    relay, old, asleep = mixed.start("old-relay", "relay"), mixed.receiver("old-1"), mixed.receiver("old-2")
    with mixed.load():
        mixed.await_more()
        migrate(mixed.scene.settings.control_dsn())
        new_relay, new = mixed.start("new-relay", "relay"), mixed.receiver("new-1")
        mixed.await_more()
        with pytest.raises(Conflict, match="upgrade finalize"):
            set_group(mixed.runtime, TOPIC, GROUP, key_class="prefix:1", class_concurrency=2)
        end(relay)
        asleep.send_signal(signal.SIGSTOP)
        wait_until(lambda: finalize(mixed.runtime, drain=True) == "finalized", timeout_s=60, what="its lease")
        set_group(mixed.runtime, TOPIC, GROUP, key_class="prefix:1", class_concurrency=2)
        mixed.await_more(4 * KEYS)
        asleep.send_signal(signal.SIGCONT)
        mixed.await_more(4 * KEYS)
    drain(mixed)
    for process in (old, asleep, new):
        process.terminate()
        process.wait(30)
    assert all("upgrade mqlayer on this machine" in mixed.said(name) for name in ("old-1", "old-2"))
    end(new_relay)
    judge(mixed.scene)


@pytest.mark.full
def test_a_handler_that_never_ends_holds_a_drain_up_for_its_drain_limit(mixed: MixedScene) -> None:
    """The process ends then, and a new member has the message."""
    mixed.start("old-relay", "relay")
    mixed.scene.environment |= {"MQLAYER_TEST_STUCK": "old"}
    old = mixed.member("old-1")
    migrate(mixed.scene.settings.control_dsn())
    end(mixed.scene.running[0])
    mixed.start("new-relay", "relay")
    new = mixed.member("new-1")
    with mixed.load():
        mixed.await_more()
        assert finalize(mixed.runtime, drain=True) == "draining"
        wait_until(lambda: finalize(mixed.runtime, drain=True) == "finalized", timeout_s=90, what="the drain limit")
        # A release before this one waited for its handlers twice.
        assert old.wait(60) == TOO_OLD
        mixed.await_more()
    drain(mixed)
    end(new)
    judge(mixed.scene)


@pytest.mark.full
def test_processes_that_slept_through_an_upgrade_are_told_when_they_wake_up(mixed: MixedScene) -> None:
    """A stopped relay and member keep a finalization waiting for their leases only."""
    relay, old = mixed.start("old-relay", "relay"), mixed.member("old-1")
    migrate(mixed.scene.settings.control_dsn())
    new_relay, new = mixed.start("new-relay", "relay"), mixed.member("new-1")
    with mixed.load():
        mixed.await_more()
        for process in (relay, old):
            process.send_signal(signal.SIGSTOP)
        wait_until(lambda: finalize(mixed.runtime, drain=True) == "finalized", timeout_s=60, what="their leases")
        wait_until(mixed.has_contracted, timeout_s=60, what="the contract steps")
        for process in (relay, old):
            process.send_signal(signal.SIGCONT)
        assert [relay.wait(60), old.wait(60)] == [TOO_OLD, TOO_OLD], mixed.said("old-relay")
        mixed.await_more()
    drain(mixed)
    end(new, new_relay)
    judge(mixed.scene)


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [1, 2])
def test_an_upgrade_under_faults_loses_reverses_and_repeats_nothing(
    previous_release: PreviousRelease, server_directory: Path, seed: int
) -> None:
    """Members, relays, publishers, drivers and workers of both releases; `tests/chaos/harness/upgrade_run.py`."""
    UpgradeRun.former = previous_release
    with ExitStack() as cleanup:
        directory = server_directory / f"upgrade-{seed}"
        directory.mkdir()
        directory.chmod(0o755)
        report = UpgradeRun(directory, seed, cleanup, "", (), pause_s=0.08).play(PHASE)
    told = json.dumps(shown(report))
    print(told)  # noqa: T201
    assert report["clean"], told
    assert {"kill", "restart", "stop"} <= set(report["faults_by_kind"]), told
