"""A Redis that falls back: it restarts with what it held at an earlier moment, or with nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import redis

from mqlayer.stack import RedisServer
from mqlayer.stack.wait import comes_true

REWRITTEN_WITHIN_S = 20.0


class FallBack:
    """What a server held at a moment."""

    def __init__(self, server: RedisServer, place: Path) -> None:
        self._server, self._place = server, place
        place.mkdir()
        # Arming has a node write its file anew, in the background: files come and go meanwhile.
        with redis.Redis.from_url(server.url) as client:
            assert comes_true(lambda: not _is_rewriting(client), within_s=REWRITTEN_WITHIN_S), "its file is never done"
        for path in _data(server.directory):
            _copy(path, place / path.name)

    def happen(self) -> None:
        """Restart the server with that: another run id."""
        lose_all(self._server, start=False)
        for path in _data(self._place):
            _copy(path, self._server.directory / path.name)
        self._server.start()


def lose_all(server: RedisServer, *, start: bool = True) -> None:
    """Restart a server with nothing."""
    server.kill()
    for path in _data(server.directory):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if start:
        server.start()


def _is_rewriting(client: redis.Redis) -> bool:
    facts = client.info("persistence")
    return bool(facts["aof_rewrite_in_progress"] or facts["aof_rewrite_scheduled"])


def _data(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name.startswith("appendonly")]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
