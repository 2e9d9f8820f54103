"""Both servers over TLS, by certificates made here: right ones work end to end, wrong ones are refused."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
import redis
from psycopg.conninfo import make_conninfo

import mqlayer
from mqlayer.errors import AccessDenied, StoreUnavailable
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import migrate
from mqlayer.redis.access_errors import not_reached
from mqlayer.relay import relay_once
from mqlayer.stack.accounts import unprivileged_account
from mqlayer.stack.ports import free_port
from mqlayer.topics import create_topic, register_node
from tests.fixtures.certificates import Authority, authority
from tests.fixtures.servers import StartPostgres, StartRedis, redis_7_program
from tests.proof.runtimes import runtime_of

TOPIC = "orders"


@dataclass(frozen=True)
class Guarded:
    """Servers at `localhost`, the one name that their certificates have."""

    authority: Authority
    other: Authority
    dsn: str
    port: int

    def dsn_by(self, root: Authority, host: str = "localhost") -> str:
        return make_conninfo(self.dsn, host=host, sslmode="verify-full", sslrootcert=str(root.certificate))

    def url(self, host: str = "localhost") -> str:
        return f"rediss://{host}:{self.port}/0"


@pytest.fixture
def guarded(server_directory: Path, start_redis: StartRedis, start_postgres: StartPostgres) -> Guarded:
    home = server_directory / f"tls-{os.urandom(4).hex()}"
    home.mkdir()
    home.chmod(0o755)
    known, other = authority(home / "known"), authority(home / "other")
    certificate, key = known.sign("redis", "localhost")
    program = redis_7_program()
    port = free_port(0)
    start_redis(
        program=program,
        options={"tls-port": str(port), "tls-cert-file": str(certificate), "tls-key-file": str(key),
                 "tls-ca-cert-file": str(known.certificate), "tls-auth-clients": "yes"},
    )  # fmt: skip
    certificate, key = known.sign("postgres", "localhost")
    account = unprivileged_account()
    if account is not None:
        os.chown(key, account.uid, account.gid)
    server = start_postgres(options={"ssl": "on", "ssl_cert_file": str(certificate), "ssl_key_file": str(key)})
    return Guarded(known, other, server.create_database("tls"), port)


@pytest.fixture
def client_certificate(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    certificate, key = guarded.authority.sign("client", "client")
    monkeypatch.setenv("MQLAYER_REDIS_CA_FILE", str(guarded.authority.certificate))
    monkeypatch.setenv("MQLAYER_REDIS_CERT_FILE", str(certificate))
    monkeypatch.setenv("MQLAYER_REDIS_KEY_FILE", str(key))
    return guarded


def test_a_message_goes_from_its_transaction_to_its_receiver_over_verified_tls(
    client_certificate: Guarded, key_prefix: str
) -> None:
    guarded = client_certificate
    dsn = guarded.dsn_by(guarded.authority)
    migrate(dsn)
    with Database(dsn) as database:
        assert register_node(runtime_of(database), name="n1", url=guarded.url()).url == guarded.url()
        create_topic(runtime_of(database, key_prefix, application=database), TOPIC)
    settings = mqlayer.Settings(dsn=dsn, key_prefix=key_prefix)  # type: ignore[arg-type]  # pydantic makes it a secret
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT mqlayer_app.publish_v1(%s, 'k', 'outboxed', NULL)", (TOPIC,))
        row = connection.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        assert row == (True,)
    assert relay_once(settings) == 1
    with mqlayer.Producer(settings) as producer:
        producer.send(TOPIC, body=b"direct", key="k")
    with mqlayer.Receiver(TOPIC, group="g", settings=settings) as receiver:
        found = [message.body for message in receiver.receive(wait_s=20.0)]
    assert set(found) == {b"outboxed", b"direct"}


def test_a_node_by_an_authority_that_is_not_known_is_refused_with_what_to_set(
    client_certificate: Guarded, database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = client_certificate
    monkeypatch.setenv("MQLAYER_REDIS_CA_FILE", str(guarded.other.certificate))
    with Database(database_dsn) as database:
        with pytest.raises(AccessDenied, match="MQLAYER_REDIS_CA_FILE"):
            register_node(runtime_of(database), name="n1", url=guarded.url())
        monkeypatch.delenv("MQLAYER_REDIS_CA_FILE")
        with pytest.raises(AccessDenied, match="MQLAYER_REDIS_CA_FILE"):
            register_node(runtime_of(database), name="n1", url=guarded.url())
        monkeypatch.setenv("MQLAYER_REDIS_CA_FILE", "/nowhere/ca.crt")
        with pytest.raises(AccessDenied, match="/nowhere/"):
            register_node(runtime_of(database), name="n1", url=guarded.url())


def test_a_node_under_a_name_that_its_certificate_does_not_have_is_refused_with_what_to_do(
    client_certificate: Guarded, database_dsn: str
) -> None:
    with Database(database_dsn) as database, pytest.raises(AccessDenied, match="a host that its certificate has"):
        register_node(runtime_of(database), name="n1", url=client_certificate.url("127.0.0.1"))


def test_a_node_that_wants_a_certificate_says_so(
    client_certificate: Guarded, database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MQLAYER_REDIS_CERT_FILE")
    monkeypatch.delenv("MQLAYER_REDIS_KEY_FILE")
    with Database(database_dsn) as database, pytest.raises(StoreUnavailable) as refused:
        register_node(runtime_of(database), name="n1", url=client_certificate.url())
    assert "MQLAYER_REDIS_CERT_FILE" in str(refused.value)


@pytest.mark.parametrize(
    "reason",
    [
        "Error 8 while writing to socket. EOF occurred in violation of protocol (_ssl.c:2427).",
        "Error 104 while writing to socket. Connection reset by peer.",
        "Error 32 while writing to socket. Broken pipe.",
        "Error while reading from localhost:1 : (104, 'Connection reset by peer')",
        "Connection closed by server.",
        "Error while reading from localhost:1 : (1, '[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] certificate required')",
    ],
)
def test_each_way_in_which_a_server_ends_a_connection_without_a_certificate_says_so(reason: str) -> None:
    """Which one it is, the server's and the client's next write decide between them."""
    error = redis.ConnectionError(reason)
    assert "MQLAYER_REDIS_CERT_FILE" in str(not_reached("rediss://localhost:1/0", error, anonymous=True))
    if "certificate required" not in reason:
        assert "renew the certificate" in str(not_reached("rediss://localhost:1/0", error))
        assert "MQLAYER_REDIS_CERT_FILE" not in str(not_reached("redis://localhost:1/0", error))


@pytest.mark.parametrize(
    "reason",
    ["CA cert does not include key usage extension", "Missing Authority Key Identifier",
     "Basic Constraints of CA cert not marked critical"],
)  # fmt: skip
def test_certificates_that_python_3_13_refuses_say_what_they_lack(reason: str) -> None:
    error = redis.ConnectionError(f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {reason} (_ssl.c:1130)")
    with pytest.raises(AccessDenied, match="an authority's certificate needs keyUsage"):
        raise not_reached("rediss://localhost:1/0", error)


@pytest.mark.slow
def test_a_postgres_by_another_authority_or_under_another_name_is_refused(guarded: Guarded) -> None:
    for dsn, reason in (
        (guarded.dsn_by(guarded.other), "certificate verify failed"),
        (guarded.dsn_by(guarded.authority, "127.0.0.1"), "does not match host name"),
    ):
        with (
            pytest.raises(StoreUnavailable, match=reason),
            Database(dsn, timeout_s=3.0) as database,
            database.connection(),
        ):
            pytest.fail("it was let in")
