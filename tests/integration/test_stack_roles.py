"""Nobody uses the stack's Postgres as its superuser: not its processes, and nobody by what `mqlayer up` writes."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import errors as pg_errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from typer.testing import CliRunner

from mqlayer import outbox
from mqlayer.cli.main import app
from mqlayer.doctor.postgres import OpenTransaction
from mqlayer.errors import PermissionDenied
from mqlayer.postgres.migrations import migrate, migrate_for_tests
from mqlayer.postgres.queries import query
from mqlayer.postgres.rights import Grant, Right, grants
from mqlayer.redis.access import forget_access
from mqlayer.stack import GivenAddresses, Stack
from mqlayer.testing import prepare_database
from mqlayer.testing.databases import make_database
from mqlayer.testing.servers import TestServers
from tests.fixtures.forked_programs import Process, ask_python, run_python, start_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

# One worker starts the stack.
pytestmark = pytest.mark.xdist_group("stack_roles")

ROOT = Path(__file__).parents[2]
KINDS = ("publisher", "consumer", "viewer")
SESSIONS = """
    SELECT a.usename, r.rolsuper OR pg_has_role(r.oid, 'mqlayer_owner', 'MEMBER') FROM pg_stat_activity a
    JOIN pg_roles r ON r.oid = a.usesysid WHERE a.backend_type = 'client backend' AND a.pid <> pg_backend_pid()
