"""The stack's own servers ask for passwords, and no other account of the machine gets at those, or at the data."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
import redis
from kombu.connection import Connection
from psycopg.conninfo import conninfo_to_dict
from typer.testing import CliRunner

from mqlayer.cli.main import app
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.redis.access import acting_as, forget_access
from mqlayer.stack import Addresses, PostgresServer, RedisProgram, RedisServer, Stack
from mqlayer.stack.accounts import unprivileged_account
from mqlayer.stack.containers import PostgresContainer, RedisContainer
from mqlayer.stack.credentials import BROKER_KINDS, NODE_ROLES, Login, ProcessKind, StackCredentials
from mqlayer.stack.node_users import CELERY_RIGHTS
from mqlayer.stack.private_files import write_closed
from mqlayer.stack.stack_file import StackFile
from mqlayer.topics import create_topic, list_nodes, register_node
from tests.fixtures.node_clients import (
    COMMANDS,
    ClientsSeen,
    default_is_kept_out,
    harmful_commands,
    redis_users,
)
from tests.fixtures.process_files import file_of_each_process
from tests.fixtures.servers import InitialisedClusters, StartRedis, different_redis_programs
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

# One worker starts the stack that most tests look at.
pytestmark = pytest.mark.xdist_group("stack_passwords")

GIVEN = ("MQLAYER_DSN", "MQLAYER_REDIS_URL", "MQLAYER_BROKER_URL")
STRANGER = 65_533
"""An account that owns nothing here: no program of ours runs under it."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")


@pytest.fixture
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address is given."""
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def directory_of_a_stack(server_directory: Path) -> Iterator[Path]:
    """Lend a directory for a stack, in one that everybody may enter, as a project's often is."""
    home = Path(tempfile.mkdtemp(dir=server_directory, prefix="stack-"))
    home.chmod(0o755)
    yield home / ".mqlayer"
    forget_access()
    Stack(home / ".mqlayer").erase()


@pytest.fixture
def place(server_directory: Path, quick_initdb: None, no_addresses: None) -> Iterator[Path]:
    """A directory for a stack of the test's own."""
    with directory_of_a_stack(server_directory) as place:
        yield place


@dataclass(frozen=True)
class RunningStack:
    """A whole stack that tests look at: its directory, its addresses, and what `mqlayer up` printed."""

    place: Path
    addresses: Addresses
    printed: str


@pytest.fixture(scope="module")
def running(server_directory: Path, initialised_clusters: InitialisedClusters) -> Iterator[RunningStack]:
    """A stack with its relay and worker; a test leaves it as it is."""
    with directory_of_a_stack(server_directory) as place:
        with pytest.MonkeyPatch.context() as patch:
            for name in GIVEN:
                patch.delenv(name, raising=False)
            result = CliRunner().invoke(app, ["up", "--nodes", "1", "--directory", str(place)])
        assert result.exit_code == 0, result.output
        addresses = Stack(place).addresses()
        assert addresses is not None
        yield RunningStack(place, addresses, result.output)


def up(place: Path) -> Addresses:
    return Stack(place, node_count=1).up(servers_only=True)


def passwords(place: Path) -> set[str]:
    logins = StackCredentials.load(place).of("owner")
    found = {logins.postgres.password, logins.node.password, logins.broker.password}
    assert len(found) == 3
    assert all(len(password) >= 32 for password in found)
    return found


def owner_url(place: Path, addresses: Addresses) -> str:
    """Return the node's address with the stack's own user, which may do all."""
    return StackCredentials.load(place).of("owner").node.in_url(addresses.nodes["node-1"])


def urls_without_password(addresses: Addresses) -> list[str]:
    urls = [*addresses.nodes.values(), addresses.broker_url]
    return [f"redis://{url.removeprefix('redis://').rpartition('@')[2]}" for url in urls]


