"""`mqlayer grant` and `revoke` change the rights of one role, and nothing else; the printed SQL does the same."""

from __future__ import annotations

import shutil
import stat
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from psycopg import errors as pg_errors
from psycopg import sql

from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.postgres.rights import SCHEMAS, Right
from tests.fixtures.commands import Commands
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.roles import PASSWORD, Roles
from tests.fixtures.servers import DatabaseMaker
from tests.fixtures.variants import some_of

RIGHTS = [right for right in Right if right is not Right.MIGRATE]
LIMITED = [(Right.PUBLISH, "--topic", "orders"), (Right.CONSUME, "--group", "orders/ledger")]
HELD = """
    WITH held AS (
        SELECT 'schema' AS kind, nspname::text AS object, '' AS part, a.* FROM pg_namespace, aclexplode(nspacl) a
        WHERE nspacl IS NOT NULL
        UNION ALL SELECT 'relation', c.oid::regclass::text, '', a.* FROM pg_class c, aclexplode(relacl) a
        WHERE relacl IS NOT NULL
        UNION ALL SELECT 'column', attrelid::regclass::text, attname, a.* FROM pg_attribute, aclexplode(attacl) a
        WHERE attacl IS NOT NULL
        UNION ALL SELECT 'function', p.oid::regprocedure::text, '', a.* FROM pg_proc p, aclexplode(proacl) a
        WHERE proacl IS NOT NULL
    )
    SELECT kind, object, part, privilege_type, grantor::regrole::text, is_grantable::text FROM held
    WHERE grantee = %(role)s
    UNION ALL SELECT 'member', roleid::regrole::text, '', '', grantor::regrole::text, admin_option::text
    FROM pg_auth_members WHERE member = %(role)s"""

WRITERS_WITHOUT_A_FUNCTION = """
    WITH used AS (
        SELECT i.indrelid AS relation, d.refobjid AS function FROM pg_depend d JOIN pg_index i ON i.indexrelid = d.objid
        WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_proc'::regclass
        UNION SELECT c.conrelid, d.refobjid FROM pg_depend d JOIN pg_constraint c ON c.oid = d.objid
        WHERE d.classid = 'pg_constraint'::regclass AND d.refclassid = 'pg_proc'::regclass
    )
    SELECT u.relation::regclass::text, u.function::regprocedure::text, r.rolname
    FROM used u JOIN pg_roles r ON r.rolname = ANY(%s)
    WHERE has_any_column_privilege(r.oid, u.relation, 'INSERT, UPDATE')
      AND has_function_privilege(r.oid, u.function, 'EXECUTE') = %s"""

Held = set[tuple[str, ...]]


def held(dsn: str, role: str) -> Held:
    """Every privilege of a role in a database, and its rows in the tables of grants that are there."""
    ((oid,),) = ask_postgres(dsn, "SELECT oid FROM pg_roles WHERE rolname = %s", [role])
    found = {tuple(row) for row in ask_postgres(dsn, HELD, {"role": oid})}
    for schema in SCHEMAS.values():
        if ask_postgres(dsn, "SELECT to_regnamespace(%s)", [schema]) != [(None,)]:
            rows = f"SELECT '{schema}', privilege, scope FROM {schema}.granted WHERE role = %s"
            found |= {tuple(row) for row in ask_postgres(dsn, rows, [oid])}
    return found


def test_who_writes_a_table_may_call_the_functions_of_its_indexes_and_checks(database_dsn: str, roles: Roles) -> None:
    names = [roles.name_of(roles.login(right)) for right in RIGHTS]
    assert ask_postgres(database_dsn, WRITERS_WITHOUT_A_FUNCTION, [names, True])
    assert ask_postgres(database_dsn, WRITERS_WITHOUT_A_FUNCTION, [names, False]) == []


def execute(dsn: str, script: str) -> None:
    """Run a script as a database administrator does."""
    try:
        ask_postgres(dsn, script)
    except psycopg.Error:
        ask_postgres(dsn, "ROLLBACK")
        raise


