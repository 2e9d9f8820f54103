"""Addresses of nodes, and runs: pure rules."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
from psycopg import pq

from mqlayer.domain.node_runs import is_former, run_of
from mqlayer.errors import InvalidInput
from mqlayer.postgres.dsn import address_of
from mqlayer.redis.addresses import parse_address, refuse_secrets


def test_a_sentinel_address_is_taken_apart() -> None:
    url = "sentinel://h1,h2:26380/orders/2?socket_timeout=3"
    address = parse_address(url)
    assert address.url == "redis://h1:26379/2?socket_timeout=3"
    assert address.sentinels is not None
    assert address.sentinels.hosts == (("h1", 26379), ("h2", 26380))
    assert address.sentinels.service == "orders"


@pytest.mark.parametrize("scheme", ["sentinels", "rediss+sentinel"])
def test_tls_has_schemes_of_its_own(scheme: str) -> None:
    assert parse_address(f"{scheme}://[::1]:5/orders").url == "rediss://[::1]:5/0"


@pytest.mark.parametrize(
    "url",
    ["http://:secret@h", "sentinel://:secret@h", "sentinel://:secret@h/0", "sentinel://:secret@h:x/orders",
     "sentinel://:secret@h/orders/db", "redis://:secret@h:port/0"],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_address(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["redis://u:secret@h/0", "redis://:secret@h/0", "redis://secret@h/0", "redis://h/0?password=secret",
     "redis://h/0?username=secret", "redis://h/0?ssl_password=secret", "rediss://u:sec@ret@h/0",
     "sentinel://:secret@h1,h2/orders", "sentinel://h1/orders/0?sentinel_password=secret",
     "redis://h/0?credential_provider=secret"],
)  # fmt: skip
def test_an_address_with_a_user_or_a_password_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        refuse_secrets(url)
    assert "MQLAYER_REDIS_USER" in str(caught.value)
    assert "sec" not in str(caught.value)


@pytest.mark.parametrize("option", ["ssl_cert_reqs=none", "ssl_check_hostname=false"])
def test_an_address_can_not_turn_the_check_of_certificates_off(option: str) -> None:
    with pytest.raises(InvalidInput, match="MQLAYER_REDIS_CA_FILE"):
        refuse_secrets(f"rediss://h/0?{option}")


def test_a_process_that_was_promoted_again_is_another_run() -> None:
    never = {"run_id": "a", "master_replid2": "0" * 40}
    promoted = {"run_id": "a", "master_replid2": "9" * 40}
    assert run_of(never) == run_of({"run_id": "a"}) == "a"
    assert run_of(promoted) == "a/" + "9" * 12


@pytest.mark.parametrize(
    ("run", "armed", "former", "expected"),
    [
        ("a", "a", [], False),
        ("a", "b", ["a"], True),
        ("a/1", "b", ["a/1"], True),
        # Alone for an hour, it forgot whom it followed.
        ("a", "b", ["a/1"], True),
        # Promoted again since.
        ("a/2", "b/1", ["a/1", "a"], False),
        # The armed process itself.
        ("a", "a/1", ["a"], False),
        ("c", "b", ["a"], False),
        ("a", None, ["a"], True),
    ],
)
def test_an_old_primary_is_told_from_one_that_was_promoted_again(
    run: str, armed: str | None, former: list[str], expected: bool
) -> None:
    assert is_former(run, armed=armed, former=former) is expected


PARTS = ("host=127.0.0.1", "hostaddr=127.0.0.2", "port=1", "dbname=bank", "service=known")
VARIABLES = {"PGHOST": "127.0.0.3", "PGHOSTADDR": "127.0.0.4", "PGPORT": "2", "PGSERVICE": "known"}


@pytest.mark.parametrize("given", list(product([False, True], repeat=len(VARIABLES))))
def test_the_address_of_postgres_is_the_one_that_its_library_takes(
    given: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For each DSN of these parts, and each environment: a DSN, a service and variables can each decide."""
    services = tmp_path / "services"
    services.write_text("[known]\nhost=127.0.0.5\nport=3\n")
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    for there, (name, value) in zip(given, VARIABLES.items(), strict=True):
        if there:
            monkeypatch.setenv(name, value)
    for chosen in product([False, True], repeat=len(PARTS)):
        dsn = " ".join(part for there, part in zip(chosen, PARTS, strict=True) if there)
        # Nothing listens at these ports: the connection fails, and tells where it went.
        tried = pq.PGconn.connect_start(f"{dsn} connect_timeout=1".encode())
        # A name has an address besides, and a socket of this machine counts as localhost.
        hosts = {"localhost" if name.startswith(b"/") else name.decode() for name in (tried.host, tried.hostaddr)}
        port = tried.port.decode()
        tried.finish()
        shown = address_of(dsn)
        if shown.startswith("postgres at "):
            place = shown.removeprefix("postgres at ").partition("/")[0]
            by_service = hosts if "service" in dsn or given[3] else set()
            assert place in {f"{host}:{port}" for host in hosts} | by_service, (dsn, shown)
        else:
            assert shown == "postgres of service known" + (", database bank" if "dbname" in dsn else "")
            assert "service" in dsn or given[3]


def test_a_service_whose_name_may_be_something_else_is_not_shown() -> None:
    assert "s3cret" not in address_of("service='x password=s3cret'")
