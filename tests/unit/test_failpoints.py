"""Failpoints act when, and only when, a test asked for it."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mqlayer.failpoints import ALLOWING_VARIABLE, ENVIRONMENT_VARIABLE, FailpointHit, arm, disarm_all, failpoint
from tests.fixtures.failpoints import armed
from tests.fixtures.wait import wait_until
from tests.proof.failpoint_names import failpoint_names, failpoint_uses

REPOSITORY = Path(__file__).resolve().parents[2]


def start_python(program: str, failpoints: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **armed(failpoints), **variables, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_unarmed_failpoint_does_nothing() -> None:
    """Nothing armed: the call returns."""
    failpoint("relay.after_append")


def test_arming_one_failpoint_leaves_the_others_alone() -> None:
    """Only the armed name acts."""
    arm("relay.after_append", "raise")
    failpoint("ack.before_send")


def test_raise_acts_at_the_asked_occurrence_only() -> None:
    """The second time, neither the first nor the third."""
    arm("relay.after_append", "raise", occurrence=2)
    failpoint("relay.after_append")
    with pytest.raises(FailpointHit, match=r"relay\.after_append"):
        failpoint("relay.after_append")
    failpoint("relay.after_append")


def test_a_hit_is_no_error_that_the_library_knows() -> None:
    """FailpointHit derives from Exception alone."""
    assert FailpointHit.__bases__ == (Exception,)


def test_disarming_forgets_actions_and_counts() -> None:
    """After disarm_all an arming counts from one again."""
    arm("relay.after_append", "raise", occurrence=2)
    failpoint("relay.after_append")
    disarm_all()
    failpoint("relay.after_append")
    arm("relay.after_append", "raise", occurrence=2)
    failpoint("relay.after_append")
    with pytest.raises(FailpointHit):
        failpoint("relay.after_append")


def test_many_threads_are_counted_exactly(tmp_path: Path) -> None:
    """Of 2,000 arrivals from eight threads exactly one is the 2,000th."""
    marked = tmp_path / "marked"
    arm("relay.after_append", f"mark:{marked}", occurrence=2_000)
    arm("relay.after_append", f"mark:{marked}", occurrence=2_001)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(failpoint, ["relay.after_append"] * 2_000))
    assert marked.read_bytes() == b"."


def test_mark_appends_a_byte_and_goes_on(tmp_path: Path) -> None:
    """Actions due together act in the order in which they were armed."""
    marked = tmp_path / "marked"
    arm("relay.after_append", f"mark:{marked}")
    arm("relay.after_append", "raise")
    with pytest.raises(FailpointHit):
        failpoint("relay.after_append")
    assert marked.read_bytes() == b"."


def test_wait_holds_the_thread_until_the_file_exists(tmp_path: Path) -> None:
    """The waiting thread passes only after the file was made."""
    door = tmp_path / "door"
    passed = threading.Event()
    arm("relay.after_append", f"wait:{door}")

    def pass_the_door() -> None:
        failpoint("relay.after_append")
        passed.set()

    waiting = threading.Thread(target=pass_the_door)
    waiting.start()
    assert not passed.wait(0.05)
    door.touch()
    assert passed.wait(10)
    waiting.join()


def test_wait_gives_up_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that never appears fails loudly, so no test hangs on it."""
    monkeypatch.setattr("mqlayer.failpoints.WAIT_LIMIT_S", 0.02)
    arm("relay.after_append", f"wait:{tmp_path / 'never'}")
    with pytest.raises(FailpointHit, match="did not appear"):
        failpoint("relay.after_append")


@pytest.mark.parametrize("name", ["relay", "Relay.append", "relay.", ".append", "relay..append", "relay.2", "a.b\n"])
def test_a_malformed_name_is_refused(name: str) -> None:
    """Names are lower-case words joined by dots."""
    with pytest.raises(ValueError, match="must be lower-case words"):
        arm(name, "raise")


@pytest.mark.parametrize("action", ["", "explode", "killed", "RAISE"])
def test_an_unknown_action_is_refused_with_the_list_of_actions(action: str) -> None:
    """The message says what can be asked for."""
    with pytest.raises(ValueError, match=r"unknown action .*kill, stop, raise"):
        arm("relay.after_append", action)


@pytest.mark.parametrize("action", ["wait", "mark:", "kill:now", "raise:"])
def test_an_action_with_a_wrong_path_is_refused(action: str) -> None:
    """Only wait and mark take a path, and they need one."""
    with pytest.raises(ValueError, match="only wait and mark take a path"):
        arm("relay.after_append", action)