@pytest.fixture
def commands(database_dsn: str, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    """Commands of the owner, on a database that holds both schemas."""
    monkeypatch.setenv("MQLAYER_DSN", database_dsn)
    monkeypatch.delenv("MQLAYER_APP_DSN", raising=False)
    return Commands()


@pytest.fixture
def role(roles: Roles) -> str:
    """A role that has nothing yet."""
    return Roles.name_of(roles.login())


@pytest.mark.parametrize("right", some_of(RIGHTS, 4))
def test_a_right_given_and_taken_leaves_nothing(commands: Commands, database_dsn: str, role: str, right: str) -> None:
    assert commands.text("grant", right, role) == f"{role} may {right}\n"
    given = held(database_dsn, role)
    assert {(schema, right, "") for schema in SCHEMAS.values()} < given
    commands.text("grant", right, role)
    assert held(database_dsn, role) == given
    assert [role, right, "all"] in map(str.split, commands.text("grants").splitlines())
    assert commands.text("revoke", right, role) == f"{role} may no longer {right}\n"
    assert held(database_dsn, role) == set()
    assert role not in commands.text("grants")


def test_the_right_to_migrate_is_to_be_a_member_of_the_owner(
    commands: Commands, database_dsn: str, role: str, roles: Roles
) -> None:
    commands.text("grant", "migrate", role)
    assert {row[:4] for row in held(database_dsn, role)} == {("member", "mqlayer_owner", "", "")}
    assert [role, "migrate", "all"] in map(str.split, commands.text("grants").splitlines())
    migrate(Roles.as_role(role, database_dsn))
    commands.text("revoke", "migrate", role)
    assert held(database_dsn, role) == set()


@pytest.mark.parametrize("right", some_of(RIGHTS, 4))
def test_other_rights_keep_all_that_they_need(
    commands: Commands, database_dsn: str, roles: Roles, role: str, right: str
) -> None:
    roles.give(role, *(other for other in RIGHTS if other != right))
    before = held(database_dsn, role)
    commands.text("grant", right, role)
    commands.text("revoke", right, role)
    assert held(database_dsn, role) == before


@pytest.mark.parametrize(("right", "option", "scope"), some_of(LIMITED, 2))
def test_limits_are_taken_back_one_by_one(
    commands: Commands, database_dsn: str, role: str, right: str, option: str, scope: str
) -> None:
    commands.text("grant", right, role, option, scope)
    one = held(database_dsn, role)
    assert commands.text("grant", right, role, option, f"{scope}2", option, f"{scope}3").endswith(
        f"may {right} {scope}2, {scope}3\n"
    )
    commands.text("revoke", right, role, option, f"{scope}2")
    commands.text("revoke", right, role, option, f"{scope}3")
    assert held(database_dsn, role) == one
    assert [role, right, scope] in map(str.split, commands.text("grants").splitlines())
    commands.text("revoke", right, role, option, scope)
    assert held(database_dsn, role) == set()


@pytest.mark.parametrize(("right", "option", "scope"), some_of(LIMITED, 2))
def test_without_limits_all_of_them_go(
    commands: Commands, database_dsn: str, role: str, right: str, option: str, scope: str
) -> None:
    commands.text("grant", right, role)
    commands.text("grant", right, role, option, scope)
    commands.text("revoke", right, role)
    assert held(database_dsn, role) == set()


@pytest.mark.parametrize(("right", "option", "scope"), some_of(LIMITED, 2))
def test_one_topic_is_not_taken_from_a_role_that_has_all(
    commands: Commands, database_dsn: str, role: str, right: str, option: str, scope: str
) -> None:
    """It would say that the role may no longer, while the role may."""
    commands.text("grant", right, role)
    before = held(database_dsn, role)
    assert f"mqlayer revoke {right} {role}" in commands.failure("revoke", right, role, option, scope)
    assert held(database_dsn, role) == before
    with pytest.raises(pg_errors.RaiseException, match=f"mqlayer revoke {right}"):
        execute(database_dsn, commands.text("revoke", right, role, option, scope, "--sql"))
    assert held(database_dsn, role) == before


@pytest.mark.parametrize(
    "words", some_of([[right] for right in Right] + [[r, o, s, o, f"{s}2"] for r, o, s in LIMITED], 5)
)
@pytest.mark.parametrize("others", some_of([RIGHTS, [], ["publish", "consume --group orders/mail"]], 3))
def test_the_printed_sql_does_what_the_command_does(
    commands: Commands, database_dsn: str, roles: Roles, words: list[str], others: list[str]
) -> None:
    right, *limits = words
    others = [other for other in others if other.split()[0] != right]
    by_command, by_sql = (Roles.name_of(roles.login()) for _ in range(2))
    for one in (by_command, by_sql):
        for other in others:
            name, *scope = other.split()
            roles.give(one, Right(name), scopes=scope[1:] or [""])
    for verb in ("grant", "revoke"):
        commands.text(verb, right, by_command, *limits)
        before = held(database_dsn, by_sql)
        script = commands.text(verb, right, by_sql, *limits, "--sql")
        assert held(database_dsn, by_sql) == before, "printing changed something"
        execute(database_dsn, script)
        assert held(database_dsn, by_sql) == held(database_dsn, by_command), verb


@pytest.mark.parametrize(("right", "option", "scope"), some_of(LIMITED, 2))
def test_the_printed_sql_takes_one_limit_and_leaves_the_others(
    commands: Commands, database_dsn: str, role: str, right: str, option: str, scope: str
) -> None:
    commands.text("grant", right, role, option, scope)
    one = held(database_dsn, role)
    commands.text("grant", right, role, option, f"{scope}2")
    execute(database_dsn, commands.text("revoke", right, role, option, f"{scope}2", "--sql"))
    assert held(database_dsn, role) == one


@pytest.fixture
def administrator(database_dsn: str, new_sessions: None) -> Iterator[str]:
    """The DSN of a role that may give rights, and is no superuser."""
    name = f"mq_dba_{uuid.uuid4().hex[:8]}"
    execute(
        database_dsn,
        f"CREATE ROLE {name} LOGIN CREATEROLE NOSUPERUSER PASSWORD '{PASSWORD}';"
        f"GRANT mqlayer_owner TO {name} WITH ADMIN OPTION;"
        # As some clients of an administrator say.
        f"ALTER ROLE {name} SET standard_conforming_strings = off; ALTER ROLE {name} SET client_encoding = 'LATIN1';"
        f"ALTER ROLE {name} SET search_path = '';",
    )
    yield Roles.as_role(name, database_dsn)
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        # What it gave goes with what it was given.
        members = connection.execute(
            "SELECT member::regrole::text FROM pg_auth_members WHERE grantor = %s::regrole", [name]
        ).fetchall()
        for (member,) in members:
            connection.execute(f"REVOKE mqlayer_owner FROM {member}".encode())
        connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


def psql(dsn: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with Postgres' own client, as an administrator does with a file."""
    program = shutil.which("psql")
    if program is None:
        # One string of several statements, without anything of ours in between.
        try:
            execute(dsn, script)
        except psycopg.Error as error:
            return subprocess.CompletedProcess("psycopg", 3, "", f"ERROR:  {error}")
        return subprocess.CompletedProcess("psycopg", 0, "", "")
    words = [program, "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--quiet", f"--dbname={dsn}", "--file=-"]
    return subprocess.run(
        words, input=script, capture_output=True, text=True, timeout=60, check=False, encoding="utf-8"
    )


@pytest.mark.parametrize(
    "words", some_of([[right] for right in Right] + [[r, o, s, o, f"{s}2"] for r, o, s in LIMITED], 9)
)
def test_an_administrator_who_is_no_superuser_runs_the_printed_sql_with_psql(
    commands: Commands,
    database_dsn: str,
    roles: Roles,
    administrator: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, *limits = words
    by_command, by_sql = (Roles.name_of(roles.login()) for _ in range(2))
    monkeypatch.setenv("MQLAYER_DSN", administrator)
    for verb in ("grant", "revoke"):
        commands.text(verb, right, by_command, *limits)
        ran = psql(administrator, commands.text(verb, right, by_sql, *limits, "--sql"))
        # Both schemas have one owner: the second GRANT of it says so.
        assert (ran.returncode, ran.stdout, "ERROR" in ran.stderr) == (0, "", False), (verb, ran.stderr)
        assert held(database_dsn, by_sql) == held(database_dsn, by_command), verb
        assert bool(held(database_dsn, by_sql)) == (verb == "grant")


@pytest.mark.parametrize(
    "name", some_of(["Shop App", 'a"b', "o'neill", "caf\u00e9", ":x", ":'x'", "back\\slash", "$1 $$ %s {}"], 8)
)
def test_psql_takes_any_name_of_a_role_for_only_a_name(
    commands: Commands, database_dsn: str, administrator: str, name: str
) -> None:
    name = f"{name} {uuid.uuid4().hex[:6]}"
    execute(database_dsn, sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)).as_string(None))
    try:
        commands.text("grant", "consume", name, "--group", "orders/g")
        given = held(database_dsn, name)
        commands.text("revoke", "consume", name, "--group", "orders/g")
        for verb, expected in (("grant", given), ("revoke", set[tuple[str, ...]]())):
            ran = psql(administrator, commands.text(verb, "consume", name, "--group", "orders/g", "--sql"))
            assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", ""), verb
            assert held(database_dsn, name) == expected
    finally:
        execute(database_dsn, sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)).as_string(None))


