"""Names in our SQL functions: a caller can have none of them mean something of his."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql

from mqlayer.postgres.database import connect
from mqlayer.postgres.queries import query
from tests.fixtures.functions import GOOD, call, signatures
from tests.fixtures.servers import DatabaseMaker
from tests.fixtures.variants import some_of

# All but the rules look at one database, which a worker makes once.
pytestmark = pytest.mark.xdist_group("search_paths")

ROLE: Final = "mqlayer_test_intruder"
Signatures = dict[str, dict[str, str]]
SHORT: Final = {
    "smallint": "int2", "integer": "int4", "bigint": "int8", "double precision": "float8", "boolean": "bool",
    "timestamp with time zone": "timestamptz",
}  # fmt: skip
SCHEMAS: Final = ["mqlayer", "mqlayer_app", "mqlayer_archive"]
# Functions that run with their owner's rights beside those of applications, and what calls them.
INNER: Final = {
    "mqlayer.timeline_v1": "SELECT mqlayer.timeline_v1()",
    "mqlayer.system_v1": "SELECT mqlayer.system_v1()",
    "mqlayer.server_seen_v1": "SELECT mqlayer.server_seen_v1()",
    "mqlayer.server_replaced_v1": "SELECT mqlayer.server_replaced_v1('{}')",
    "mqlayer.server_repair_v1": "SELECT mqlayer.server_repair_v1('{}')",
    "mqlayer.numbers_used_v1": "SELECT mqlayer.numbers_used_v1()",
    "mqlayer_app.timeline_v1": "SELECT mqlayer_app.timeline_v1()",
    "mqlayer_app.term_v1": "SELECT mqlayer_app.term_v1()",
    "mqlayer_archive.day_make_v1": "SELECT mqlayer_archive.day_make_v1(date '2030-01-01')",
    "mqlayer_archive.day_index_v1": "SELECT mqlayer_archive.day_index_v1(date '2030-01-01')",
    "mqlayer_archive.day_drop_v1": "SELECT mqlayer_archive.day_drop_v1(date '2030-01-01')",
    "mqlayer_archive.lock_v1": "SELECT mqlayer_archive.lock_v1()",
    "mqlayer.has_v1": "SELECT mqlayer.has_v1('view', 'consume')",
    "mqlayer.has_for_v1": "SELECT mqlayer.has_for_v1('consume', 'orders/g')",
    "mqlayer.groups_v1": "SELECT mqlayer.groups_v1()",
    "mqlayer.may_create_group_v1": "SELECT mqlayer.may_create_group_v1(1, 'g', 1)",
    "mqlayer.topic_schema_put_v1": "SELECT mqlayer.topic_schema_put_v1('orders', 1, 'backward', '{}', 'a')",
    "mqlayer.check_group_v1": "SELECT mqlayer.check_group_v1(1)",
    "mqlayer.check_console_v1": "SELECT mqlayer.check_console_v1()",
    "mqlayer.console_session_begin_v1": (
        "SELECT mqlayer.console_session_begin_v1("
        "'a-session-has-thirty-two-bytes-a', 'ann', 'viewer', false, 'p', 60, 60)"
    ),
    "mqlayer.console_session_v1": "SELECT mqlayer.console_session_v1('a-session-has-thirty-two-bytes-a', true)",
    "mqlayer.console_session_end_v1": "SELECT mqlayer.console_session_end_v1('a-session-has-thirty-two-bytes-a')",
    "mqlayer.members_forget_v1": "SELECT mqlayer.members_forget_v1(1)",
    "mqlayer.beginnings_forget_v1": "SELECT mqlayer.beginnings_forget_v1(1)",
    "mqlayer.parked_messages_end_v1": (
        "SELECT mqlayer.parked_messages_end_v1(1, '{1}', '{1}', '{1}', '{true}', 1.0, 'm')"
    ),
    "mqlayer.parked_messages_end_v2": (
        "SELECT mqlayer.parked_messages_end_v2(1, '{1}', '{k}', '{1}', '{1}', '{true}', 1.0, 'm')"
    ),
    "mqlayer.parked_key_end_v1": "SELECT mqlayer.parked_key_end_v1(1, 1::smallint, 'k')",
    "mqlayer.parked_keys_forget_v1": "SELECT mqlayer.parked_keys_forget_v1(1, '{1}', '{k}')",
    "mqlayer.retired_messages_drop_v1": "SELECT mqlayer.retired_messages_drop_v1(1, 10)",
    "mqlayer.retired_keys_drop_v1": "SELECT mqlayer.retired_keys_drop_v1(1, 10)",
    "mqlayer_app.has_v1": "SELECT mqlayer_app.has_v1('view', 'consume')",
    "mqlayer_app.has_for_v1": "SELECT mqlayer_app.has_for_v1('consume', 'orders/g')",
    "mqlayer_app.check_group_v1": "SELECT mqlayer_app.check_group_v1(1)",
    "mqlayer_app.check_topic_v1": "SELECT mqlayer_app.check_topic_v1('orders')",
    "mqlayer_app.check_versions_v1": "SELECT mqlayer_app.check_versions_v1('other')",
    "mqlayer_app.publish_further_v1": "SELECT mqlayer_app.publish_further_v1('orders', 'k', 'x', NULL)",
    "mqlayer_app.fence_copy_v1": "SELECT mqlayer_app.fence_copy_v1(1, 2, 0, 0::smallint, 64::smallint)",
    "mqlayer_app.inbox_copy_v1": "SELECT mqlayer_app.inbox_copy_v1(1, 2, 0, '', 10)",
    "mqlayer_app.topic_drop_v1": "SELECT mqlayer_app.topic_drop_v1(99, 'gone', true)",
    "mqlayer_app.topic_rows_drop_v1": "SELECT mqlayer_app.topic_rows_drop_v1(99, 10)",
    "mqlayer_app.outbox_renew_v1": "SELECT mqlayer_app.outbox_renew_v1(true)",
    "mqlayer_app.outbox_recover_v1": "SELECT mqlayer_app.outbox_recover_v1(NULL, '{}', '{}', '{}', '{}')",
    "mqlayer.bodies_named_v1": "SELECT mqlayer.bodies_named_v1('{a}')",
    "mqlayer_app.large_body_cut_v1": "SELECT mqlayer_app.large_body_cut_v1(10, 60)",
    "mqlayer_app.large_body_waits_v1": (
        "SELECT mqlayer_app.large_body_waits_v1('00000000-0000-4000-8000-000000000001')"
    ),
    "mqlayer_app.large_body_sent_v1": "SELECT mqlayer_app.large_body_sent_v1(1)",
    "mqlayer.protocol_admit_v1": "SELECT mqlayer.protocol_admit_v1(1, 1000)",
    "mqlayer.protocol_finalize_v1": "SELECT mqlayer.protocol_finalize_v1(1, true)",
    "mqlayer.protocol_reopen_v1": "SELECT mqlayer.protocol_reopen_v1()",
    "mqlayer_app.protocol_finalize_v1": "SELECT mqlayer_app.protocol_finalize_v1(1, true)",
    "mqlayer_app.protocol_reopen_v1": "SELECT mqlayer_app.protocol_reopen_v1()",
    "mqlayer.process_beat_v1": """
        SELECT mqlayer.process_beat_v1('{"process_id": "p", "kind": "worker", "name": "n", "host": "h", "pid": 1,
            "version": "1", "least": 1, "most": 1000, "acts_on": 1}', 10)""",
    "mqlayer.process_beat_v2": """
        SELECT mqlayer.process_beat_v2('{"process_id": "p", "kind": "worker", "name": "n", "host": "h", "pid": 1,
            "version": "1", "least": 1, "most": 1000, "acts_on": 1}', 10)""",
    "mqlayer.process_end_v1": "SELECT mqlayer.process_end_v1('p')",
    "mqlayer.member_admit_v1": """
        INSERT INTO mqlayer.member (group_id, member_id, host, pid, lease_until, most)
        VALUES (1, 'm', 'h', 1, pg_catalog.now(), 1000)""",
    "mqlayer_app.relay_admit_v1": """
        INSERT INTO mqlayer_app.relay (relay_id, lease_until, most) VALUES ('r', pg_catalog.now(), 1000)""",
    "mqlayer.group_known_v1": (
        "INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) VALUES (1, 'h', 'latest', '{1}')"
    ),
    "mqlayer.assignment_epoch_given_v1": (
        "INSERT INTO mqlayer.assignment (group_id, partition_id, epoch) VALUES (1, 1, 0)"
    ),
    "mqlayer.parked_count_v1": """
        WITH k AS (INSERT INTO mqlayer.parked_key (group_id, lp, name, cause) VALUES (1, 1, 'k', 'retry'))
        INSERT INTO mqlayer.parked_message
            (group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body)
        VALUES (1, 1, 'k', 1, 1, 1, 1, 1, 'k', '1:1:1:1', 'x')""",
}
# Where the role may publish and consume: of one topic and one group, so that each call is asked for its right.
GRANTED: Final = f"""
    INSERT INTO mqlayer_app.granted (role, privilege, scope)
        VALUES ('{ROLE}', 'publish', 'orders'), ('{ROLE}', 'consume', 'orders/g'), ('{ROLE}', 'operate', ''),
               ('{ROLE}', 'work', '');
    INSERT INTO mqlayer.granted (role, privilege) VALUES ('{ROLE}', 'consume'), ('{ROLE}', 'view');
    INSERT INTO mqlayer.node (name, url) VALUES ('n', 'redis://n:1');
    INSERT INTO mqlayer.topic (name, strategy, body_limit, backlog_limit) VALUES ('orders', 'strict', 1000, 1);
    INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to) VALUES (1, 1, 0, 1024);
    INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) VALUES (1, 'g', 'latest', '{{1}}');
    GRANT INSERT ON mqlayer.consumer_group, mqlayer.assignment, mqlayer.parked_key, mqlayer.parked_message TO {ROLE};
    GRANT INSERT ON mqlayer.member TO {ROLE};
    GRANT INSERT ON mqlayer_app.relay TO {ROLE};
    GRANT USAGE ON SEQUENCE mqlayer.member_session TO {ROLE};
    INSERT INTO mqlayer.granted (role, privilege) VALUES ('{ROLE}', 'operate'), ('{ROLE}', 'work');
    GRANT SELECT ON mqlayer.consumer_group, mqlayer.partition TO {ROLE};
    INSERT INTO mqlayer_app.known_group (group_id, scope) VALUES (1, 'orders/g') ON CONFLICT DO NOTHING;
"""
TRAP: Final = """
CREATE FUNCTION intruder.trap() RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    IF current_user <> 'mqlayer_test_intruder' THEN
        RAISE NOTICE 'trapped %', current_user;
        BEGIN
            EXECUTE 'ALTER ROLE mqlayer_test_intruder SUPERUSER';
        EXCEPTION WHEN OTHERS THEN NULL;
        END;
    END IF;
    RETURN true;
END $$
"""