def refusals(place: Path, addresses: Addresses) -> list[str]:
    """Try what somebody without the passwords can try; return what was not refused."""
    parts = conninfo_to_dict(addresses.dsn)
    hosts = [str(parts["host"]), str(place / "postgres" / "home")]
    tries: dict[str, Callable[[], object]] = {}
    for host in hosts:
        for user in ("postgres", "root", "nobody"):
            tries[f"postgres at {host} as {user}"] = lambda host=host, user=user: psycopg.connect(  # type: ignore[misc]
                host=host, port=parts["port"], user=user, dbname="mqlayer", password="", passfile="/nowhere"
            )
    for url in urls_without_password(addresses):
        tries[url] = lambda url=url: redis.Redis.from_url(url).ping()  # type: ignore[misc]
        tries[f"{url} wrong"] = lambda url=url: redis.Redis.from_url(url, password="x").ping()  # type: ignore[misc]
    return [name for name, attempt in tries.items() if not refused(attempt)]


def refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (psycopg.OperationalError, redis.AuthenticationError, PermissionError):
        return True
    return False


def as_stranger(work: Callable[[], list[str]]) -> list[str]:
    """Return what `work` returns in a process of another account of the machine."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            answer = work()
        except BaseException:  # noqa: BLE001 - the parent shows it
            answer = [traceback.format_exc()]
        os.write(writer, json.dumps(answer).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        said = answers.read()
    os.waitpid(child, 0)
    return list(json.loads(said))


def test_no_server_of_the_stack_lets_anybody_in_without_its_password(running: RunningStack) -> None:
    place = running.place
    assert refusals(place, running.addresses) == []
    assert default_is_kept_out(place)
    with psycopg.connect(Stack(place).owner_dsn()) as connection:
        assert connection.execute("SHOW password_encryption").fetchone() == ("scram-sha-256",)
        rules = connection.execute("SELECT DISTINCT auth_method FROM pg_hba_file_rules").fetchall()
    assert rules == [("scram-sha-256",)]


def test_user_default_is_off_on_nodes_and_each_process_is_there_as_its_own_user(running: RunningStack) -> None:
    place, addresses = running.place, running.addresses
    with acting_as(addresses.node_access), Database(addresses.dsn) as database:
        create_topic(runtime_of(database, "mq"), "orders", partitions=2)
    with ClientsSeen(place, place) as seen:
        wait_until(lambda: "relay" in seen.users and seen.kept_out, timeout_s=60, what="the relay on the node")
    assert seen.users.pop(COMMANDS, set()) <= {"mqlayer-operator", "mqlayer-admin"}
    # A worker that hosts no consumers is on a node for moments only.
    assert all(users == {f"mqlayer-{kind}"} for kind, users in seen.users.items())
    for part in Stack(place).status():
        if part.name in ("relay", "worker"):
            given = Path(f"/proc/{part.pid}/environ").read_bytes().split(b"\0")
            assert f"MQLAYER_REDIS_USER=mqlayer-{part.name}".encode() in given


def test_a_file_of_variables_holds_the_passwords_of_its_own_kind_alone(running: RunningStack) -> None:
    """Each password of the stack is looked for in each file, and in what each process was started with."""
    place = running.place
    kinds = StackCredentials.load(place).kinds
    secrets = {
        (kind, server): login.password
        for kind, logins in kinds.items()
        for server in ("postgres", "node", "broker")
        for login in [getattr(logins, server)]
        if login.password
    }
    assert len(set(secrets.values())) == len(secrets)
    given = {path.stem: path.read_bytes() for path in place.glob("*.env")} | {"operator": (place / "env").read_bytes()}
    for part in Stack(place).status():
        if part.name in ("relay", "worker"):
            given[part.name] = Path(f"/proc/{part.pid}/environ").read_bytes()
    assert set(given) == {*kinds} - {"owner"}
    for kind, text in given.items():
        known = {secret for secret, password in secrets.items() if password.encode() in text}
        expected = {(kind, "postgres"), (kind, "node")} | ({(kind, "broker")} if kind in BROKER_KINDS else set())
        assert known == expected, kind
        assert (b"MQLAYER_BROKER_URL" in text) == (kind in BROKER_KINDS), kind


def test_users_of_the_broker_have_no_command_that_changes_the_server(running: RunningStack) -> None:
    place, addresses = running.place, running.addresses
    for kind in BROKER_KINDS:
        login = StackCredentials.load(place).of(kind).broker
        with (
            redis_users(place, "broker") as owner,
            redis.Redis.from_url(login.in_url(addresses.broker_url), protocol=2) as client,
        ):
            assert harmful_commands(client, owner) == {"info"}


@pytest.mark.parametrize("program", different_redis_programs(), ids=str)
def test_every_kind_of_redis_keeps_celerys_user_to_its_queues(program: RedisProgram, server_directory: Path) -> None:
    """Also the embedded one, whose rules are coarser."""
    server = RedisServer(
        server_directory / f"broker-{program}", program=program, login=Login("mqlayer-admin", "s3cret")
    )
    celery = Login("mqlayer-worker", "pa55")
    connect: Any = Connection
    try:
        server.start()
        with (
            redis.Redis.from_url(server.url, protocol=2) as owner,
            redis.Redis.from_url(celery.in_url(server.address), protocol=2) as client,
        ):
            owner.execute_command("ACL", "SETUSER", celery.user, "reset", "on", ">pa55", *CELERY_RIGHTS)
            assert harmful_commands(client, owner) == {"info"}
        with connect(celery.in_url(server.address)) as connection:
            queue = connection.SimpleQueue("mqlayer")
            queue.put({"n": 1})
            message = queue.get(timeout=10)
            assert message.payload == {"n": 1}
            message.ack()
            queue.close()
    finally:
        server.erase()


@pytest.mark.full
def test_a_stack_whose_broker_had_one_password_gets_users_there_and_keeps_its_queue(place: Path) -> None:
    """As the version before left it: running, all kinds have the password of user default."""
    up(place)
    old = StackCredentials.load(place)
    one = Login("default", "as-before")
    Stack(place).down()
    kinds = {kind: replace(logins, broker=one) for kind, logins in old.kinds.items()}
    write_closed(place / "credentials.json", msgspec.json.encode(StackCredentials(kinds)))
    (place / "broker" / "users.acl").unlink()
    before = RedisServer(place / "broker", login=one)
    before.start()
    with redis.Redis.from_url(before.url) as client:
        client.lpush("mqlayer", "kept")

    addresses = up(place)

    assert default_is_kept_out(place)
    with redis.Redis.from_url(addresses.broker_url) as client:
        assert client.lrange("mqlayer", 0, -1) == [b"kept"]
    assert [kind for kind, logins in StackCredentials.load(place).kinds.items() if logins.broker.password] == [
        "operator", "worker", "owner",
    ]  # fmt: skip


@pytest.mark.full
def test_a_node_keeps_its_users_and_what_scripts_wrote_over_a_start_by_another(place: Path) -> None:
    """Case of a crash between two `up`: Redis reads its append-only file with the rights of user default."""
    addresses = up(place)
    with acting_as(addresses.node_access), Database(addresses.dsn) as database:
        create_topic(runtime_of(database, "mq"), "orders", partitions=2)
        server = Stack(place)._redis("node-1")
        with redis_users(place, "node-1") as owner:
            before = {key: owner.dump(key) for key in owner.scan_iter("mq:*")}
        server.kill()
        server.start()
        with redis_users(place, "node-1") as owner:
            assert {key: owner.dump(key) for key in owner.scan_iter("mq:*")} == before != {}
        for kind in NODE_ROLES:
            login = StackCredentials.load(place).of(kind).node
            with redis.Redis.from_url(login.in_url(addresses.nodes["node-1"]), decode_responses=True) as client:
                assert client.acl_whoami() == f"mqlayer-{kind}"
    assert default_is_kept_out(place)


@pytest.mark.full
def test_a_stack_whose_user_default_had_a_password_gets_users_and_keeps_its_data(place: Path) -> None:
    """As the version before left it: running, the owner is user default."""
    up(place)
    old = StackCredentials.load(place)
    owner = old.of("owner")
    owner = replace(owner, node=Login("default", "as-before"))
    kept: tuple[ProcessKind, ...] = ("relay", "worker", "consumer")
    kinds = {kind: old.of(kind) for kind in kept}
    Stack(place).down()
    write_closed(place / "credentials.json", msgspec.json.encode(StackCredentials(kinds | {"owner": owner})))
    (place / "node-1" / "users.acl").unlink()
    before = RedisServer(place / "node-1", login=owner.node)
    before.start()
    with redis.Redis.from_url(before.url) as client:
        client.set("kept", "yes")

    up(place)

    assert default_is_kept_out(place)
    with redis_users(place, "node-1") as own:
        assert own.get("kept") == b"yes"
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(before.url).ping()
    assert {kind: StackCredentials.load(place).of(kind) for kind in kinds} == kinds


def test_files_of_the_stack_are_for_their_owner_only(running: RunningStack) -> None:
    place, account = running.place, unprivileged_account()
    for path in (place, *place.rglob("*")):
        try:
            facts = path.lstat()
        except FileNotFoundError:
            # The servers run, and remove files.
            continue
        if not stat.S_ISLNK(facts.st_mode):
            passed_by_server = stat.S_ISDIR(facts.st_mode) and account is not None and facts.st_gid == account.gid
            assert facts.st_mode & (0o067 if passed_by_server else 0o077) == 0, path


@needs_root
def test_another_account_of_the_machine_gets_at_no_server_and_no_file(running: RunningStack) -> None:
    place, addresses = running.place, running.addresses
    pids = [part.pid for part in Stack(place).status()]
    files = [path for path in place.rglob("*") if path.is_file()]
    environments = [Path(f"/proc/{pid}/environ") for pid in pids]
    assert len(files) > 1_000
    assert all(pids)

    def work() -> list[str]:
        told = [str(path) for path in (*files, *environments) if not refused(path.read_bytes)]
        closed = (place, place / "postgres", place / "node-1")
        told += [str(path) for path in closed if not refused(lambda path=path: list(path.iterdir()))]  # type: ignore[misc]
        return told + refusals(place, addresses)

    assert as_stranger(work) == []


def test_no_password_is_in_arguments_logs_or_output(running: RunningStack) -> None:
    place = running.place
    status = CliRunner().invoke(app, ["status", "--json", "--directory", str(place)])
    arguments = [told for _, told in file_of_each_process("cmdline")]
    logs = [path.read_bytes() for path in place.rglob("*.log")]
    assert logs
    for password in passwords(place):
        assert password not in running.printed + status.output
        assert not [text for text in arguments + logs if password.encode() in text]


def test_what_up_tells_to_source_is_what_a_program_needs(running: RunningStack) -> None:
    line = next(line for line in running.printed.splitlines() if "source" in line)
    command = line.partition("program: ")[2]
    said = subprocess.run(
        ["bash", "-c", f'{command} && printf "%s\\n%s" "$MQLAYER_DSN" "$MQLAYER_BROKER_URL"'],
        capture_output=True,
        text=True,
        check=True,
    )
    dsn, broker_url = said.stdout.split("\n")
    with psycopg.connect(dsn) as connection, redis.Redis.from_url(broker_url) as broker:
        assert connection.execute("SELECT 1").fetchone() == (1,)
        assert broker.ping()


@pytest.mark.full
def test_a_stack_without_passwords_keeps_its_data_and_asks_for_passwords_from_then_on(place: Path) -> None:
    """As an earlier version left it, still running and readable by all."""
    place.mkdir(mode=0o755)
    postgres, node, broker = (
        PostgresServer(place / "postgres"),
        RedisServer(place / "node-1"),
        RedisServer(place / "broker"),
    )
    for server in (postgres, node, broker):
        server.start()
        (place / server.directory.name).chmod(0o755)
    dsn = postgres.create_database("mqlayer")
    migrate(dsn)
    with Database(dsn) as database:
        register_node(runtime_of(database), name="node-1", url=node.url)
        with database.connection() as connection:
            connection.execute("CREATE TABLE public.kept AS SELECT 42 AS answer")
    with redis.Redis.from_url(node.url) as client:
        client.set("kept", "yes")
    StackFile(Addresses(dsn, {"node-1": node.url}, broker.url)).save(place)

    addresses = up(place)

    assert refusals(place, addresses) == []
    with Database(addresses.dsn) as database, database.connection() as connection:
        assert connection.execute("SELECT answer FROM public.kept").fetchone() == (42,)
        assert [found.url for found in list_nodes(database)] == [addresses.nodes["node-1"]]
    with redis.Redis.from_url(owner_url(place, addresses)) as client:
        assert client.get("kept") == b"yes"
    assert (place / "node-1").stat().st_mode & 0o077 == 0


@pytest.mark.full
def test_passwords_that_were_lost_are_made_anew(place: Path) -> None:
    addresses = up(place)
    before = passwords(place)
    (place / "credentials.json").unlink()
    after = up(place)
    assert passwords(place).isdisjoint(before)
    assert refusals(place, after) == []
    with pytest.raises(psycopg.OperationalError), psycopg.connect(addresses.dsn):
        pass
    with psycopg.connect(after.dsn), redis.Redis.from_url(after.node_url("node-1")) as node:
        assert node.ping()


def test_up_again_keeps_passwords_and_processes(running: RunningStack, no_addresses: None) -> None:
    place = running.place
    pids = [part.pid for part in Stack(place).status()]
    assert up(place) == running.addresses
    assert [part.pid for part in Stack(place).status()] == pids


def test_a_directory_that_others_may_write_in_is_refused(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    result = CliRunner().invoke(app, ["up", "--directory", str(place)])
    assert result.exit_code == 1
    assert f"chmod go-w {place}" in result.stderr


def test_a_container_gets_its_password_by_its_environment_alone(tmp_path: Path) -> None:
    """Arguments of a container's program are seen by every account of the machine."""
    login = Login("default", "s3cret")
    for container in (
        RedisContainer(tmp_path / "node-1", login=login),
        PostgresContainer(tmp_path / "postgres", password=login.password),
    ):
        assert login.password in container._environment().values()
        assert login.password not in " ".join(container._command())
        assert container._asks_for_login([f"{n}={v}" for n, v in container._environment().items()])
        assert not container._asks_for_login(["POSTGRES_HOST_AUTH_METHOD=trust"])


