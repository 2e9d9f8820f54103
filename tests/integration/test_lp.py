"""Case 1: SQL and Python give a key the same LP, and publish_v1, which computes it in place, does too."""

from __future__ import annotations

import psycopg
from hypothesis import given, settings
from hypothesis import strategies as st

from mqlayer.domain.routing import lp_of
from mqlayer.postgres.queries import query
from tests.proof.golden_lps import GOLDEN_LPS

# Postgres holds no NUL and no lone surrogate in text.
KEYS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=100)


def test_sql_and_python_agree_on_every_key(database_dsn: str) -> None:
    with psycopg.connect(database_dsn, autocommit=True) as connection:

        @settings(max_examples=200, deadline=None)
        @given(KEYS)
        def agree(key: str) -> None:
            assert connection.execute("SELECT mqlayer_app.lp_v1(%s)", (key,)).fetchone() == (lp_of(key.encode()),)

        @settings(max_examples=200, deadline=None)
        @given(KEYS)
        def published(key: str) -> None:
            connection.execute("SELECT mqlayer_app.publish_v1('orders', %s, '')", (key,))
            row = connection.execute("SELECT key, lp FROM mqlayer_app.outbox ORDER BY id DESC LIMIT 1").fetchone()
            assert row == (key, lp_of(key.encode()))

        agree()
        connection.execute(query("outbox_topic_put"), {"topic_id": 1, "name": "orders", "body_limit": 100})
        connection.execute(query("outbox_counters_put"), {"topic_id": 1})
        published()
        for key, lp in GOLDEN_LPS.items():
            assert connection.execute("SELECT mqlayer_app.lp_v1(%s)", (key,)).fetchone() == (lp,)