def rows(connection: psycopg.Connection, statement: str, *parameters: Any) -> list[Any]:
    return connection.execute(statement, parameters).fetchall()


def all_at_once(connection: psycopg.Connection, statements: Sequence[str | sql.Composed]) -> None:
    """Run some hundred statements in one round trip."""
    connection.execute(b";".join(one.encode() if isinstance(one, str) else one.as_bytes() for one in statements))


# -- the rule --------------------------------------------------------------------------------------------------------


def test_every_function_of_ours_looks_its_names_up_in_pg_temp_last(database_dsn: str) -> None:
    """Left out of a path, pg_temp comes first for types and tables, whatever the rest of the path is.

    A function that is parsed when it is made looks no name up later; only such a one may be without a path.
    """
    with connect(database_dsn) as connection:
        found = rows(
            connection,
            "SELECT p.oid::regprocedure::text, n.nspname, "
            "(SELECT setting FROM unnest(p.proconfig) AS c(setting) WHERE setting LIKE 'search_path=%%'), "
            "p.prosqlbody IS NOT NULL FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
            "WHERE n.nspname = ANY(%s)",
            SCHEMAS,
        )
    assert len(found) >= 40
    wrong = [
        name
        for name, schema, path, parsed in found
        if path != f"search_path=pg_catalog, {schema}, pg_temp" and not (parsed and path is None)
    ]
    assert wrong == []


