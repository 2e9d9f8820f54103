"""The servers of a race: a Postgres, and a Redis where it is wanted."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from mqlayer.postgres.migrations import migrate
from mqlayer.stack import PostgresServer, RedisServer
from mqlayer.testing.servers import best_place
from tests.fixtures.consumers import Stage
from tests.fixtures.servers import FAST_POSTGRES

TOPIC: Final = "orders"


class Place:
    """The servers of a race, and a seed for each of its rounds."""

    def __init__(self, directory: Path, cleanup: ExitStack) -> None:
        self.directory, self.seed, self._cleanup = directory, 0, cleanup
        self._postgres = PostgresServer(directory / "postgres", options=FAST_POSTGRES)
        self._postgres.start()
        cleanup.callback(self._postgres.erase)
        self._redis: RedisServer | None = None

    def begin(self) -> Path:
        """Begin a round; return an empty directory for its histories."""
        self.seed += 1
        directory = self.directory / f"round{self.seed}"
        directory.mkdir()
        return directory

    def database(self) -> str:
        """Return a new database with both schemas."""
        dsn = self._postgres.create_database(f"race{self.seed}")
        migrate(dsn)
        return dsn

    @property
    def node(self) -> RedisServer:
        """The Redis of all rounds."""
        if self._redis is None:
            self._redis = RedisServer(self.directory / "node")
            self._redis.start()
            self._cleanup.callback(self._redis.erase)
        return self._redis

    @contextmanager
    def stage(self) -> Iterator[Stage]:
        """Lend a topic of two partitions; all rounds share one Redis."""
        stage = Stage(self.database(), self.node.url, prefix=f"race{self.seed}", topic=TOPIC)
        try:
            yield stage
        finally:
            stage.close()


@contextmanager
def place() -> Iterator[Place]:
    """Lend servers for races."""
    with ExitStack() as cleanup:
        name = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="mqchaos-", dir=best_place()))
        Path(name).chmod(0o755)
        yield Place(Path(name), cleanup)
