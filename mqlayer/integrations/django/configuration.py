"""mqlayer's settings from Django's: `MQLAYER = {"KEY_PREFIX": "shop", …}` and `DATABASES`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from psycopg import pq
from psycopg.conninfo import make_conninfo

from mqlayer.env_file import PREFIX, env_file
from mqlayer.postgres.dsn import parse_dsn
from mqlayer.settings import OTHERS, Settings

DSN: Final = f"{PREFIX}DSN"
DATABASE: Final = "DATABASE"
"""The option that names the alias of the database with outbox and fence."""
_names: Final[dict[str, str]] = {}


def options() -> Mapping[str, Any]:
    """Return the setting MQLAYER. Raises ImproperlyConfigured for an option that there is not."""
    found: Mapping[str, Any] = getattr(settings, "MQLAYER", {})
    known = {
        DATABASE,
        *(name.upper() for name in Settings.model_fields),
        *(name.removeprefix(PREFIX) for name in OTHERS),
    }
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ImproperlyConfigured(
                f"MQLAYER has no option {name!r}" + (f": did you mean {near[0]!r}?" if near else "")
            )
    return found


def database_alias() -> str:
    """Return the alias of the database with outbox and fence."""
    return str(options().get(DATABASE, "default"))


def export_options() -> None:
    """Put the options into the environment, also for the processes that this one starts; set variables stay."""
    for name, value in options().items():
        if name != DATABASE and value is not None:
            os.environ.setdefault(f"{PREFIX}{name}", str(value))


def database_settings() -> dict[str, Any]:
    """Return the DSN of Django's database, as it is now: of tests, another one."""
    dsn = dsn_of(connections[database_alias()])
    return {"dsn": dsn} if dsn else {}


def note_database() -> None:
    """Keep the name that a test runner replaces."""
    alias = database_alias()
    _names[alias] = connections[alias].settings_dict["NAME"]


def settings_of_tests() -> dict[str, Any]:
    """Return the DSN of Django's test database, where it stands for MQLAYER_DSN's."""
    connection = connections[database_alias()]
    given = os.environ.get(DSN, "") or env_file().get(DSN, "")
    if not given or not is_of_tests(connection):
        return {}
    test = dsn_of(connection)
    stands_for = (*place_of(test)[:2], _names[connection.alias])
    return {"dsn": test} if test and place_of(given) == stands_for else {}


def is_of_tests(connection: Any) -> bool:
    """Return whether Django's test runner made the database."""
    name, test = connection.settings_dict["NAME"], connection.settings_dict.get("TEST", {}).get("NAME")
    if not name or name == _names.get(connection.alias, name):
        return False
    return bool(name == test or name.startswith(TEST_DATABASE_PREFIX))


def place_of(dsn: str) -> tuple[str, str, str]:
    """Return a DSN's host, port and database."""
    parts = parse_dsn(dsn)
    return str(parts.get("host", "")), str(parts.get("port", "5432")), str(parts.get("dbname", ""))


def dsn_of(connection: Any) -> str:
    """Return the DSN of a Django connection, "" for one that is not to Postgres."""
    if connection.vendor != "postgresql":
        return ""
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    parameters = connection.get_connection_params()
    return make_conninfo(**{name: value for name, value in parameters.items() if name in known})
