"""The whole system over TLS with certificates on both sides: run by the matrix on a Python that checks strictly."""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psycopg
import pytest

from mqlayer.stack.ports import free_port
from tests.fixtures.console_logins import PASSWORDS, SESSION, token_of, write_passwords
from tests.fixtures.servers import StartPostgres
from tests.fixtures.wait import wait_until
from tests.matrix.composed import ledger
from tests.matrix.tls_stage import (
    BROKER_PASSWORD,
    ROLES,
    TlsStage,
    password_of,
    replace_postgres_certificate,
    tls_stage,
)

pytestmark = [pytest.mark.xdist_group("tls"), pytest.mark.timeout(300)]

CHANGES = 200
ACCOUNTS = 10
NODES_ARMED = 'mqlayer_nodes{state="armed"} 2'
PLAIN = "SELECT usename FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE NOT ssl AND usename <> 'postgres'"
"""Sessions without TLS, but the test's own."""


@pytest.fixture
def stage(server_directory: Path, start_postgres: StartPostgres) -> Iterator[TlsStage]:
    with tls_stage(server_directory / f"tls-{os.urandom(4).hex()}", start_postgres) as made:
        yield made


def start_processes(stage: TlsStage) -> None:
    """Start relay, worker, beat and consumers."""
    celery = [sys.executable, "-m", "celery", "-A", "mqlayer.workers.app"]
    mqlayer = [sys.executable, "-m", "mqlayer"]
    worker, relay = stage.environment("mqlayer_worker"), stage.environment("mqlayer_relay")
    stage.start("relay", [*mqlayer, "relay"], relay)
    stage.start("worker", [*celery, "worker", "--loglevel", "INFO", "--concurrency", "1"], worker)
    schedule = str(stage.home / "schedule")
    stage.start("beat", [*celery, "beat", "--loglevel", "INFO", "--schedule", schedule], worker)
    stage.start("consume", [*mqlayer, "consume", "ledger:app"], stage.environment("mqlayer_client"))


