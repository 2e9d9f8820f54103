"""Case 1: SQL and Python give a key the same LP."""

from __future__ import annotations

import psycopg
from hypothesis import given, settings
from hypothesis import strategies as st

from mqlayer.domain.routing import lp_of
from tests.unit.test_routing import GOLDEN

# Postgres holds no NUL and no lone surrogate in text.
KEYS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=100)


def test_sql_and_python_agree_on_every_key(database_dsn: str) -> None:
    with psycopg.connect(database_dsn, autocommit=True) as connection:

        @settings(max_examples=200, deadline=None)
        @given(KEYS)
        def agree(key: str) -> None:
            assert connection.execute("SELECT mqlayer_app.lp_v1(%s)", (key,)).fetchone() == (lp_of(key.encode()),)

        agree()
        for key, lp in GOLDEN.items():
            assert connection.execute("SELECT mqlayer_app.lp_v1(%s)", (key,)).fetchone() == (lp,)