def test_no_function_with_its_owners_rights_is_everybodys(database_dsn: str) -> None:
    with connect(database_dsn) as connection:
        found = rows(
            connection,
            "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
            "WHERE n.nspname = ANY(%s) AND p.prosecdef AND (p.proacl IS NULL OR EXISTS "
            "(SELECT FROM aclexplode(p.proacl) AS acl WHERE acl.grantee = 0))",
            SCHEMAS,
        )
    assert found == []


def test_no_text_in_a_function_depends_on_how_backslashes_are_read(database_dsn: str) -> None:
    """Where standard_conforming_strings is off in a caller's session, a backslash in a text begins an escape."""
    with connect(database_dsn) as connection:
        found = rows(
            connection,
            "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
            r"WHERE n.nspname = ANY(%s) AND p.prosqlbody IS NULL AND strpos(p.prosrc, '\') > 0",
            SCHEMAS,
        )
    assert found == []


# -- each kind of name, in front of each function --------------------------------------------------------------------


def shadow_types(connection: psycopg.Connection, schema: str) -> None:
    """A domain of the name of each type, whose check is the caller's code."""
    types = rows(
        connection,
        "SELECT typname FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype = 'b' "
        "AND typelem = 0 AND typname !~ '^pg_|^_|^reg' AND typname <> 'cstring'",
    )
    text = sql.SQL("CREATE DOMAIN {0}.{1} AS pg_catalog.{1} CHECK (intruder.trap())")
    all_at_once(connection, [text.format(*map(sql.Identifier, (schema, name))) for (name,) in types])