def test_a_server_asks_for_passwords_with_any_character(start_redis: StartRedis, server_directory: Path) -> None:
    """Of a random one no character matters, of one that people wrote into the file each does."""
    awkward = """a@b:c/d?e#f%20 g"h'i\\j=ü"""
    server = RedisServer(server_directory / "redis-awkward", login=Login("default", awkward))
    try:
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(f"redis://127.0.0.1:{server.port}").ping()
    finally:
        server.erase()


@pytest.mark.parametrize("program", different_redis_programs(), ids=str)
def test_every_kind_of_redis_keeps_scripts_writes_while_user_default_is_off(
    program: RedisProgram, server_directory: Path
) -> None:
    """Also the embedded one. A file that the server saved itself is known again, and the run with it left alone."""
    login = Login("mqlayer-admin", "s3cret of the stack")
    server = RedisServer(server_directory / f"redis-users-{program}", program=program, login=login)
    try:
        server.start()
        with redis.Redis.from_url(server.url) as client:
            client.eval("redis.call('SET', KEYS[1], '1') redis.call('INCR', KEYS[1])", 1, "counted")
            client.execute_command("ACL", "SAVE")
        pid = server.pid
        server.start()
        assert server.pid == pid
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("counted") == b"2"
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(server.address).ping()
        assert (server.directory / "users.acl").stat().st_mode & 0o077 == 0
    finally:
        server.erase()


def test_a_container_s_first_users_are_by_name_and_hash(tmp_path: Path) -> None:
    login = Login("mqlayer-admin", "s3cret")
    container = RedisContainer(tmp_path / "node-1", login=login)
    script = str(list(container._command())[2])
    assert "user default off ~* &* +@all" in script
    assert login.password not in script + "".join(container._environment().values())
    assert sha256(login.password.encode()).hexdigest() in "".join(container._environment().values())
