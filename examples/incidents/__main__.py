"""Start the shop, then break something on demand: type a line, or write one into the file `do` of the directory.

python -m examples.incidents DIRECTORY [--port 9480]

break handler    a release that fails for 2 % of the customers; `fix handler` deploys the next one
break hot        resellers order thousands of times a minute, all from one partition
break node       a Redis dies; `fix node` brings its machine back
break relay      the relay hangs; `fix relay` restarts it
break producer   a program keeps a transaction open behind a publish; `fix producer` ends the program
stop             end everything
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from examples.incidents.shop import FAILS, TOPIC, Load, hold_open

MQLAYER = [sys.executable, "-m", "mqlayer"]


class Shop:
    """The processes of the shop. `say`: where lines go."""

    def __init__(self, place: Path, port: int) -> None:
        self._place = place
        self._stack = place / ".mqlayer"
        self._cleanup = ExitStack()
        self._run("up", "--directory", str(self._stack), "--nodes", "2")
        self._cleanup.callback(self._run, "down", "--directory", str(self._stack))
        self._environment = {**os.environ, **variables_of(self._stack / "env"), "INCIDENTS": str(place),
                             "PYTHONPATH": str(Path(__file__).parents[2])}  # fmt: skip
        self._run("topic", "create", TOPIC, "--partitions", "4")
        for _ in range(2):
            self._start("consume", "examples.incidents.shop:app", "--concurrency", "4")
        self._start("console", "--port", str(port))
        dsn = self._environment.get("MQLAYER_APP_DSN") or self._environment["MQLAYER_DSN"]
        self._dsn, self.load = dsn, Load(dsn, per_s=60)
        self.load.start()
        self._cleanup.callback(self.load.stop)
        self._ends: dict[str, Callable[[], None]] = {}

    def close(self) -> None:
        """End everything."""
        for end in self._ends.values():
            end()
        self._cleanup.close()

    def break_(self, what: str) -> None:
        """Let something go wrong."""
        match what:
            case "handler":
                (self._place / FAILS.name).touch()
                self._ends[what] = (self._place / FAILS.name).unlink
            case "hot":
                self.load.hot = True
                self._ends[what] = lambda: setattr(self.load, "hot", False)
            case "node":
                os.kill(self._pid("node-2"), signal.SIGKILL)
                self._ends[what] = lambda: self._run("up", "--directory", str(self._stack))
            case "relay":
                pid = self._pid("relay")
                os.kill(pid, signal.SIGSTOP)
                self._ends[what] = lambda: os.kill(pid, signal.SIGCONT)
            case "producer":
                self._ends[what] = hold_open(self._dsn)
            case _:
                raise KeyError(what)

    def fix(self, what: str) -> None:
        """Make a repair that lies outside of mqlayer."""
        self._ends.pop(what)()

    def _run(self, *words: str) -> None:
        environment = getattr(self, "_environment", dict(os.environ))
        subprocess.run([*MQLAYER, *words], env=environment, check=True, cwd=self._place)

    def _start(self, *words: str) -> None:
        process = subprocess.Popen([*MQLAYER, *words], env=self._environment, cwd=self._place)

        def end() -> None:
            process.terminate()
            process.wait(30)

        self._cleanup.callback(end)

    def _pid(self, part: str) -> int:
        said = subprocess.run(
            [*MQLAYER, "status", "--directory", str(self._stack), "--json"],
            check=False, capture_output=True, text=True, cwd=self._place, env=self._environment,
        ).stdout  # fmt: skip
        for line in said.splitlines():
            found = json.loads(line)
            if found.get("name") == part or found.get("part") == part:
                return int(found["pid"])
        raise LookupError(part)


def variables_of(file: Path) -> dict[str, str]:
    """Return the variables of a file of `export NAME=VALUE` lines."""
    words = (shlex.split(line) for line in file.read_text().splitlines() if "=" in line and not line.startswith("#"))
    pairs = (one[-1].partition("=") for one in words)
    return {name: value for name, _, value in pairs}


def lines_into(orders: queue.Queue[str], place: Path) -> None:
    """Pass on lines of standard input, and of the file `do`."""
    pipe = place / "do"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)

    def of_pipe() -> None:
        while True:
            with pipe.open() as lines:
                for line in lines:
                    orders.put(line.strip())

    def of_input() -> None:
        for line in sys.stdin:
            orders.put(line.strip())

    for read in (of_pipe, of_input):
        threading.Thread(target=read, daemon=True).start()


def main() -> None:
    """Run until `stop` or Ctrl+C."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("directory", type=Path)
    words.add_argument("--port", type=int, default=9480)
    given = words.parse_args()
    place = given.directory.absolute()
    place.mkdir(parents=True, exist_ok=True)
    shop, orders = Shop(place, given.port), queue.Queue[str]()
    try:
        lines_into(orders, place)
        print("ready", flush=True)
        for line in iter(orders.get, "stop"):
            act, _, what = line.partition(" ")
            try:
                {"break": shop.break_, "fix": shop.fix}[act](what)
                print(f"done: {line}", flush=True)
            except (KeyError, LookupError) as error:
                print(f"not done: {line}: {error!r}\n{__doc__}", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        shop.close()


if __name__ == "__main__":
    main()