def shadow_functions(connection: psycopg.Connection, schema: str) -> None:
    """A function of the name and arguments of each one that ours name."""
    functions = rows(
        connection,
        "SELECT format('%%I.%%I(%%s) RETURNS %%s%%s', %s::text, f.proname, pg_get_function_identity_arguments(f.oid), "
        "CASE WHEN f.proretset THEN 'SETOF ' ELSE '' END, format_type(f.prorettype, NULL)), "
        "f.proretset OR f.prorettype = 'void'::regtype "
        "FROM pg_proc f WHERE f.pronamespace = 'pg_catalog'::regnamespace AND f.prokind = 'f' "
        "AND f.provariadic = 0 AND NOT f.prorettype = ANY(ARRAY['internal', 'trigger', 'record']::regtype[]) "
        "AND NOT 'internal'::regtype = ANY(f.proargtypes) AND NOT 'cstring'::regtype = ANY(f.proargtypes) "
        "AND f.proargmodes IS NULL AND EXISTS (SELECT FROM pg_proc ours "
        "WHERE ours.pronamespace::regnamespace::text LIKE 'mqlayer%%' AND ours.prosrc ~ ('\\m' || f.proname || '\\M'))",
        schema,
    )
    assert len(functions) > 100
    made = []
    for signature, bare in functions:
        body = "PERFORM intruder.trap(); RETURN" + (";" if bare else " NULL;")
        made.append(f"CREATE FUNCTION {signature} LANGUAGE plpgsql AS $$ BEGIN {body} END $$")
    all_at_once(connection, made)


