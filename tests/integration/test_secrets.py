"""No password, nor a part of one, is in anything that people or logs get to see, whatever characters it has.

Every secret here has the mark at both ends of its awkward part, so that a part of it that was taken for a host, a
database or an option is found too.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partialmethod
from typing import Any
from urllib.parse import quote

import pytest
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr
from typer.testing import CliRunner

from mqlayer import redaction
from mqlayer.cli.main import app
from mqlayer.domain.routing import NodeId
from mqlayer.errors import InvalidInput, MqlayerError, PublishAborted, StoreUnavailable
from mqlayer.logs import EventFormatter, JsonFormatter
from mqlayer.postgres.arrow_reader import ReadAddress
from mqlayer.postgres.database import Database, connect
from mqlayer.postgres.dsn import address_of, parse_dsn
from mqlayer.redaction import redact, register_secrets
from mqlayer.redis.access import access_here
from mqlayer.redis.addresses import check_broker_url, display_broker_url, display_url, parse_address
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.server_info import read_server_info
from mqlayer.settings import Settings
from mqlayer.stack import Addresses, GivenAddresses
from tests.fixtures.command_tree import leaf_commands
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.variants import some_of

MARK = "Zq"
AWKWARD = [
    "@",
    ":",
    "/",
    "?",
    "#",
    "%",
    "%40",
    " ",
    "'",
    '"',
    "\\",
    "=",
    "&",
    ";",
    ",",
    "ü",
    "🔑",
    "[",
    "]",
    "@host/",
    "=",
]
SECRETS = [f"{MARK}1{part}{MARK}2" for part in AWKWARD] + [f"12/{MARK}3", f"12?{MARK}4@{MARK}5", f"1:2@{MARK}6"]
NOWHERE = "127.0.0.1:1"
NEVER_ENDS = {"consume", "relay", "run"}
"""They wait for a Postgres that is away; what they say until then, their logs show, see below."""


@pytest.fixture(autouse=True)
def tracebacks_without_carets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carets below a line take a third of the time of these tests, and hold no text."""
    monkeypatch.setattr(traceback, "_get_code_position", lambda *_: (None, None, None, None), raising=False)


@pytest.fixture(autouse=True)
def known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know no secret of other tests, and leave them none to look for in each text."""
    monkeypatch.setattr(redaction, "_known", type(vars(redaction)["_known"])())


def dsns(secret: str) -> Iterator[str]:
    """Return the ways to write a DSN with this password, right and wrong ones."""
    encoded = quote(secret, safe="")
    for written in (secret, encoded):
        yield f"postgresql://bob:{written}@{NOWHERE}/bank"
        for name in ("password", "sslpassword"):
            yield f"postgresql://bob@{NOWHERE}/bank?{name}={written}"
            yield f"postgresql://bob:{written}@{NOWHERE}/bank?{name}={written}&connect_timeout=2"
    for name in ("password", "sslpassword"):
        yield make_conninfo("", host="127.0.0.1", port="1", dbname="bank", user="bob", **{name: secret})
        yield f"host=127.0.0.1 port=1 dbname=bank {name}={secret}"
        yield f"host=127.0.0.1 port=1 dbname=bank {name} = {secret} user=bob"


def redis_urls(secret: str) -> Iterator[str]:
    """Return the ways to write a Redis's URL with this password, right and wrong ones."""
    for written in (secret, quote(secret, safe="")):
        for user, scheme in itertools.product(("", "bob"), ("redis", "rediss")):
            yield f"{scheme}://{user}:{written}@{NOWHERE}/0"
            yield f"{scheme}://{NOWHERE}/0?password={written}"
            yield f"{scheme}://{NOWHERE}/0?ssl_password={written}"
        yield f"sentinel://bob:{written}@{NOWHERE}/service/0"
        yield f"sentinels://{NOWHERE}/service/0?password={written}"


