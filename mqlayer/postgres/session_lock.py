"""Locks that end with the session that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mqlayer.postgres.database import address_of, connect_directly, driver_errors
from mqlayer.postgres.queries import query


@contextmanager
def session_lock(
    dsn: str, name: str, facts: Mapping[str, Any], *, purpose: str, application: str
) -> Iterator[Callable[[], None] | None]:
    """Try a lock by a named query, with a connection of its own; yield None if another session has it.

    Else a check, which raises StoreUnavailable once the lock may be lost. Raises as `connect_directly`.
    """
    with connect_directly(dsn, purpose=purpose, application=application) as connection:

        def execute(text: str, values: Mapping[str, Any] | None = None) -> bool:
            with driver_errors(address_of(dsn)):
                ((answer,),) = connection.execute(text.encode(), values).fetchall()
            return bool(answer)

        def check() -> None:
            execute("SELECT true")

        yield check if execute(query(name), facts) else None
