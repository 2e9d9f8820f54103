"""The bench of peers: what its handler notes, what its table tells, and that a missing system does not end the run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.peers import __main__ as program
from bench.peers import catalogue, client, runner
from bench.peers.catalogue import PEERS
from bench.peers.ground import Ground
from bench.peers.load import BODY_BYTES, CheckedHandler, keyed_bodies, keyed_body, part_of, quantile_ms, usual_ms
from bench.peers.packages import NodePackages, PythonPackages, cache_place, unpacked_debian
from bench.peers.peer import Peer, PeerMissing, PeerServers
from bench.peers.processor_time import used_by
from bench.peers.report import PeerRow, table
from bench.peers.runner import measure

ROOT = Path(__file__).parents[2]


class AbsentPeer(Peer):
    """A system whose server can't be had."""

    name, stored, shape = "absent", "nowhere", "none"

    def serve(self, ground: Ground) -> AbstractContextManager[PeerServers]:
        raise PeerMissing("no such server here")

    def publisher(self, url: str, queue: str) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def consume(self, url: str, queue: str, handler: CheckedHandler) -> None:
        raise NotImplementedError


class BrokenPeer(AbsentPeer):
    """A system whose client fails."""

    name = "broken"

    @contextmanager
    def serve(self, ground: Ground) -> Iterator[PeerServers]:
        yield PeerServers("nowhere", (), "none")

    def client(self, ground: Ground) -> list[str | Path]:
        return [sys.executable, "-c", "raise SystemExit('no way')"]


class FakeClients:
    """Clients that answer at once."""

    def __init__(self) -> None:
        self.peer, self.servers = AbsentPeer(), PeerServers("nowhere", (), "none")
        self.published: dict[str, int] = {}

    def publish(self, queue: str, count: int, keys: int) -> dict[str, Any]:
        self.published[queue] = count
        return {"per_s": 1.0, "cpu_s": 1.0}

    def consume(self, queue: str, count: int, **_: float) -> int:
        return count

    def paced(self, count: int) -> dict[str, Any]:
        return {"p50_ms": 1.0, "p99_ms": 2.0, "worst_ms": 3.0}

    def result(self, count: int) -> dict[str, Any]:
        return {"per_s": 1.0, "cpu_s": 1.0, "handled": count, "out_of_order": 0}


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with Ground(cache=tmp_path) as lent:
        yield lent


def test_bodies_have_one_size_and_their_keys_come_in_turn() -> None:
    bodies = keyed_bodies(0, 40, 20)
    assert {len(one.body) for one in bodies} == {BODY_BYTES}
    assert [one.key for one in bodies[:2]] == [one.key for one in bodies[20:22]] == ["key-0", "key-1"]
    assert part_of("key-11") == 3


def test_the_handler_is_done_with_each_message_once_and_counts_repetitions() -> None:
    handler = CheckedHandler(3)
    for number in (0, 1, 1, 0):
        handler(keyed_body(number, 3, 0).body)
    assert (handler.judged().repeated, handler.done.is_set()) == (2, False)
    handler(keyed_body(2, 3, 0).body.decode())
    assert handler.done.is_set()
    assert handler.judged().out_of_order == 0


def test_a_message_that_begins_before_its_keys_former_one_has_ended_is_out_of_order() -> None:
    handler = CheckedHandler(4, pause_ms=30.0)
    first, second, third, fourth = (keyed_body(number, 1, 0).body for number in range(4))
    beside = threading.Thread(target=handler, args=(first,))
    beside.start()
    handler.began.wait()
    handler(second)
    beside.join()
    assert handler.judged().out_of_order == 1
    handler(fourth)
    handler(third)
    # One too early, one too late.
    assert handler.judged().out_of_order == 3


def test_latencies_run_from_the_time_in_the_body_to_the_begin_of_the_handler() -> None:
    handler, now_ns = CheckedHandler(2), time.monotonic_ns()
    handler(keyed_body(0, 1, now_ns - 5_000_000).body)
    handler(keyed_body(1, 1, now_ns).body)
    first, second = handler.judged().latencies_ns
    assert 5_000_000 <= first <= time.monotonic_ns() - now_ns + 5_000_000
    assert 0 <= second <= time.monotonic_ns() - now_ns
    assert handler.judged().per_s > 0
    assert CheckedHandler(1).judged().per_s == 0


def test_quantiles_are_of_sorted_times_in_ms() -> None:
    assert quantile_ms([3_000_000, 1_000_000, 2_000_000], 0.5) == 2.0
    assert quantile_ms([1_000_000], 0.99) == 1.0


def test_one_pause_decides_no_quantile_of_a_run() -> None:
    calm, paused = [1_000_000] * 100, [1_000_000] * 50 + [90_000_000] * 50
    assert usual_ms(calm * 4 + paused, 0.99) == 1.0
    assert usual_ms(paused * 3 + calm * 2, 0.99) == 90.0
    assert math.isnan(usual_ms([], 0.99))