def test_an_occurrence_below_one_is_refused() -> None:
    """Counting begins at one."""
    with pytest.raises(ValueError, match="first one is 1"):
        arm("relay.after_append", "raise", occurrence=0)


def test_kill_from_the_environment_lets_nothing_run_after_it() -> None:
    """Neither the next line, nor finally, nor another thread's cleanup."""
    program = (
        "from mqlayer.failpoints import failpoint\n"
        "try:\n"
        "    for turn in range(3):\n"
        "        print(turn, flush=True)\n"
        "        failpoint('relay.after_append')\n"
        "finally:\n"
        "    print('cleanup', flush=True)\n"
    )
    process = start_python(program, "ack.before_send=raise, relay.after_append=kill@2")
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (-signal.SIGKILL, "0\n1\n")


@pytest.mark.parametrize("allowed", ["", "0", "yes"])
def test_failpoints_that_are_not_allowed_do_nothing_and_that_is_said(allowed: str) -> None:
    """Without the second variable, one that was left set kills nothing."""
    program = "from mqlayer.failpoints import failpoint\nfailpoint('relay.after_append')"
    process = start_python(program, "relay.after_append=kill", **{ALLOWING_VARIABLE: allowed})
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, f"{ENVIRONMENT_VARIABLE} does nothing without {ALLOWING_VARIABLE}=1\n")


def test_the_allowing_variable_alone_does_nothing() -> None:
    """No failpoint is named: none acts, and there is nothing to say."""
    process = start_python("from mqlayer.failpoints import failpoint\nfailpoint('relay.after_append')", "")
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


def test_stop_holds_the_process_until_it_is_continued() -> None:
    """SIGSTOP takes hold before the next line; SIGCONT lets it go on there."""
    program = (
        "from mqlayer.failpoints import failpoint\n"
        "print('before', flush=True)\n"
        "failpoint('ack.before_send')\n"
        "print('after', flush=True)\n"
    )
    process = start_python(program, "ack.before_send=stop")
    try:
        wait_until(lambda: is_stopped(process.pid), what="the process stopped")
    finally:
        process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "before\nafter\n")


@pytest.mark.parametrize(
    ("failpoints", "complaint"),
    [
        ("relay.after_append", "is not of the form name=action"),
        ("relay.after_append=explode", "unknown action"),
        ("relay=kill", "must be lower-case words"),
    ],
)
def test_a_malformed_environment_fails_at_import(failpoints: str, complaint: str) -> None:
    """A typing error must not give a test run in which nothing was broken."""
    process = start_python("import mqlayer.failpoints", failpoints)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert complaint in errors


def test_a_path_may_hold_the_sign_of_the_occurrence(tmp_path: Path) -> None:
    """Only a number behind the last sign is an occurrence."""
    marked = tmp_path / "a@b"
    program = "from mqlayer.failpoints import failpoint\n" + "failpoint('ack.before_send')\n" * 3
    process = start_python(program, f"ack.before_send=mark:{marked}@3,ack.before_send=mark:{marked}")
    process.communicate(timeout=20)
    assert marked.read_bytes() == b".."


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_the_scan_finds_names_also_behind_symlinks(tmp_path: Path) -> None:
    """Both ways to call it, and the packages that the tree links to."""
    package, linked = tmp_path / "package", tmp_path / "linked"
    package.mkdir()
    linked.mkdir()
    (package / "relay.py").write_text("failpoint('relay.after_append')\nfailpoints.failpoint('relay.before_append')\n")
    (linked / "tasks.py").write_text("def run():\n    failpoint('task.before_claim')\n")
    (package / "workers").symlink_to(linked)
    assert failpoint_names(package) == {"relay.after_append", "relay.before_append", "task.before_claim"}


def test_the_scan_refuses_a_name_that_is_not_literal(tmp_path: Path) -> None:
    """A computed name could hide from the test that hits every failpoint."""
    (tmp_path / "relay.py").write_text("name = 'relay.after_append'\nfailpoint(name)\n")
    with pytest.raises(ValueError, match=r"relay\.py:2: failpoint takes one literal name"):
        failpoint_uses(tmp_path)


def test_every_failpoint_of_the_library_has_a_name_that_can_be_armed() -> None:
    """The names in the source fit the rule for names."""
    for name in failpoint_names():
        arm(name, "raise")
