"""Servers that speak TLS only, and ask each client for a certificate, with mqlayer's processes on them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Final

import psycopg
import redis
from psycopg.conninfo import make_conninfo

from mqlayer.redis.acl import acl_file_line
from mqlayer.redis.roles import RedisRole
from mqlayer.stack.accounts import unprivileged_account
from mqlayer.stack.ports import free_port
from mqlayer.stack.redis_server import DURABLE_OPTIONS
from tests.fixtures.certificates import Authority, Certificate, authority
from tests.fixtures.servers import StartPostgres, redis_7_program
from tests.fixtures.wait import wait_until

ROOT: Final = Path(__file__).parents[2]
COMPOSED: Final = Path(__file__).parent / "composed"
DATABASE: Final = "shop"
HBA: Final = """\
# The test's own way in; all else takes a certificate whose name is the role's.
host all postgres 127.0.0.1/32 trust
hostssl all all all cert
"""
ROLES: Final[Mapping[str, tuple[RedisRole, ...]]] = {
    "mqlayer_admin": (RedisRole.OPERATOR,),
    "mqlayer_relay": (RedisRole.RELAY,),
    "mqlayer_worker": (RedisRole.WORKER,),
    "mqlayer_client": (RedisRole.PUBLISHER, RedisRole.CONSUMER),
    "mqlayer_viewer": (RedisRole.VIEWER,),
}
"""Roles in Postgres, which are users of the nodes too."""
RIGHTS: Final = {
    "mqlayer_relay": ("relay",),
    "mqlayer_worker": ("work",),
    "mqlayer_client": ("publish", "consume"),
    "mqlayer_viewer": ("view",),
}
BROKER_USER: Final = "celery"
BROKER_PASSWORD: Final = "the broker's secret"
NGINX: Final = """\
pid {place}/nginx.pid;
error_log {place}/nginx.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {place}/body;
  proxy_temp_path {place}/proxy;
  fastcgi_temp_path {place}/fastcgi;
  uwsgi_temp_path {place}/uwsgi;
  scgi_temp_path {place}/scgi;
  server {{
    listen 127.0.0.1:{port} ssl;
    server_name localhost;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    proxy_set_header Host $http_host;
    proxy_set_header X-Forwarded-For $remote_addr;
    proxy_set_header X-Forwarded-Proto $scheme;
    proxy_buffering off;
    location /mq/ {{ proxy_pass http://127.0.0.1:{console}; }}
    location /metrics {{ proxy_pass http://127.0.0.1:{exporter}; }}
  }}
}}
"""


def password_of(role: str) -> str:
    """Return a role's password on the nodes."""
    return f"secret of {role}"


@dataclass
class TlsStage:
    """Postgres, two nodes and a broker at `localhost`, the one name in their certificates."""

    home: Path
    postgres_dsn: str
    cleanup: ExitStack
    ports: dict[str, int] = field(default_factory=dict)

    @cached_property
    def authority(self) -> Authority:
        """The one that all trust."""
        return authority(self.home / "known")

    @cached_property
    def other(self) -> Authority:
        """One that nobody trusts."""
        return authority(self.home / "other")

    @property
    def logs(self) -> list[Path]:
        """What processes said."""
        return sorted(self.home.glob("*.log"))

    def dsn(self, role: str, **changed: str) -> str:
        """Return a role's DSN, verified in full."""
        certificate = self.certificate_of(role)
        files = {"sslrootcert": self.authority.certificate, "sslcert": certificate.file, "sslkey": certificate.key}
        facts = {"host": "localhost", "user": role, "dbname": DATABASE, "sslmode": "verify-full"}
        paths = {name: str(file) for name, file in files.items()}
        return make_conninfo(self.postgres_dsn, **{**facts, **paths, **changed})

    def certificate_of(self, role: str) -> Certificate:
        """Return a role's certificate, made at first use."""
        found = Certificate(*(self.authority.folder / f"{role}.{end}" for end in ("crt", "key")))
        return found if found.file.exists() else self.authority.sign(role)

    def environment(self, role: str, **changed: str) -> dict[str, str]:
        """Return the variables of a process of this role."""
        certificate = self.certificate_of(role)
        return {
            "MQLAYER_DSN": self.dsn(role),
            "MQLAYER_REDIS_USER": role,
            "MQLAYER_REDIS_PASSWORD_FILE": str(self._secret(role, password_of(role))),
            "MQLAYER_REDIS_CA_FILE": str(self.authority.certificate),
            "MQLAYER_REDIS_CERT_FILE": str(certificate.file),
            "MQLAYER_REDIS_KEY_FILE": str(certificate.key),
            "MQLAYER_BROKER_URL": f"rediss://localhost:{self.ports['broker']}/0",
            "MQLAYER_BROKER_USER": BROKER_USER,
            "MQLAYER_BROKER_PASSWORD_FILE": str(self._secret(BROKER_USER, BROKER_PASSWORD)),
            **changed,
        }

    def node_url(self, node: str, host: str = "localhost") -> str:
        """Return a node's address."""
        return f"rediss://{host}:{self.ports[node]}/0"

    def start_redis(self, name: str, certificate: Certificate, users: Sequence[str]) -> None:
        """Start a Redis that has no port without TLS."""
        place = self.home / name
        place.mkdir()
        (place / "users.acl").write_text("\n".join(["user default off ~* &* +@all", *users, ""]))
        port = self.ports[name] = free_port(0)
        options = {
            **DURABLE_OPTIONS, "port": "0", "tls-port": str(port), "tls-cert-file": str(certificate.file),
            "tls-key-file": str(certificate.key), "tls-ca-cert-file": str(self.authority.certificate),
            "tls-auth-clients": "yes", "dir": str(place), "aclfile": str(place / "users.acl"),
        }  # fmt: skip
        words = [word for option, value in options.items() for word in (f"--{option}", value)]
        self.start(f"redis-{name}", [str(redis_7_program().path), *words])
        wait_until(lambda: self._answers(port), what=f"{name} answers")

    def _answers(self, port: int) -> bool:
        with redis.Redis(port=port, ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False) as client:
            try:
                client.ping()
            except redis.ConnectionError as error:
                return "refused" not in str(error)
            except redis.RedisError:
                return True
        return True

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process that ends with the test; what it says goes to its log."""
        log = self.cleanup.enter_context((self.home / f"{name}.log").open("w"))
        process = subprocess.Popen(
            command, env=process_environment(environment or {}), cwd=COMPOSED, stdout=log, stderr=log
        )
        self.cleanup.callback(_end, process)

    def run(self, role: str, *words: str, **changed: str) -> subprocess.CompletedProcess[str]:
        """Run a command of mqlayer as a role; its output is a log too."""
        answer = subprocess.run(
            [sys.executable, "-m", "mqlayer", *words],
            env=process_environment(self.environment(role, **changed)),
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=60.0,
        )
        with (self.home / "commands.log").open("a") as log:
            log.write(answer.stdout + answer.stderr)
        return answer

    def operate(self, *words: str) -> str:
        """Run a command as the administrator; return what it says."""
        answer = self.run("mqlayer_admin", *words)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    def start_proxy(self, *, console: int, exporter: int) -> str:
        """Start nginx with TLS in front of both; return its address."""
        port = free_port(0)
        certificate = self.authority.sign("nginx", "localhost")
        place = self.home / "nginx"
        place.mkdir()
        settings = place / "nginx.conf"
        settings.write_text(
            NGINX.format(place=place, port=port, certificate=certificate.file, key=certificate.key, console=console,
                         exporter=exporter)
        )  # fmt: skip
        program = shutil.which("nginx")
        assert program is not None
        self.start("nginx", [program, "-e", str(place / "nginx.log"), "-c", str(settings), "-g", "daemon off;"])
        return f"https://localhost:{port}"

    def _secret(self, name: str, text: str) -> Path:
        file = self.home / f"{name}.secret"
        if not file.exists():
            file.touch(0o600)
            file.write_text(text)
        return file


@contextmanager
def tls_stage(home: Path, start_postgres: StartPostgres) -> Iterator[TlsStage]:
    """Lend the servers, with schemas, roles, nodes and a topic, all of it made over TLS."""
    home.mkdir()
    home.chmod(0o755)
    with ExitStack() as cleanup:
        stage = TlsStage(home, "", cleanup)
        stage.postgres_dsn = _start_postgres(stage, start_postgres)
        major, minor = redis_7_program().version[:2]
        version = (major, minor, 0)
        users = [
            acl_file_line(user, roles, prefix="mq", password=password_of(user), version=version)
            for user, roles in ROLES.items()
        ]
        for node in ("node-1", "node-2"):
            stage.start_redis(node, stage.authority.sign(node, "localhost"), users)
        digest = sha256(BROKER_PASSWORD.encode()).hexdigest()
        rule = f"user {BROKER_USER} on #{digest} ~* &* +@all -@admin -@dangerous +info"
        stage.start_redis("broker", stage.authority.sign("broker", "localhost"), [rule])
        stage.operate("migrate")
        for role, rights in RIGHTS.items():
            for right in rights:
                stage.operate("grant", right, role)
        for node in ("node-1", "node-2"):
            stage.operate("node", "register", node, stage.node_url(node))
        stage.operate("topic", "create", "orders")
        yield stage


def replace_postgres_certificate(stage: TlsStage, made: Certificate) -> None:
    """Let Postgres show another certificate from now on."""
    served = Certificate(*(stage.home / f"served.{end}" for end in ("crt", "key")))
    for kind, file in zip(("crt", "key"), made, strict=True):
        target = getattr(served, "file" if kind == "crt" else "key")
        target.write_bytes(file.read_bytes())
    with psycopg.connect(stage.postgres_dsn) as connection:
        connection.execute("SELECT pg_reload_conf()")


def _start_postgres(stage: TlsStage, start_postgres: StartPostgres) -> str:
    served = Certificate(*(stage.home / f"served.{end}" for end in ("crt", "key")))
    for source, target in zip(stage.authority.sign("postgres", "localhost"), served, strict=True):
        shutil.copy(source, target)
        target.chmod(0o600)
    hba = stage.home / "pg_hba.conf"
    hba.write_text(HBA)
    if (account := unprivileged_account()) is not None:
        for file in (*served, hba):
            os.chown(file, account.uid, account.gid)
    server = start_postgres(
        options={"fsync": "on", "ssl": "on", "ssl_cert_file": str(served.file), "ssl_key_file": str(served.key),
                 "ssl_ca_file": str(stage.authority.certificate), "hba_file": str(hba)},
    )  # fmt: skip
    dsn = server.create_database(DATABASE)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE ROLE mqlayer_admin LOGIN SUPERUSER")
        for role in RIGHTS:
            connection.execute(f"CREATE ROLE {role} LOGIN")
    return str(dsn)


def process_environment(changed: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that runs mqlayer from this tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MQLAYER_")}
    return {**kept, "PYTHONPATH": str(ROOT), **changed}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