def test_the_printed_sql_of_who_may_not_give_rights_changes_nothing(
    commands: Commands, database_dsn: str, roles: Roles, role: str
) -> None:
    operator = roles.login(Right.OPERATE)
    for right in ("publish", "migrate"):
        ran = psql(operator, commands.text("grant", right, role, "--sql"))
        assert ran.returncode != 0
        assert "ERROR" in ran.stderr
        assert held(database_dsn, role) == set()


NAMES = ["Shop App", "drop", 'a"b', "o'neill", "caf\u00e9", "x; DROP TABLE mqlayer.granted"]


@pytest.mark.parametrize("name", some_of(NAMES, 4))
def test_any_name_of_a_role_is_only_a_name(commands: Commands, database_dsn: str, name: str) -> None:
    name = f"{name} {uuid.uuid4().hex[:6]}"
    execute(database_dsn, sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)).as_string(None))
    try:
        commands.text("grant", "view", name)
        given = held(database_dsn, name)
        assert given
        commands.text("revoke", "view", name)
        assert held(database_dsn, name) == set()
        execute(database_dsn, commands.text("grant", "view", name, "--sql"))
        assert held(database_dsn, name) == given
        execute(database_dsn, commands.text("revoke", "view", name, "--sql"))
        assert held(database_dsn, name) == set()
    finally:
        execute(database_dsn, sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)).as_string(None))


