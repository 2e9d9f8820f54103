"""Sources and groups whose ids passed the end of int: publishers and consumers can use numbers up by inserts that they
take back, and every store takes what comes then."""

from __future__ import annotations

from contextlib import closing
from typing import Final

import psycopg
import pytest
from pydantic import SecretStr

from mqlayer.postgres.rights import Right
from mqlayer.settings import Settings
from tests.fixtures.roles import Roles
from tests.fixtures.whole_system import WholeSystem
from tests.fixtures.worker_stores import UseStores

BEYOND: Final = 5_000_000_000
NUMBERED: Final = """
    SELECT k.oid::regclass::text, a.attname, format_type(a.atttypid, NULL)
    FROM pg_attribute a JOIN pg_class k ON k.oid = a.attrelid
    WHERE k.relnamespace::regnamespace::text LIKE 'mqlayer%' AND a.attidentity <> '' AND k.relkind IN ('r', 'p')
      AND has_any_column_privilege(k.oid, 'INSERT')"""


@pytest.mark.parametrize("right", [Right.PUBLISH, Right.CONSUME])
def test_what_a_limited_right_numbers_is_a_bigint(roles: Roles, right: Right) -> None:
    with closing(psycopg.connect(roles.login(right), autocommit=True)) as connection:
        found = connection.execute(NUMBERED.encode()).fetchall()
    assert found
    assert [one for one in found if one[2] != "bigint"] == []


@pytest.mark.full
def test_a_system_works_with_ids_of_sources_and_groups_beyond_the_end_of_int(
    database_dsn: str, redis_url: str, key_prefix: str, use_stores: UseStores
) -> None:
    with closing(psycopg.connect(database_dsn, autocommit=True)) as owner:
        for sequence in ("source_source_id_seq", "consumer_group_group_id_seq"):
            owner.execute("SELECT setval(('mqlayer.' || %s)::regclass, %s)", [sequence, BEYOND])
    use_stores({"MQLAYER_DSN": database_dsn, "MQLAYER_KEY_PREFIX": key_prefix})
    found = WholeSystem(Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix, lease_s=5.0), redis_url).run()
    assert found["in order"]
    assert found["counts"]["redriven"] == found["counts"]["released"] == 1
    assert {len(bodies) for bodies in found["sinks"].values()} == {found["archived"]}
    assert len(found["read"]) == found["archived"]
    with closing(psycopg.connect(database_dsn, autocommit=True)) as owner:
        assert owner.execute("SELECT min(source) > %s FROM mqlayer_archive.record", [BEYOND]).fetchone() == (True,)
        assert owner.execute("SELECT min(group_id) > %s FROM mqlayer_archive.outcome", [BEYOND]).fetchone() == (True,)