"""


@pytest.fixture(scope="module")
def home(server_directory: Path) -> Iterator[Path]:
    """A folder in which the whole stack runs, as `mqlayer up` there starts it."""
    folder = Path(tempfile.mkdtemp(dir=server_directory, prefix="stack-"))
    folder.chmod(0o755)
    stack = Stack(folder / ".mqlayer", node_count=1)
    stack.up()
    yield folder
    forget_access()
    stack.erase()


@pytest.fixture
def stack(home: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    for name in [name for name in os.environ if name.startswith("MQLAYER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(home)
    return Stack(home / ".mqlayer")


def variables(stack: Stack, kind: str = "") -> dict[str, str]:
    """Return what a shell gets from `env`, or from the file of a kind of process."""
    lines = (stack.directory / (f"{kind}.env" if kind else "env")).read_text().splitlines()
    pairs = (shlex.split(line)[1].partition("=") for line in lines)
    return {name: value for name, _, value in pairs}


def command(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == code, result.output
    return result.output


def refused(dsn: str, statement: str) -> bool:
    with psycopg.connect(dsn, autocommit=True) as connection:
        try:
            connection.execute(statement.encode())
        except pg_errors.InsufficientPrivilege:
            return True
    return False


@contextmanager
def process(environment: Mapping[str, str], *words: str) -> Iterator[Process]:
    running = start_python(*words, cwd=ROOT, env={**os.environ, **environment})
    try:
        yield running
    finally:
        running.terminate()
        assert running.wait(30) == 0


def run(environment: Mapping[str, str], *words: str) -> None:
    assert run_python(*words, cwd=ROOT, env={**os.environ, **environment}, timeout=60) == 0


class Sessions:
    """Notes who is logged in, at each look."""

    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self.seen: set[str] = set()
        self.mighty: set[str] = set()

    def look(self) -> None:
        for user, mighty in self._connection.execute(SESSIONS.encode()).fetchall():
            self.seen.add(user)
            self.mighty |= {user} if mighty else set()

    def close(self) -> None:
        self._connection.close()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        def looked() -> bool:
            self.look()
            return holds()

        wait_until(looked, timeout_s=60, what=what)


def test_no_session_is_a_superusers_or_the_owners_while_all_processes_run(stack: Stack) -> None:
    operator, consumer, publisher = variables(stack), variables(stack, "consumer"), variables(stack, "publisher")
    with ExitStack() as cleanup:
        sessions = Sessions(stack.owner_dsn())
        cleanup.callback(sessions.close)
        command("topic", "create", "orders")
        run(operator, "examples.first.orders")
        with psycopg.connect(operator["MQLAYER_DSN"]) as connection:
            connection.execute("GRANT SELECT, INSERT ON orders, ledger TO mqlayer_consumer, mqlayer_publisher")
        cleanup.enter_context(process(consumer, "mqlayer", "consume", "examples.first.orders:app"))
        sender = cleanup.enter_context(psycopg.connect(publisher["MQLAYER_DSN"], autocommit=True))
        outbox.publish(sender, "orders", key="customer-2", body=json.dumps({"customer": "customer-2", "amount": 1}))
        booked = cleanup.enter_context(psycopg.connect(operator["MQLAYER_DSN"], autocommit=True))
        sessions.until(
            lambda: booked.execute("SELECT count(*) FROM ledger").fetchone() == (4,), "four orders are booked"
        )
        everybody = {f"mqlayer_{kind}" for kind in ("relay", "worker", "consumer", "publisher", "operator")}
        sessions.until(lambda: sessions.seen >= everybody, "a session of each kind of process")
        assert "idle transactions" not in command("doctor", code=0)
        sessions.look()
    assert sessions.seen == everybody
    assert sessions.mighty == set()


def test_what_up_writes_for_people_are_roles_with_rights_and_no_superuser(stack: Stack) -> None:
    said = command("up", "--servers-only", "--nodes", "1")
    dsns = [variables(stack, kind)["MQLAYER_DSN"] for kind in ("", *KINDS)]
    dsns += [json.loads((stack.directory / "stack.json").read_text())["addresses"]["dsn"]]
    assert "postgres:" not in said.replace("postgres at", "")
    users = []
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            facts = "SELECT rolname, rolsuper OR rolcreaterole OR rolbypassrls, rolcreatedb FROM pg_roles"
            found = connection.execute(f"{facts} WHERE rolname = session_user".encode()).fetchone()
        assert found is not None
        # Tests of programs make databases.
        assert found[1:] == (False, found[0] == "mqlayer_operator")
        users.append(found[0])
    assert users == ["mqlayer_operator", *(f"mqlayer_{kind}" for kind in KINDS), "mqlayer_operator"]


def test_each_role_has_the_rights_of_its_kind_and_none_is_the_schemas_owner(stack: Stack) -> None:
    one = {"relay": Right.RELAY, "worker": Right.WORK, "consumer": Right.CONSUME, "publisher": Right.PUBLISH}
    expected = {Grant(f"mqlayer_{kind}", right) for kind, right in {**one, "viewer": Right.VIEW}.items()}
    expected |= {Grant("mqlayer_operator", right) for right in Right if right is not Right.MIGRATE}
    for schema in ("control", "application"):
        assert set(grants(stack.owner_dsn(), schema)) == expected


def test_those_who_look_for_open_transactions_see_those_of_other_roles(stack: Stack) -> None:
    command("topic", "create", "bills")
    with psycopg.connect(variables(stack, "publisher")["MQLAYER_DSN"], application_name="price-import") as publisher:
        publisher.execute("SELECT mqlayer_app.publish_v1('bills', 'k', '')")
        pid = publisher.info.backend_pid
        for kind in ("operator", "worker", "viewer", "relay"):
            login = stack._credentials.of(kind).postgres
            with psycopg.connect(stack.owner_dsn(), user=login.user, password=login.password) as connection:
                rows = connection.execute(query("check_open_transactions"), {"age_s": 0.0}).fetchall()
            seen = [OpenTransaction(*row) for row in rows]
            assert any(one.pid == pid and one.holds for one in seen) == (kind != "relay"), kind


def test_a_file_of_one_kind_does_what_that_kind_may_and_nothing_else(stack: Stack) -> None:
    command("topic", "create", "mails")
    publish = "SELECT mqlayer_app.publish_v1('mails', 'k', '')"
    counters = "SELECT count(*) FROM mqlayer_app.counter"
    members = "UPDATE mqlayer.assignment SET epoch = epoch WHERE false"
    own = "CREATE TABLE IF NOT EXISTS kept (n int)"
    allowed = {
        "publisher": {publish},
        "consumer": {members},
        "viewer": {counters},
        "": {publish, counters, members, own},
    }
    for kind, may in allowed.items():
        dsn = variables(stack, kind)["MQLAYER_DSN"]
        assert {text for text in (publish, counters, members, own) if not refused(dsn, text)} == may, kind


def test_commands_that_change_schemas_or_rights_run_as_the_owner_in_the_stacks_folder(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for environment in ({}, variables(stack)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert "nothing to do" in command("migrate")
        command("grant", "publish", "mqlayer_viewer", "--topic", "orders")
        assert ["mqlayer_viewer", "publish", "orders"] in map(str.split, command("grants").splitlines())
        command("revoke", "publish", "mqlayer_viewer")


@pytest.mark.full
def test_the_tests_of_a_django_project_pass_as_its_readme_says(stack: Stack, home: Path) -> None:
    """The schemas are there and belong to another role, so its migration has nothing to do."""
    command("init", "django", str(home / "shop"))
    if "orders" not in command("topic", "list"):
        command("topic", "create", "orders")
    environment = {**os.environ, **variables(stack), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = ("pytest", "-q", "--assert=plain", "-p", "no:cacheprovider")
    done = ask_python(*words, cwd=home / "shop", env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_tests_of_programs_make_databases_of_their_own_where_the_operators_variables_are(stack: Stack) -> None:
    dsn = variables(stack)["MQLAYER_DSN"]
    with TestServers(given=GivenAddresses(dsn)) as servers, servers.database() as (of_test, _):
        assert conninfo_to_dict(of_test)["dbname"] != "mqlayer"
        assert migrate(of_test) == []
    # As Django's migration does.
    assert make_database(make_conninfo(dsn, dbname="shop_test"))
    migrate_for_tests(make_conninfo(dsn, dbname="shop_test"), schema="control")
    for name in ("shop_test", "other_test", "other_test"):
        place = make_conninfo(dsn, dbname=name)
        prepare_database(place, "orders")
        with psycopg.connect(place) as connection:
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', '')")
            owner = connection.execute("SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'mqlayer_app'")
            assert owner.fetchone() == ("mqlayer_operator",)
    given = GivenAddresses(variables(stack, "viewer")["MQLAYER_DSN"])
    with TestServers(given=given) as servers, pytest.raises(PermissionDenied, match="unset MQLAYER_DSN") as refusal:
        servers.database().__enter__()
    assert "this role may not make databases for tests" in str(refusal.value)


@pytest.mark.parametrize("kind", some_of(["", *KINDS], len(KINDS) + 1))
def test_up_again_takes_its_own_postgres_for_its_own_whoever_is_logged_in_there(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name, value in variables(stack, kind).items():
        monkeypatch.setenv(name, value)
    before = stack.addresses()
    command("up", "--servers-only", "--nodes", "1")
    assert stack.addresses() == before
    assert conninfo_to_dict(before.dsn if before else "")["user"] == "mqlayer_operator"
