"""The users of docker-compose.yml: its own script makes them, and real servers start with them.

What needs no engine is run as it stands there; no container is started.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
import yaml
from psycopg import sql
from psycopg.conninfo import make_conninfo

from mqlayer.postgres.rights import grants
from mqlayer.redis.acl import acl_file_line, acl_rules, password_rule
from mqlayer.redis.roles import RedisRole
from mqlayer.stack import RedisServer
from mqlayer.stack.node_users import CELERY_RIGHTS
from tests.fixtures.forked_commands import forked_commands
from tests.fixtures.forked_programs import ask_python, start_python
from tests.fixtures.node_clients import harmful_commands
from tests.fixtures.servers import StartRedis, different_redis_programs
from tests.fixtures.wait import wait_until

# One worker makes the users, in six starts of the command.
pytestmark = pytest.mark.xdist_group("compose_users")

ROOT = Path(__file__).parents[2]
NODES = ("node-1", "node-2")
ROLES = {
    "mqlayer-operator": (RedisRole.OPERATOR,),
    "mqlayer-relay": (RedisRole.RELAY,),
    "mqlayer-worker": (RedisRole.WORKER,),
    "mqlayer-client": (RedisRole.PUBLISHER, RedisRole.CONSUMER),
    "mqlayer-viewer": (RedisRole.VIEWER,),
}
USER_OF = {
    "setup": "mqlayer-operator",
    "relay": "mqlayer-relay",
    "worker": "mqlayer-worker",
    "beat": "mqlayer-worker",
    "consume": "mqlayer-client",
}
RIGHTS_OF = {
    "mqlayer_relay": {"relay"},
    "mqlayer_worker": {"work"},
    "mqlayer_client": {"publish", "consume"},
    "mqlayer_operator": {"operate"},
    "mqlayer_viewer": {"view"},
    "mqlayer_analyst": {"analyze"},
}
"""The roles in Postgres."""
PASSWORD = re.compile(r"\$\{[A-Z]+_PASSWORD:-mqlayer\}")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    parsed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return dict(parsed["services"])


@pytest.fixture(scope="module")
def users(services: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, server_directory: Path) -> Path:
    """The directory that the service `users` filled, with a password of its own for each variable."""
    place = tmp_path_factory.mktemp("users")
    service = services["users"]
    script = service["command"][0].replace("$$", "$").replace("/users/", f"{place}/")
    environment = {name: f"secret of {name}" for name in service["environment"]}
    with forked_commands(server_directory) as programs:
        done = subprocess.run(
            [*service["entrypoint"], script],
            env=environment | {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            cwd=place,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in place.iterdir()} == {"node.acl", "broker.acl"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in place.iterdir())
    return place


@pytest.mark.slow
def test_setup_gives_each_kind_of_process_a_role_with_its_rights_in_postgres(
    services: dict[str, Any], tmp_path: Path, server_directory: Path, empty_database_dsn: str
) -> None:
    """The service's own script, but for the nodes."""
    service = services["setup"]
    made = {role: f"{role}_{os.getpid()}" for role in RIGHTS_OF}
    script = service["command"][0].replace("$$", "$").replace("/tmp/", f"{tmp_path}/").partition("for node in")[0]
    for role, name in made.items():
        script = script.replace(role, name)
    environment = {name: f"secret of {name}" for name in service["environment"] if name.endswith("_PASSWORD")}
    variables = {"PYTHONPATH": str(ROOT), "MQLAYER_DSN": empty_database_dsn}
    with forked_commands(server_directory) as programs:
        done = subprocess.run(
            [*service["entrypoint"], script],
            env=environment | variables | {"PATH": f"{programs}:/usr/bin:/bin"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert all("GRANT pg_read_all_stats" in line for line in done.stderr.splitlines()), done.stderr
    assert list(tmp_path.iterdir()) == []
    expected = {(made[role], right) for role, rights in RIGHTS_OF.items() for right in rights}
    with psycopg.connect(empty_database_dsn, autocommit=True) as owner:
        try:
            for schema in ("control", "application"):
                found = grants(empty_database_dsn, schema)
                assert {(grant.role, str(grant.right)) for grant in found} == expected
            for role, name in made.items():
                variable = role.removeprefix("mqlayer_").upper() + "_PASSWORD"
                parts = {"user": name, "password": f"secret of {variable}"}
                with psycopg.connect(make_conninfo(empty_database_dsn, **parts)) as connection:
                    row = connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = session_user").fetchone()
                    assert row == (False,)
        finally:
            for name in made.values():
                owner.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


def test_no_service_but_setup_has_the_superusers_address(services: dict[str, Any]) -> None:
    header = (ROOT / "docker-compose.yml").read_text().partition("name: mqlayer")[0]
    assert "postgres:mqlayer@" not in header
    for name, service in services.items():
        dsn = service.get("environment", {}).get("MQLAYER_DSN", "")
        assert ("//postgres:" in dsn) == (name == "setup"), name


def secret(user: str) -> str:
    return f"secret of {user.removeprefix('mqlayer-').upper()}_PASSWORD"


def started(start_redis: StartRedis, acl_file: Path) -> RedisServer:
    program = next(found for found in different_redis_programs() if found.version >= (7, 0))
    return start_redis(program=program, options={"aclfile": str(acl_file)})


def test_the_users_of_a_node_have_the_rules_of_the_command_and_nothing_else(users: Path) -> None:
    expected = ["user default off ~* &* +@all"]
    for user, roles in ROLES.items():
        expected.append(acl_file_line(user, roles, prefix="mq", password=secret(user), version=(7, 0, 0)))
    assert (users / "node.acl").read_text().splitlines() == expected
    assert all(rule in expected[2] for rule in acl_rules([RedisRole.RELAY], prefix="mq"))


def test_a_node_lets_in_its_users_and_not_user_default(users: Path, start_redis: StartRedis) -> None:
    server = started(start_redis, users / "node.acl")
    for user in ROLES:
        with redis.Redis.from_url(server.url, username=user, password=secret(user)) as client:
            assert client.ping()
            for words in (("CONFIG", "SET", "appendonly", "no"), ("ACL", "LIST"), ("FLUSHALL",), ("SHUTDOWN",)):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*words)
    for password in (None, "mqlayer", *map(secret, ROLES)):
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(server.url, password=password).ping()


def test_celery_works_with_the_user_of_the_broker(users: Path, start_redis: StartRedis, tmp_path: Path) -> None:
    """Publishes, takes, and answers a ping, as the worker's health check asks it."""
    assert (users / "broker.acl").read_text().splitlines() == [
        "user default off ~* &* +@all",
        f"user mqlayer-celery on {password_rule('secret of BROKER_PASSWORD')} {' '.join(CELERY_RIGHTS)}",
    ]
    server = started(start_redis, users / "broker.acl")
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(server.url).ping()
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "MQLAYER_BROKER_URL": server.url,
        "MQLAYER_BROKER_USER": "mqlayer-celery",
        "MQLAYER_BROKER_PASSWORD": "secret of BROKER_PASSWORD",
    }
    celery = ("celery", "-A", "mqlayer.workers.app")
    log = tmp_path / "worker.log"
    with log.open("wb") as out:
        options = ("--loglevel", "INFO", "--pool", "solo", "--hostname", "one@here")
        worker = start_python(*celery, "worker", *options, env=environment, stdout=out, stderr=out)
    try:
        wait_until(lambda: " ready." in log.read_text(), timeout_s=60, what="the worker is ready")
        ping = ("inspect", "ping", "--destination", "one@here", "--timeout", "20")
        done = ask_python(*celery, *ping, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "pong" in done.stdout
    finally:
        worker.terminate()
        worker.wait(30)
    assert "NOPERM" not in log.read_text()


def test_the_user_of_the_broker_has_no_command_that_changes_the_server(users: Path, start_redis: StartRedis) -> None:
    server = started(start_redis, users / "broker.acl")
    with (
        redis.Redis.from_url(start_redis(program=server.program).url) as owner,
        redis.Redis.from_url(server.url, username="mqlayer-celery", password="secret of BROKER_PASSWORD") as celery,
    ):
        assert harmful_commands(celery, owner) == {"info"}


def test_each_service_has_the_redis_user_of_its_role(services: dict[str, Any]) -> None:
    ours = {name for name, service in services.items() if service.get("image") == "mqlayer"}
    assert ours == {*USER_OF, "users"}
    for name, user in USER_OF.items():
        given = services[name]["environment"]
        variable = user.removeprefix("mqlayer-").upper()
        assert given["MQLAYER_REDIS_USER"] == user
        assert given["MQLAYER_REDIS_PASSWORD"] == f"${{{variable}_PASSWORD:-mqlayer}}"
        if "MQLAYER_BROKER_URL" in given:
            assert given["MQLAYER_BROKER_USER"] == "mqlayer-celery"
            assert given["MQLAYER_BROKER_PASSWORD"] == "${BROKER_PASSWORD:-mqlayer}"
    assert {name for name in USER_OF if "MQLAYER_BROKER_URL" in services[name]["environment"]} == {"worker", "beat"}


def test_every_password_can_be_set_from_outside(services: dict[str, Any]) -> None:
    for service in services.values():
        for name, value in service.get("environment", {}).items():
            if "PASSWORD" in name or name == "REDISCLI_AUTH":
                assert PASSWORD.fullmatch(value), (name, value)
            elif "://" in value and "@" in value:
                assert PASSWORD.search(value), name


def test_no_server_starts_without_its_users(services: dict[str, Any]) -> None:
    for name in (*NODES, "broker"):
        service = services[name]
        assert service["depends_on"] == {"users": {"condition": "service_completed_successfully"}}
        assert "users:/users:ro" in service["volumes"]
        assert service["environment"]["USERS"] == ("broker.acl" if name == "broker" else "node.acl")
        assert service["command"][-2:] == ["--aclfile", "/data/users.acl"]
    assert services["users"]["volumes"] == ["users:/users"]
    assert {services[name]["environment"]["PING_USER"] for name in NODES} == {"mqlayer-viewer"}
    assert services["broker"]["environment"]["PING_USER"] == "mqlayer-celery"


def test_the_entrypoint_gives_the_server_a_file_of_its_own(services: dict[str, Any], tmp_path: Path) -> None:
    """Run as it stands there, with a program of the image's name that shows its arguments."""
    entrypoint = tmp_path / "docker-entrypoint.sh"
    entrypoint.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    entrypoint.chmod(0o755)
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "node.acl").write_text("user default off\n")
    (tmp_path / "data").mkdir()
    shell, option, script, zero = services["node-1"]["entrypoint"]
    script = script.replace("$$", "$").replace("/users/", f"{tmp_path}/users/").replace("/data/", f"{tmp_path}/data/")
    done = subprocess.run(
        [shell, option, script, zero, "valkey-server", "--save", ""],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "USERS": "node.acl"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["valkey-server", "--save", ""]
    copied = tmp_path / "data" / "users.acl"
    assert copied.read_text() == "user default off\n"
    assert copied.stat().st_mode & 0o077 == 0
