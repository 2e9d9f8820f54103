"""An outbox that lost commits: put back to an earlier state, recovered under a new source, and what it brought."""

from __future__ import annotations

from tests.proof.world import World


def values(world: World) -> dict[str | None, list[str]]:
    """Return what the partitions hold, by key."""
    found: dict[str | None, list[str]] = {}
    for record in world.records():
        found.setdefault(record.key, []).append(record.value)
    return found


def expected(keys: int, *parts: tuple[str, int]) -> dict[str | None, list[str]]:
    """Return what was published: per part, so many messages of each key in turn."""
    return {
        f"key-{key}": [f"{tag}-{number}" for tag, count in parts for number in range(key, count, keys)]
        for key in range(keys)
    }


def recovered(world: World) -> bool:
    """Say whether a relay works on the outbox under its new source."""
    rows = world.rows(
        "SELECT 1 FROM mqlayer.source s JOIN mqlayer_app.identity i USING (outbox_uuid) "
        "WHERE i.replaces IS NOT NULL AND i.timeline > 0"
    )
    return len(rows) == 1


class EarlierState:
    """What an outbox held at a moment, as in a copy of its disk: neither timeline nor database change with it."""

    TABLES = ("counter", "outbox", "relayed")

    def __init__(self, world: World) -> None:
        self._world = world
        for table in self.TABLES:
            world.rows(f"DROP TABLE IF EXISTS public.{table}_then")
            world.rows(f"CREATE TABLE public.{table}_then AS SELECT * FROM mqlayer_app.{table}")

    def come_back(self) -> None:
        """Let the outbox hold that again."""
        for table in self.TABLES:
            self._world.rows(f"TRUNCATE mqlayer_app.{table}")
            self._world.rows(f"INSERT INTO mqlayer_app.{table} SELECT * FROM public.{table}_then")