def told_by(work: Callable[[], Any]) -> str:
    """Return all that is to be seen of a work and of the error that it ends with, also after a pickle."""
    try:
        return f"{work()!r}"
    except MqlayerError as error:
        found = pickle.loads(pickle.dumps(error))
        shown = [str(error), repr(error), str(found), repr(found), *traceback.format_exception(error)]
        return "\n".join([*shown, *logged("failed", error)])


def logged(event: str, error: BaseException) -> list[str]:
    """Return the log lines of an error, in both formats."""
    lines = []
    for formatter in (EventFormatter(), JsonFormatter()):
        record = logging.LogRecord("mqlayer", logging.ERROR, "x.py", 1, event, None, (type(error), error, None))
        record.reason = str(error)
        lines.append(formatter.format(record))
    return lines


def connected(dsn: str) -> None:
    with Database(dsn, timeout_s=0.01) as database, database.connection():
        pytest.fail("connected")


def called(url: str) -> None:
    with NodeConnection(Node(NodeId(1), "n1", url, None), any_run=True) as connection:
        connection.connect()


@pytest.mark.parametrize("secret", some_of(SECRETS, 3))
def test_nothing_that_is_said_of_a_postgres_holds_its_password(secret: str) -> None:
    ways: list[Callable[[str], Any]] = [
        connected,
        connect,
        address_of,
        Database,
        lambda dsn: Settings(dsn=SecretStr(dsn), app_dsn=SecretStr(dsn)),
        lambda dsn: str(Settings(dsn=SecretStr(dsn))),
        lambda dsn: ReadAddress(parse_dsn(dsn), str(parse_dsn(dsn).get("password"))),
        lambda dsn: Addresses(dsn, {}, "redis://h"),
        GivenAddresses,
    ]
    for dsn, way in itertools.product(dsns(secret), ways):
        assert MARK not in told_by(lambda dsn=dsn, way=way: way(dsn)), dsn  # type: ignore[misc]