def shadow_operators(connection: psycopg.Connection, schema: str) -> None:
    """An operator of the name and types of each one that ours may use."""
    types = ["int2", "int4", "int8", "text", "bytea", "bool", "jsonb", "timestamptz", "interval", "float8", "numeric"]
    operators = rows(
        connection,
        "SELECT o.oprname, format_type(o.oprleft, NULL), format_type(o.oprright, NULL), format_type(o.oprresult, NULL) "
        "FROM pg_operator o WHERE o.oprnamespace = 'pg_catalog'::regnamespace AND o.oprkind = 'b' "
        "AND o.oprleft = ANY(%s::regtype[]) AND o.oprright = ANY(%s::regtype[])",
        types,
        types,
    )
    assert len(operators) > 200
    made = []
    for number, (name, left, right, result) in enumerate(operators):
        made.append(
            f"CREATE FUNCTION {schema}.operator_{number}({left}, {right}) RETURNS {result} LANGUAGE plpgsql "
            "AS $$ BEGIN PERFORM intruder.trap(); RETURN NULL; END $$"
        )
        made.append(
            f"CREATE OPERATOR {schema}.{name} (LEFTARG = {left}, RIGHTARG = {right}, "
            f"FUNCTION = {schema}.operator_{number})"
        )
    all_at_once(connection, made)


def shadow_relations(connection: psycopg.Connection, schema: str) -> None:
    """A view of the name of each table, view and sequence of ours, and of the catalogues that ours name."""
    relations = rows(
        connection,
        "SELECT DISTINCT relname FROM pg_class WHERE relkind IN ('r', 'p', 'v', 'S') AND relname <> 'migration' "
        "AND (relnamespace::regnamespace::text LIKE 'mqlayer%%' "
        "OR relname IN ('pg_class', 'pg_proc', 'pg_sequences', 'pg_namespace'))",
    )
    text = sql.SQL("CREATE VIEW {}.{} AS SELECT intruder.trap() AS trap")
    all_at_once(connection, [text.format(*map(sql.Identifier, (schema, name))) for (name,) in relations])


def shadow_casts(connection: psycopg.Connection, schema: str) -> None:
    """A type that becomes text, and text that becomes it, by the caller's code."""
    connection.execute(f"CREATE TYPE {schema}.sneaky AS ENUM ('orders')")
    for source, target in (("sneaky", "text"), ("text", "sneaky")):
        names = [f"{schema}.{one}" if one == "sneaky" else one for one in (source, target)]
        connection.execute(
            f"CREATE FUNCTION {schema}.cast_to_{target}({names[0]}) RETURNS {names[1]} LANGUAGE plpgsql AS $$ BEGIN "
            f"PERFORM intruder.trap(); RETURN {'NULL' if target == 'sneaky' else chr(39) + 'orders' + chr(39)}; END $$"
        )
        kind = "IMPLICIT" if target == "text" else "ASSIGNMENT"
        connection.execute(
            f"CREATE CAST ({names[0]} AS {names[1]}) WITH FUNCTION {schema}.cast_to_{target}({names[0]}) AS {kind}"
        )


def shadow_collations(connection: psycopg.Connection, schema: str) -> None:
    """Collations hold no code; another order of the same name could still part what has to be locked in one order."""
    for name in ("C", "POSIX", "ucs_basic"):
        connection.execute(f"""CREATE COLLATION {schema}."{name}" (provider = icu, locale = 'de')""")


KINDS: Final[dict[str, Callable[[psycopg.Connection, str], None]]] = {
    "type": shadow_types,
    "function": shadow_functions,
    "operator": shadow_operators,
    "relation": shadow_relations,
    "cast": shadow_casts,
    "collation": shadow_collations,
}


@pytest.fixture(scope="module")
def intruded(database_maker: DatabaseMaker, migrated_template: str) -> Iterator[str]:
    """A database in which a role may call every function; nothing else."""
    with database_maker.copy_of(migrated_template) as dsn, connect(dsn) as owner:
        owner.execute(f"DROP ROLE IF EXISTS {ROLE}")
        owner.execute(f"CREATE ROLE {ROLE}")
        for schema in SCHEMAS:
            owner.execute(f"GRANT USAGE ON SCHEMA {schema} TO {ROLE}")
            owner.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {ROLE}")
        owner.execute(query("outbox_topic_put"), {"topic_id": 1, "name": "orders", "body_limit": 1_000_000})
        owner.execute(query("outbox_counters_put"), {"topic_id": 1})
        owner.execute(GRANTED.encode())
        yield dsn
        owner.execute(f"DROP OWNED BY {ROLE}; DROP ROLE {ROLE}")


