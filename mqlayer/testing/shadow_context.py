"""Redirect a handler's transaction into a scratch schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mqlayer.consuming.api.debug_context import DebugContext
from mqlayer.domain.message import Record
from mqlayer.errors import InvalidInput
from mqlayer.postgres.caller_connections import caller_errors, check_in_transaction, driver_cursor

_LEAD: Final = """
SELECT set_config('search_path', quote_ident(%s) || ', ' || current_setting('search_path'), true),
       to_regnamespace(quote_ident(%s)) IS NOT NULL,
       (SELECT t FROM unnest(%s::text[]) AS t WHERE to_regclass(t) IS NOT NULL
        AND has_table_privilege(t, 'INSERT, UPDATE, DELETE, TRUNCATE') LIMIT 1),
       current_user
"""


class ShadowTarget(NamedTuple):
    """`guarded`: tables that the role must not be able to change."""

    schema: str
    guarded: Sequence[str]


class ShadowContext(DebugContext):
    """Names without a schema mean the scratch schema from `fence` or `inbox` on."""

    __slots__ = ("_target",)

    def __init__(self, topic: str, group: str, partition: int, record: Record, target: ShadowTarget) -> None:
        super().__init__(topic, group, partition, record, attempts=0)
        self._target = target

    def _refuse_commit(self, connection: Any) -> None:
        check_in_transaction(connection)
        target = self._target
        with caller_errors(connection), driver_cursor(connection) as cursor:
            cursor.execute(_LEAD, (target.schema, target.schema, list(target.guarded)))
            _, is_there, writable, role = cursor.fetchone()
        if not is_there:
            raise InvalidInput(
                "the handler's connection is not to the application's database: there is no scratch schema"
            )
        if writable is not None:
            raise InvalidInput(
                f"the handler's role {role!r} may change {writable}, so a statement that names the schema would: use a "
                "role that may only read it, or --trust-names where the handler names no schema"
            )
        self.rolled_back = True
