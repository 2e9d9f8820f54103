"""What newer servers add, by the server's own CPU time: `python -m tests.matrix.additions [PROGRAM …]`.

For each program (by default the Redis of PATH) a line of JSON with microseconds per call. CPU time hardly depends on
what else the machine does. A command that the server lacks is null.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import redis

from mqlayer.stack.ports import free_port

CALLS: Final = 20_000
BATCH: Final = 500
ROUNDS: Final = 3
STREAM: Final = "log"
Call = tuple[str | int, ...]


@contextmanager
def server(program: str, *options: str) -> Iterator[redis.Redis]:
    """Lend a server without persistence: its CPU is what is measured."""
    port = free_port(0)
    with tempfile.TemporaryDirectory() as place:
        command = [program, "--port", str(port), "--dir", place, "--save", "", *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis.Redis(port=port, protocol=2)
        try:
            _await(client)
            yield client
        finally:
            client.close()
            process.kill()
            process.wait()


def _await(client: redis.Redis) -> None:
    deadline = time.monotonic() + 10.0
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
        else:
            return


def per_call(client: redis.Redis, calls: Callable[[int], Sequence[Call]], prepare: Callable[[], None]) -> float | None:
    """Return the least microseconds of CPU per number over some rounds; None where the server lacks a command."""
    found = []
    for _ in range(ROUNDS):
        client.flushall()
        prepare()
        before = _cpu(client)
        try:
            for start in range(0, CALLS, BATCH):
                pipe = client.pipeline(transaction=False)
                add: Callable[..., Any] = pipe.execute_command
                for number in range(start, start + BATCH):
                    for call in calls(number):
                        add(*call)
                pipe.execute()
        except redis.ResponseError as error:
            if "unknown command" in str(error):
                return None
            raise
        found.append((_cpu(client) - before) / CALLS * 1e6)
    return round(min(found), 2)


def _cpu(client: redis.Redis) -> float:
    info: Any = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def measured(client: redis.Redis) -> dict[str, float | None]:
    """Return microseconds per message or field, for what mqlayer does and for what the server adds."""

    def pending() -> None:
        client.xgroup_create(STREAM, "g", id="0", mkstream=True)
        pipe = client.pipeline(transaction=False)
        for number in range(1, CALLS + 1):
            pipe.xadd(STREAM, {"b": "x"}, id=f"0-{number}")
        pipe.execute()
        client.xreadgroup("g", "c", {STREAM: ">"}, count=CALLS)

    def nothing() -> None:
        pass

    def offset(number: int) -> str:
        return f"0-{number + 1}"

    return {
        "xack": per_call(client, lambda n: [("XACK", STREAM, "g", offset(n))], pending),
        "xack_xdel": per_call(
            client, lambda n: [("XACK", STREAM, "g", offset(n)), ("XDEL", STREAM, offset(n))], pending
        ),
        "xackdel": per_call(client, lambda n: [("XACKDEL", STREAM, "g", "ACKED", "IDS", 1, offset(n))], pending),
        "hset": per_call(client, lambda n: [("HSET", "ids", n, "1:2")], nothing),
        "hset_zadd": per_call(client, lambda n: [("HSET", "ids", n, "1:2"), ("ZADD", "ages", n, n)], nothing),
        "hset_hexpire": per_call(
            client, lambda n: [("HSET", "ids", n, "1:2"), ("HEXPIRE", "ids", 300, "FIELDS", 1, n)], nothing
        ),
    }


def main() -> int:
    """Measure each program."""
    for program in sys.argv[1:] or [shutil.which("redis-server") or "redis-server"]:
        for threads in (1, 2):
            with server(program, "--io-threads", str(threads)) as client:
                info: Any = client.info("server")
                name = Path(program).name.partition("-")[0]
                version = info.get(f"{name}_version", info["redis_version"])
                line = {"server": f"{name} {version}", "io_threads": threads, **measured(client)}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