@pytest.fixture
def intruder(intruded: str) -> Iterator[psycopg.Connection]:
    """A connection of the role, with the trap in a schema of its own; all of it is taken back with its transaction."""
    with closing(psycopg.connect(intruded, autocommit=True)) as connection:
        connection.execute("SELECT setval('mqlayer.repaired_at', 1)")
        with connection.transaction(force_rollback=True):
            connection.execute(f"CREATE SCHEMA intruder AUTHORIZATION {ROLE}")
            connection.execute(f"SET SESSION AUTHORIZATION {ROLE}")
            connection.execute(TRAP)
            yield connection
        assert not connection.closed


@pytest.fixture
def types(intruded: str) -> Signatures:
    """The arguments of each function to call, with types that no path can change."""

    def plain(type_: str) -> str:
        name = type_.removesuffix("[]")
        return f"pg_catalog.{SHORT.get(name, name)}" + ("[]" if type_.endswith("[]") else "")

    with connect(intruded) as connection:
        found = signatures(connection, ROLE)
    assert set(GOOD) <= set(found)
    return {function: {name: plain(one) for name, one in found[function].items()} for function in GOOD}


def call_all(connection: psycopg.Connection, types: Signatures) -> list[str]:
    """Call each function of ours that runs with its owner's rights, or is granted; return how the trap was sprung."""
    notices: list[str] = []
    connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    for function, of in types.items():
        before = len(notices)
        with connection.transaction(force_rollback=True):
            call(connection, function, GOOD[function], of)
        if len(notices) > before:
            notices.append(function)
    for text in INNER.values():
        with connection.transaction(force_rollback=True):
            connection.execute(text.replace("date '", "pg_catalog.date '"))
    return [notice for notice in notices if "trapped" in notice or notice in GOOD]


DEFINERS: Final = set(GOOD) - {"tags_v1"}


def test_every_function_with_its_owners_rights_is_called_here(intruder: psycopg.Connection) -> None:
    found = rows(
        intruder,
        "SELECT n.nspname || '.' || p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace "
        "WHERE n.nspname = ANY(%s) AND p.prosecdef",
        SCHEMAS,
    )
    assert {name for (name,) in found} == set(INNER) | {f"mqlayer_app.{name}" for name in DEFINERS}


@pytest.mark.parametrize("schema", some_of(["pg_temp", "intruder"], 2))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_callers_runs_as_the_owner(
    intruder: psycopg.Connection, types: Signatures, kind: str, schema: str
) -> None:
    KINDS[kind](intruder, schema)
    intruder.execute("SET search_path = pg_temp, intruder, pg_catalog")
    assert call_all(intruder, types) == []
    intruder.execute("RESET search_path")
    assert rows(intruder, "SELECT rolsuper FROM pg_roles WHERE rolname = %s", ROLE) == [(False,)]


def test_the_trap_is_sprung_where_a_function_leaves_pg_temp_out(
    intruded: str, intruder: psycopg.Connection, types: Signatures
) -> None:
    """What the rule prevents; without it the tests above would notice nothing."""
    with connect(intruded) as owner:
        of_publish = "ALTER FUNCTION mqlayer_app.publish_v1 SET search_path = pg_catalog, mqlayer_app"
        owner.execute(of_publish)
        shadow_types(intruder, "pg_temp")
        intruder.execute("SET search_path = pg_temp, intruder, pg_catalog")
        sprung = call_all(intruder, types)
        intruder.execute("RESET search_path")
        assert "trapped mqlayer_owner" in sprung
        assert "publish_v1" in sprung
        assert rows(intruder, "SELECT rolsuper FROM pg_roles WHERE rolname = %s", ROLE) == [(False,)], "no superuser"
        owner.execute(of_publish + ", pg_temp")