@pytest.fixture
def new_role(database_dsn: str) -> Iterator[str]:
    """The name of a role that is not there yet."""
    name = f"mq_new_{uuid.uuid4().hex[:8]}"
    yield name
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [name]).fetchone():
            execute(database_dsn, f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_a_password_file_makes_the_role_or_changes_its_password(
    commands: Commands, database_dsn: str, new_role: str, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    for password in ("first one", "p@ss'word\\ \u00e9"):
        file.write_text(f"{password}\n", encoding="utf-8")
        file.chmod(stat.S_IRUSR)
        said = commands("grant", "view", new_role, "--password-file", str(file))
        assert (said.exit_code, password in said.output) == (0, False)
        with closing(psycopg.connect(database_dsn, user=new_role, password=password)) as connection:
            connection.execute("SELECT 1 FROM mqlayer.topic")
        file.unlink()
    with closing(psycopg.connect(database_dsn, autocommit=True)) as connection:
        facts = "SELECT rolsuper, rolcreaterole, rolcreatedb, rolcanlogin, rolpassword LIKE 'SCRAM%%' FROM pg_authid"
        row = connection.execute(f"{facts} WHERE rolname = %s".encode(), [new_role]).fetchone()
    assert row == (False, False, False, True, True)


def test_a_password_file_that_is_empty_or_away_is_refused(commands: Commands, new_role: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    assert str(file) in commands.failure("grant", "view", new_role, "--password-file", str(file))
    file.write_text("\n")
    assert "is empty" in commands.failure("grant", "view", new_role, "--password-file", str(file))
    assert "make it" in commands.failure("grant", "view", new_role)
    assert new_role not in commands.text("grants")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["view", "--topic", "orders"], "only publish can"),
        (["publish", "--group", "orders/g"], "only consume can"),
        (["consume", "--group", "orders"], "give TOPIC/GROUP"),
        (["publish", "--topic", "or ders"], "or ders"),
    ],
)
def test_limits_that_mean_nothing_are_refused(commands: Commands, role: str, words: list[str], said: str) -> None:
    right, *limits = words
    for verb in ("grant", "revoke"):
        assert said in commands.failure(verb, right, role, *limits)


def test_a_role_with_the_name_of_a_schema_is_refused(commands: Commands, tmp_path: Path) -> None:
    """Its `CREATE TABLE orders` would mean mqlayer's schema: the search path begins with the role's name."""
    (tmp_path / "password").write_text("secret\n")
    for schema in ("mqlayer", "mqlayer_app", "mqlayer_archive"):
        for words in ([], ["--sql"], ["--password-file", str(tmp_path / "password")]):
            assert "take another name" in commands.failure("grant", "publish", schema, *words)
    assert commands.text("grants").count("mqlayer_app") == 0


def test_a_role_that_is_not_there_is_named(commands: Commands) -> None:
    assert "not.there" in commands.failure("grant", "view", "not.there")
    assert "not.there" in commands.failure("revoke", "view", "not.there")


