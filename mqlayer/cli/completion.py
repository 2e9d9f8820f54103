"""Names that a shell completes: those of topics and groups. Without an answer of Postgres, there are none."""

from __future__ import annotations

from typing import Any

import typer


def topic_names(incomplete: str) -> list[str]:
    """Return the topics whose names begin so."""
    return _names("topic_names", {"begins": incomplete})


def group_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the groups, of the topic that was named before if one was, whose names begin so."""
    return _names("group_names", {"begins": incomplete, "topic": ctx.params.get("topic")})


def _names(name: str, facts: dict[str, Any]) -> list[str]:
    from mqlayer.cli.addresses import settings_here
    from mqlayer.postgres.database import connect
    from mqlayer.postgres.queries import query

    try:
        with connect(settings_here().control_dsn()) as connection:
            return [found for (found,) in connection.execute(query(name), facts).fetchall()]
    except Exception:  # noqa: BLE001 - whatever is wrong, the shell's line stays as it is typed
        return []