def test_the_main_job_runs_over_tls_with_certificates_on_both_sides(stage: TlsStage) -> None:
    with psycopg.connect(stage.postgres_dsn) as connection:
        connection.execute(ledger.TABLES)
    start_processes(stage)
    with psycopg.connect(stage.dsn("mqlayer_client")) as connection:
        for number in range(CHANGES):
            with connection.transaction():
                ledger.change(connection, f"account-{number % ACCOUNTS}", number)
        row = connection.execute("SELECT ssl, client_dn FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        assert row == (True, "/CN=mqlayer_client")
    with psycopg.connect(stage.postgres_dsn, autocommit=True) as connection:
        wait_until(lambda: ledger.counts(connection) == (CHANGES, CHANGES), timeout_s=60.0, what="all are booked")
        assert ledger.faults(connection) == []
        plain = (
            "SELECT usename FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE NOT ssl AND usename <> 'postgres'"
        )
        assert connection.execute(plain).fetchall() == []
    worker = stage.home / "worker.log"
    wait_until(lambda: "succeeded" in worker.read_text(), timeout_s=60.0, what="a task came over the broker")
    for words in (["verify", "orders", "--deep", "--json"], ["doctor", "--json"]):
        findings = [json.loads(line) for line in stage.operate(*words).splitlines()]
        assert {one["verdict"] for one in findings} <= {"ok", "warning"}, findings
    check_logs(stage)


def check_logs(stage: TlsStage) -> None:
    """No log holds a password or a line of a key."""
    secrets = [BROKER_PASSWORD, *map(password_of, ROLES), *PASSWORDS.values()]
    for key in stage.authority.folder.glob("*.key"):
        secrets += key.read_text().splitlines()[1:-1]
    said = "".join(log.read_text(errors="replace") for log in stage.logs)
    assert "relay" in said
    assert [secret for secret in secrets if secret in said] == []


def test_the_console_and_the_exporter_are_reached_through_a_proxy_with_tls(stage: TlsStage) -> None:
    console, exporter = free_port(0), free_port(0)
    address = stage.start_proxy(console=console, exporter=exporter)
    passwords = write_passwords(stage.home / "console.passwords")
    words = ["--port", str(console), "--password-file", str(passwords), "--url", f"{address}/mq"]
    mqlayer = [sys.executable, "-m", "mqlayer"]
    by_proxy = ["--proxy-from", "127.0.0.1/32"]
    stage.start("console", [*mqlayer, "console", *words, *by_proxy], stage.environment("mqlayer_admin"))
    stage.start("exporter", [*mqlayer, "exporter", "--port", str(exporter)], stage.environment("mqlayer_viewer"))
    trusted = ssl.create_default_context(cafile=str(stage.authority.certificate))
    with httpx2.Client(verify=trusted, base_url=address, timeout=20.0) as browser:

        def is_up(path: str) -> bool:
            try:
                return browser.get(path).status_code == 200
            except httpx2.TransportError:
                return False

        wait_until(lambda: is_up("/mq/login"), timeout_s=60.0, what="the console answers")
        wait_until(lambda: is_up("/metrics"), timeout_s=60.0, what="the exporter answers")
        wait_until(
            lambda: NODES_ARMED in browser.get("/metrics").text, timeout_s=60.0, what="the nodes are on its page"
        )
        page = browser.get("/mq/login")
        form = {"token": token_of(page.text), "next": "/", "name": "ann", "password": PASSWORDS["ann"]}
        answer = browser.post("/mq/login", data=form)
        cookie = next(line for line in answer.headers.get_list("set-cookie") if SESSION.removeprefix("__Host-") in line)
        assert (answer.status_code, "Secure" in cookie, "HttpOnly" in cookie) == (303, True, True)
        assert answer.headers["location"].startswith(("/mq/", f"{address}/mq/"))
        assert "node-1" in browser.get("/mq/nodes").text
    with httpx2.Client(base_url=address) as stranger, pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY"):
        stranger.get("/mq/login")
    check_logs(stage)


def test_postgres_by_wrong_certificates_is_refused_with_what_to_do(stage: TlsStage) -> None:
    role = "mqlayer_viewer"
    stranger = stage.other.sign(role)
    late = stage.authority.sign("late", expired=True)
    cases = {
        "sslrootcert= of the DSN has to name": {"sslrootcert": str(stage.other.certificate)},
        "let the DSN name a host": {"host": "127.0.0.1"},
        "names the authority's certificate|name the authority's certificate": {"sslrootcert": "/nowhere/ca.crt"},
        "set sslcert= and sslkey= in the DSN": {"sslcert": "", "sslkey": ""},
        "let the DSN have sslmode=verify-full": {"sslmode": "disable"},
        "renew the certificate of sslcert=": {"sslcert": str(stranger.file), "sslkey": str(stranger.key)},
        "renew the certificate of sslcert=|": {"sslcert": str(late.file), "sslkey": str(late.key)},
        "has to be the certificate's CN": {"user": "mqlayer_relay"},
    }
    for advice, changed in cases.items():
        assert_refused(stage, advice, MQLAYER_DSN=stage.dsn(role, **changed))
    replace_postgres_certificate(stage, stage.authority.sign("expired", "localhost", expired=True))
    assert_refused(stage, "may not have expired")
    check_logs(stage)


def assert_refused(stage: TlsStage, advice: str, **changed: str) -> None:
    """A command ends with one line that says what to do."""
    answer = stage.run("mqlayer_viewer", "topic", "list", **changed)
    assert answer.returncode == 1
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    assert any(part and part in answer.stderr for part in advice.split("|")), f"{advice}: {answer.stderr}"


def test_a_node_by_wrong_certificates_is_refused_with_what_to_do(stage: TlsStage) -> None:
    role, files = "mqlayer_admin", ("MQLAYER_REDIS_CERT_FILE", "MQLAYER_REDIS_KEY_FILE")
    stranger, late = stage.other.sign(role), stage.authority.sign("late", expired=True)
    stage.start_redis("expired", stage.authority.sign("expired", "localhost", expired=True), [])
    node = stage.node_url("node-1")
    cases: list[tuple[str, str, dict[str, str]]] = [
        ("set MQLAYER_REDIS_CA_FILE", node, {"MQLAYER_REDIS_CA_FILE": str(stage.other.certificate)}),
        ("MQLAYER_REDIS_CA_FILE", node, {"MQLAYER_REDIS_CA_FILE": "/nowhere/ca.crt"}),
        ("a host that its certificate has", stage.node_url("node-1", "127.0.0.1"), {}),
        ("renew the server's certificate", stage.node_url("expired"), {}),
        ("MQLAYER_REDIS_CERT_FILE", node, dict.fromkeys(files, "")),
        ("MQLAYER_REDIS_CERT_FILE", node, dict(zip(files, map(str, stranger), strict=True))),
        ("MQLAYER_REDIS_CERT_FILE", node, dict(zip(files, map(str, late), strict=True))),
        ("rediss://", node.replace("rediss:", "redis:"), {}),
    ]
    for advice, url, changed in cases:
        answer = stage.run(role, "node", "register", "third", url, **changed)
        assert answer.returncode == 1
        assert advice in answer.stderr, f"{advice}: {answer.stderr}"
        assert len(answer.stderr.splitlines()) == 1, answer.stderr
    check_logs(stage)


def test_a_broker_by_a_wrong_authority_is_told_by_the_doctor(stage: TlsStage) -> None:
    broker = stage.environment("mqlayer_admin")["MQLAYER_BROKER_URL"]
    answer = stage.run("mqlayer_admin", "doctor", MQLAYER_BROKER_URL=broker.replace("localhost", "127.0.0.1"))
    assert answer.returncode == 1
    assert "a host that its certificate has" in answer.stdout
    check_logs(stage)