@pytest.mark.parametrize("logs_in", some_of([False, True], 2), ids=["", "settings log in"])
@pytest.mark.parametrize("secret", some_of(SECRETS, 9))
def test_nothing_that_is_said_of_a_redis_holds_its_password(
    secret: str, logs_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if logs_in:
        monkeypatch.setenv("MQLAYER_REDIS_USER", "app")
        monkeypatch.setenv("MQLAYER_REDIS_PASSWORD", f"{MARK}own")
    ways: list[Callable[[str], Any]] = [
        called,
        display_url,
        display_broker_url,
        lambda url: read_server_info(url, timeout_s=0.2),
        lambda url: read_server_info(url, timeout_s=0.2, access=access_here()),
        lambda url: check_broker_url(url) and None,
        lambda url: len(parse_address(url)),
        lambda url: Node(NodeId(1), "n1", url, None),
        lambda url: Node(NodeId(1), "n1", url, None).address,
        lambda url: Settings(broker_url=SecretStr(url)),
        lambda url: Addresses("", {"n1": url}, url),
    ]
    for url, way in itertools.product(redis_urls(secret), ways):
        assert MARK not in told_by(lambda url=url, way=way: way(url)), url  # type: ignore[misc]


def test_a_password_that_is_written_right_is_taken_as_it_is() -> None:
    """What is refused is what could be meant otherwise, and nothing else."""
    for secret in SECRETS:
        encoded = quote(secret, safe="")
        assert parse_dsn(f"postgresql://bob:{encoded}@h:1/b")["password"] == secret
        assert parse_dsn(make_conninfo("", host="h", password=secret))["password"] == secret
        assert parse_dsn(f"postgresql://h:1/b?sslpassword={encoded}")["sslpassword"] == secret
        assert parse_address(f"redis://bob:{encoded}@h:1/0").url
        assert check_broker_url(f"redis://bob:{encoded}@h:1/0")
    for dsn in (
        "",
        "postgresql:///bank",
        "host=/run/postgresql dbname=x",
        "postgresql://a,b:1,2/x",
        "postgresql://[::1]/x",
    ):
        assert parse_dsn(dsn) is not None


@pytest.mark.parametrize("secret", ["p@ss", "12/ss", "p/ss", "p?s@s"])
def test_a_password_that_would_be_taken_for_a_host_is_refused_with_the_way_to_write_it(secret: str) -> None:
    with pytest.raises(InvalidInput, match="%40"):
        parse_dsn(f"postgresql://bob:{secret}@h/b")
    with pytest.raises(InvalidInput, match="%40"):
        parse_address(f"redis://bob:{secret}@h/0")
    with pytest.raises(InvalidInput, match="%40"):
        check_broker_url(f"redis://bob:{secret}@h/0")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers here, so nothing is worth a wait."""
    monkeypatch.setattr(Database, "__init__", partialmethod(Database.__init__, timeout_s=0.01))
    monkeypatch.setattr(Database, "close", lambda database: database._pool.close(timeout=0))


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", some_of(["encoded", "raw", "pairs"], 9))
def test_no_command_shows_a_password_of_the_settings(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    secret = "".join(f"{MARK}{number}{part}" for number, part in enumerate(AWKWARD))
    encoded = quote(secret, safe="") if way != "raw" else secret
    dsn = f"postgresql://bob:{encoded}@{NOWHERE}/bank?sslpassword={encoded}"
    if way == "pairs":
        dsn = make_conninfo("", host="127.0.0.1", port="1", user="bob", password=secret, sslpassword=secret)
    for name in ("MQLAYER_DSN", "MQLAYER_APP_DSN"):
        monkeypatch.setenv(name, dsn)
    monkeypatch.setenv("MQLAYER_BROKER_URL", f"redis://bob:{encoded}@{NOWHERE}/0?ssl_password={encoded}")
    monkeypatch.setenv("MQLAYER_REDIS_PASSWORD", secret)
    monkeypatch.chdir(tmp_path)
    reached = 0
    for arguments in leaf_commands(without=NEVER_ENDS):
        with monkeypatch.context() as patches:
            records = io.StringIO()
            patches.setattr(sys, "stderr", records)
            result = CliRunner().invoke(app, ["--log-level", "DEBUG", *arguments])
        told = result.output + records.getvalue() + "".join(traceback.format_exception(result.exception))
        assert MARK not in told, arguments
        reached += "is not available" in told or "can't be parsed" in told
    assert reached > 40


@pytest.mark.slow
@pytest.mark.parametrize("encode", [True, False])
def test_celery_shows_no_password_of_the_broker(encode: bool) -> None:
    for secret in ("".join(f"{MARK}{number}{part}" for number, part in enumerate(AWKWARD)), f"12/{MARK}3"):
        written = quote(secret, safe="") if encode else secret
        url = f"redis://bob:{written}@{NOWHERE}/0"
        celery = ("celery", "-A", "mqlayer.workers.app", "status", "--timeout", "0.2")
        done = ask_python(*celery, env={**os.environ, "MQLAYER_BROKER_URL": url})
        assert done.returncode != 0
        assert MARK not in done.stdout + done.stderr


def test_words_of_others_are_shown_without_the_secrets_that_were_given() -> None:
    secret = f"{MARK}'\\\"@ /ü"
    register_secrets(secret)
    for text in (secret, repr(secret), quote(secret), quote(secret, safe=""), make_conninfo("", password=secret)):
        assert MARK not in redact(f"driver says {text} and more")
    for text in (f"redis://:{MARK}@a:{MARK}@h/0", f"x?sslpassword={MARK}", f"ssl_password='{MARK} {MARK}' b"):
        assert MARK not in redact(text)
    assert redact("mqlayer: postgres at h:1/b is not available") == "mqlayer: postgres at h:1/b is not available"


def test_errors_hide_secrets_in_the_reasons_that_they_are_given() -> None:
    register_secrets(f"{MARK}7 x")
    for error in (StoreUnavailable("h", f"said {MARK}7 x"), PublishAborted("t", 1, f"said {MARK}7 x")):
        assert MARK not in str(error) + repr(error) + str(pickle.loads(pickle.dumps(error)))