@pytest.mark.parametrize("right", some_of([None, "view", "work", "operate"], 4))
def test_only_members_of_the_owner_give_rights(
    commands: Commands, database_dsn: str, roles: Roles, role: str, right: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver = roles.login(*[Right(right)] if right else [])
    monkeypatch.setenv("MQLAYER_DSN", giver)
    for verb in ("grant", "revoke"):
        for wanted in ("operate", "publish", "migrate"):
            for whom in (role, Roles.name_of(giver)):
                before = held(database_dsn, whom)
                said = commands.failure(verb, wanted, whom)
                fix = "CREATEROLE" if wanted == "migrate" else f"mqlayer grant migrate {Roles.name_of(giver)}"
                assert fix in said, said
                assert held(database_dsn, whom) == before


def test_members_of_the_owner_give_rights_but_make_no_roles(
    commands: Commands, database_dsn: str, roles: Roles, role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    giver = Roles.name_of(roles.login())
    commands.text("grant", "migrate", giver)
    monkeypatch.setenv("MQLAYER_DSN", Roles.as_role(giver, database_dsn))
    commands.text("grant", "view", role)
    given = held(database_dsn, role)
    assert ("mqlayer", "view", "") in given
    file = tmp_path / "password"
    file.write_text("x")
    assert "CREATEROLE" in commands.failure("grant", "view", "mq_never", "--password-file", str(file))
    commands.text("revoke", "view", role)
    assert held(database_dsn, role) == set()


@pytest.mark.parametrize("limits", some_of([[], ["--group", "orders/ledger"]], 2))
def test_migrating_gives_again_what_a_right_has_gained(
    commands: Commands, database_dsn: str, role: str, limits: list[str]
) -> None:
    commands.text("grant", "consume", role, *limits)
    complete = held(database_dsn, role)
    execute(
        database_dsn,
        f"""REVOKE ALL ON ALL TABLES IN SCHEMA mqlayer FROM "{role}";
            REVOKE ALL ON ALL FUNCTIONS IN SCHEMA mqlayer_app FROM "{role}";
            REVOKE USAGE ON SCHEMA mqlayer_archive FROM "{role}";""",
    )
    assert len(held(database_dsn, role)) < len(complete)
    migrate(database_dsn)
    assert held(database_dsn, role) == complete


def test_migrating_forgets_roles_that_are_gone(commands: Commands, database_dsn: str, new_role: str) -> None:
    execute(database_dsn, f"CREATE ROLE {new_role}")
    commands.text("grant", "view", new_role)
    execute(database_dsn, f"DROP OWNED BY {new_role}; DROP ROLE {new_role}")
    migrate(database_dsn)
    with Database(database_dsn) as database, database.connection() as connection:
        for schema in SCHEMAS.values():
            rows = connection.execute(
                f"SELECT count(*) FROM {schema}.granted WHERE role::oid NOT IN (SELECT oid FROM pg_roles)".encode()
            )
            assert rows.fetchone() == (0,)


@pytest.fixture(scope="module")
def two_databases(database_maker: DatabaseMaker) -> Iterator[tuple[str, str]]:
    """One with the control schema, one with the application schema."""
    with database_maker.copy_of("template1") as control, database_maker.copy_of("template1") as application:
        migrate(control, schema="control")
        migrate(application, schema="application")
        yield control, application


@pytest.fixture
def apart(two_databases: tuple[str, str], monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> tuple[str, str]:
    """Both, named to commands."""
    monkeypatch.setenv("MQLAYER_DSN", two_databases[0])
    monkeypatch.setenv("MQLAYER_APP_DSN", two_databases[1])
    return two_databases


@pytest.mark.xdist_group("two_databases")
@pytest.mark.parametrize(
    "words", some_of([["publish"], ["consume"], ["consume", "--group", "orders/g"], ["work"], ["operate"]], 5)
)
def test_each_of_two_databases_gets_its_own(apart: tuple[str, str], new_role: str, words: list[str]) -> None:
    commands = Commands()
    right, *limits = words
    execute(apart[0], f"CREATE ROLE {new_role}")
    commands.text("grant", right, new_role, *limits)
    given = [held(dsn, new_role) for dsn in apart]
    assert [{row[0] for row in rows if row[1] == right} for rows in given] == [{"mqlayer"}, {"mqlayer_app"}]
    assert commands.lines("grants") == [{"role": new_role, "right": right, "scope": limits[-1] if limits else "all"}]
    commands.text("revoke", right, new_role, *limits)
    assert [held(dsn, new_role) for dsn in apart] == [set(), set()]
    scripts = commands.text("grant", right, new_role, *limits, "--sql").split("COMMIT;\n")
    for dsn, script in zip(apart, scripts, strict=False):
        execute(dsn, f"{script}COMMIT;")
    assert [held(dsn, new_role) for dsn in apart] == given
    scripts = commands.text("revoke", right, new_role, *limits, "--sql").split("COMMIT;\n")
    for dsn, script in zip(apart, scripts, strict=False):
        execute(dsn, f"{script}COMMIT;")
    assert [held(dsn, new_role) for dsn in apart] == [set(), set()]