def test_the_table_shows_figures_and_names_what_was_left_out_with_its_reason() -> None:
    rows = [
        PeerRow(
            name="kept", messages=100, publish_per_s=12_345.6, p50_ms=1.25, worst_ms=9.1, ordered=100, stored="on disk"
        ),
        PeerRow(name="loose", ordered=1_000, out_of_order=312),
        PeerRow(name="free", ordered=1_000, out_of_order=7, promises_order=False),
        PeerRow(name="lucky", ordered=1_000, promises_order=False),
        PeerRow(name="gone", skipped="no server"),
    ]
    lines = table(rows).splitlines()
    assert "| kept | 100 | 12,346 | - | 1.2 | - | 9 | kept | - | on disk |" in lines[2]
    assert "| 312 of 1,000 early |" in lines[3]
    assert "| not promised: 7 of 1,000 early |" in lines[4]
    assert "| not promised |" in lines[5]
    assert lines[-1] == "Left out: gone: no server"
    assert table(rows[4:]) == "Left out: gone: no server"


def test_a_system_that_cant_be_had_is_left_out_with_its_reason(ground: Ground) -> None:
    assert measure(AbsentPeer(), ground, 100) == PeerRow(name="absent", skipped="no such server here")


def test_a_system_whose_client_fails_is_left_out_with_its_last_words(ground: Ground) -> None:
    assert "no way" in measure(BrokenPeer(), ground, 100).skipped


def test_a_system_that_is_too_slow_for_the_number_asked_for_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AbsentPeer, "most_messages", 200)
    for asked, given in ((100, 100), (1_000, 200)):
        clients = FakeClients()
        assert runner.figures(clients, asked).messages == given  # type: ignore[arg-type]
        assert clients.published["rates"] == given


def test_a_client_without_figures_is_killed_in_time(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PATIENCE_S", 0.2)
    monkeypatch.setattr(BrokenPeer, "client", lambda *_: ["sh", "-c", "exec tail -f /dev/null"])
    assert "within 0.2 s" in measure(BrokenPeer(), ground, 100).skipped


def test_packages_that_are_there_are_used_and_their_failures_have_a_reason(tmp_path: Path) -> None:
    packages = PythonPackages("small", ("one", "two"), tmp_path)
    packages.programs.mkdir(parents=True)
    packages.python.symlink_to(sys.executable)
    (tmp_path / "small" / "packages").write_text("one\ntwo")
    packages.ensure()
    assert packages.answer("print(1 + 1)") == "2"
    with pytest.raises(PeerMissing, match="python failed: oh no"):
        packages.answer("raise SystemExit('oh no')")
    packages.remove()
    with pytest.raises(PeerMissing, match="FileNotFoundError"):
        packages.answer("print(1)")


def test_packages_of_npm_that_are_there_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    packages = NodePackages("small", ("one",), tmp_path)
    with pytest.raises(PeerMissing, match="npm: FileNotFoundError"):
        packages.ensure()
    (packages.place / "packages").write_text("one")
    packages.ensure()
    (packages.place / "node_modules" / "one").mkdir(parents=True)
    (packages.place / "node_modules" / "one" / "package.json").write_text('{"version": "3.2.1"}')
    assert packages.version("one") == "3.2.1"


def test_debians_packages_need_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerMissing, match="apt-get"):
        unpacked_debian(("anything",), tmp_path / "root")


def test_packages_stay_outside_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MQLAYER_PEERS_CACHE", raising=False)
    assert not cache_place().is_relative_to(ROOT)


def test_the_run_prints_the_table_and_a_json_object_per_system(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (catalogue, program):
        monkeypatch.setattr(module, "PEERS", (AbsentPeer(),))
    program.main(["absent"], messages=100)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Left out: absent: no such server here"
    assert json.loads(printed[-1])["skipped"] == "no such server here"


def test_each_system_says_what_stored_means_and_where_its_settings_are_documented() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    for peer in PEERS:
        assert peer.stored
        assert peer.shape
        assert peer.sources
        assert all(source.startswith("https://") or (ROOT / source).exists() for source in peer.sources)


def test_clients_modules_import_nothing_that_only_the_project_has() -> None:
    """A system's own environment has no driver, no typer and no mqlayer."""
    told = "import sys, bench.peers.client; print({name.partition('.')[0] for name in sys.modules})"
    names = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"mqlayer", "redis", "psycopg", "msgspec", "typer"} & {
        name.strip("'") for name in names[1:-2].split(", ")
    }


def test_processor_time_of_a_process_counts_its_ended_children() -> None:
    work = "import time\nwhile time.process_time() < 0.2: pass"
    burn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE) as parent:
        until = threading.Event()
        while used_by([parent.pid]) < 0.1 and not until.wait(0.02):
            pass
        parent.communicate(b"\n")
    assert used_by([parent.pid]) == 0.0


def test_a_clients_own_processor_time_is_counted() -> None:
    before_s = client.used_cpu_s()
    while client.used_cpu_s() - before_s < 0.02:
        sum(range(10_000))
